"""Lines cut into stages of equally many replicas: the best layers per stage, exactly, for thousands of settings.

With the units of every stage given, a stage's busy time is linear in its layers, so the smallest deadline that holds
all layers follows by bisection.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hethub.planner.costs import Rate, UnitCosts
from hethub.planner.footprint import FIRST, LAST, MIDDLE, ONLY, Coefficients
from hethub.planner.problem import Combination, Problem, Unit
from hethub.planner.samples import Worker, earliest_finish


class Cut(NamedTuple):
    """Layers of every stage and the estimated step."""

    layers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Sorts:
    """The sorts of units of a combination as arrays: seconds per sample and memory coefficients of each."""

    examples: tuple[Unit, ...]
    counts: np.ndarray
    layer: np.ndarray  # seconds per sample
    embedding: np.ndarray
    head: np.ndarray
    tile: np.ndarray  # seconds of one layer of one micro-batch
    capacity: np.ndarray  # bytes
    memory: Coefficients  # each [sort, position]
    mixed: dict[tuple[int, ...], float] = field(
        default_factory=dict
    )  # seconds per layer by counts, as they are asked for

    @property
    def rate(self) -> float:
        """Layer-samples per second of all units together."""
        return float((self.counts / self.layer).sum())

    def room_for(self, layers: int, replicas: int, sharded: bool) -> bool:
        """Whether all stages together could hold the layers if only one tile were held and nothing but layers: what
        fails here needs no cut. A stage that straddles sorts counts in full for each."""
        state = self.memory.state_layer[:, MIDDLE] / (replicas if sharded else 1)
        per_layer = self.memory.layer[:, MIDDLE] + self.memory.layer_tile[:, MIDDLE] + state
        stages = np.ceil(self.counts / replicas) + 1
        return bool((stages * self.capacity / per_layer).sum() >= layers)


def sorts_of(problem: Problem, costs: UnitCosts, combination: Combination) -> Sorts:
    """The sorts of units that a combination makes of the cluster."""
    examples, counts = [], []
    for kind, tp in enumerate(combination.degrees):
        for size, count in Counter(unit.tp for unit in problem.units(kind, tp)).items():
            examples.append(next(unit for unit in problem.units(kind, tp) if unit.tp == size))
            counts.append(count)
    sizes = np.array([combination.micro_batches[e.kind] for e in examples])
    rates: list[Rate] = [costs.rate(e, combination.micro_batches[e.kind], combination.recompute) for e in examples]
    held = [
        problem.coefficients(e.kind, e.tp, combination.micro_batches[e.kind], combination.recompute) for e in examples
    ]
    return Sorts(
        examples=tuple(examples),
        counts=np.array(counts),
        layer=np.array([rate.layer.total for rate in rates]) / sizes,
        embedding=np.array([rate.embedding.total for rate in rates]) / sizes,
        head=np.array([rate.head.total for rate in rates]) / sizes,
        tile=np.array([rate.layer.total for rate in rates]),
        capacity=np.array([problem.capacity(e.kind) for e in examples]),
        memory=Coefficients(*(np.array(parts) for parts in zip(*held, strict=True))),
    )


def cut_equally(problem: Problem, sorts: Sorts, composition: np.ndarray, *, memory_counts: bool) -> Cut | None:
    """The best layers for stages of the given `composition` [stage, sort] of replicas; None where nothing fits."""
    stages = composition.shape[0]
    if stages > problem.model.layers or int(composition.sum(axis=1).max()) > problem.batch.global_batch:
        return None
    most = _most_layers(problem, sorts, composition) if memory_counts else np.full(stages, problem.model.layers)
    if most.min() < 1 or most.sum() < problem.model.layers:
        return None
    per_layer, extra, latency = _linear(problem, sorts, composition)
    layers = _spread(problem.model.layers, per_layer, extra, most)
    deadline = float((per_layer * layers + extra).max())
    through = latency * layers
    return Cut(tuple(int(x) for x in layers), deadline + float(through.sum() - through.max()))


def _linear(problem: Problem, sorts: Sorts, composition: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per stage, busy seconds per layer and beyond the layers, and one tile's seconds per layer."""
    samples = problem.batch.global_batch
    present = composition > 0
    alone = present.sum(axis=1) == 1
    speed = (composition / sorts.layer).sum(axis=1)
    count = composition.sum(axis=1)
    # Samples come whole: alike replicas end with the one that has the most.
    rounding = np.where(alone, np.ceil(samples / count) * count / samples, 1.0)
    per_layer = samples / speed * rounding
    for stage in np.flatnonzero(~alone):
        per_layer[stage] = _mixed(samples, sorts, tuple(int(n) for n in composition[stage]))
    extra = np.zeros(composition.shape[0])
    extra[0] += per_layer[0] * float((composition[0] * sorts.embedding).sum() / (composition[0] * sorts.layer).sum())
    extra[-1] += per_layer[-1] * float((composition[-1] * sorts.head).sum() / (composition[-1] * sorts.layer).sum())
    latency = np.where(present, sorts.tile, 0.0).max(axis=1)
    return per_layer, extra, latency


def _mixed(samples: int, sorts: Sorts, counts: tuple[int, ...]) -> float:
    """Busy seconds per layer of a stage of unlike units, samples coming whole."""
    found = sorts.mixed.get(counts)
    if found is None:
        workers = []
        for sort, count in enumerate(counts):
            if count:
                b = round(sorts.tile[sort] / sorts.layer[sort])
                workers.append((Worker(b, tuple(float(sorts.layer[sort]) * (i + 1) for i in range(b))), count))
        found = sorts.mixed[counts] = earliest_finish(samples, workers)
    return found


def _most_layers(problem: Problem, sorts: Sorts, composition: np.ndarray) -> np.ndarray:
    """Per stage, the most layers that fit into every present sort's memory, tiles in flight by depth."""
    stages = composition.shape[0]
    held = np.arange(stages, 0, -1)[:, None]
    places = np.full(stages, MIDDLE)
    places[0], places[-1] = FIRST, LAST
    if stages == 1:
        places[0] = ONLY
    at = Coefficients(*(part[:, places].T for part in sorts.memory))
    replicas = composition.sum(axis=1)[:, None]
    shards = replicas if max(problem.zeros) > 0 else np.ones_like(replicas)
    per_layer = at.layer + held * at.layer_tile + at.state_layer / shards
    once = at.once + held * at.tile + at.state_once / shards
    most = np.floor((sorts.capacity - once) / per_layer)
    return np.where(composition > 0, most, np.inf).min(axis=1).clip(-1, problem.model.layers)


def _spread(total: int, per_layer: np.ndarray, extra: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Whole layers per stage, at least one and at most `most`, that sum to `total` with the smallest largest time."""

    def held(deadline: float) -> np.ndarray:
        return np.minimum(np.maximum(np.floor((deadline - extra) / per_layer + 1e-9), 1), most)

    low = (total + float((extra / per_layer).sum())) / float((1 / per_layer).sum())
    high = low + float(per_layer.max())
    while held(high).sum() < total:
        low, high = high, 1.3 * high
    for _ in range(24):
        middle = (low + high) / 2
        if held(middle).sum() >= total:
            high = middle
        else:
            low = middle
        if high - low < 1e-6 * high:
            break
    layers = held(high)
    while layers.sum() > total:
        layers[np.where(layers > 1, per_layer * layers + extra, -1.0).argmax()] -= 1
    return layers
