"""Lines cut into stages of equally many replicas: the best layers per stage, exactly, for thousands of settings.

With the units of every stage given, a stage's busy time is linear in its layers, so the smallest deadline that holds
all layers follows by bisection.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hethub.planner.costs import Rate, UnitCosts
from hethub.planner.footprint import end_parameters, layer_parameters, tile_bytes
from hethub.planner.problem import Combination, Problem, Unit
from hethub.predictor.memory import FRAMEWORK_BYTES, FRAMEWORK_BYTES_ELSE, LOSS_CHUNK_TOKENS
from hethub.predictor.software import HETHUB, element_bytes


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
    layer_state: np.ndarray  # parameters of a layer on a rank
    first_state: np.ndarray
    last_state: np.ndarray
    layer_tile: np.ndarray  # bytes that a held tile keeps per layer
    once_tile: np.ndarray  # bytes besides
    logits: np.ndarray  # bytes of a chunk of the loss on the last stage

    @property
    def rate(self) -> float:
        """Layer-samples per second of all units together."""
        return float((self.counts / self.layer).sum())


def sorts_of(problem: Problem, costs: UnitCosts, combination: Combination) -> Sorts:
    """The sorts of units that a combination makes of the cluster."""
    examples, counts = [], []
    for kind, tp in enumerate(combination.degrees):
        for size, count in Counter(unit.tp for unit in problem.units(kind, tp)).items():
            examples.append(next(unit for unit in problem.units(kind, tp) if unit.tp == size))
            counts.append(count)
    sizes = np.array([combination.micro_batches[e.kind] for e in examples])
    rates: list[Rate] = [
        costs.rate(e, combination.micro_batches[e.kind], combination.recompute) for e in examples
    ]
    held = [tile_bytes(problem, e.tp, combination.micro_batches[e.kind], combination.recompute) for e in examples]
    reserve = problem.constraints.reserve
    limits = [problem.kinds[e.kind].memory_bytes * (1 - reserve) - _framework(problem, e) for e in examples]
    return Sorts(
        examples=tuple(examples),
        counts=np.array(counts),
        layer=np.array([rate.layer.total for rate in rates]) / sizes,
        embedding=np.array([rate.embedding.total for rate in rates]) / sizes,
        head=np.array([rate.head.total for rate in rates]) / sizes,
        tile=np.array([rate.layer.total for rate in rates]),
        capacity=np.array(limits),
        layer_state=np.array([layer_parameters(problem, e.tp) for e in examples]),
        first_state=np.array([end_parameters(problem, e.tp, True, False) for e in examples]),
        last_state=np.array([end_parameters(problem, e.tp, False, True) for e in examples]),
        layer_tile=np.array([h[0] for h in held]),
        once_tile=np.array([h[1] for h in held]),
        logits=np.array([_logits(problem, e, combination.micro_batches[e.kind]) for e in examples]),
    )


def _framework(problem: Problem, unit: Unit) -> int:
    return FRAMEWORK_BYTES.get(problem.kinds[unit.kind].accelerator.vendor, FRAMEWORK_BYTES_ELSE)


def _logits(problem: Problem, unit: Unit, micro_batch: int) -> float:
    wide = max(4, element_bytes(HETHUB.math_precision(problem.batch.precision)))
    return min(LOSS_CHUNK_TOKENS, micro_batch * problem.batch.seq_len) * problem.model.vocab / unit.tp * wide * 3


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
    extra = np.zeros(composition.shape[0])
    extra[0] += per_layer[0] * float((composition[0] * sorts.embedding).sum() / (composition[0] * sorts.layer).sum())
    extra[-1] += per_layer[-1] * float((composition[-1] * sorts.head).sum() / (composition[-1] * sorts.layer).sum())
    latency = np.where(present, sorts.tile, 0.0).max(axis=1)
    return per_layer, extra, latency


def _most_layers(problem: Problem, sorts: Sorts, composition: np.ndarray) -> np.ndarray:
    """Per stage, the most layers that fit into every present sort's memory, tiles in flight by depth."""
    stages = composition.shape[0]
    held = np.arange(stages, 0, -1)[:, None]
    width = element_bytes(HETHUB.math_precision(problem.batch.precision))
    wide = max(4, width)
    replicas = composition.sum(axis=1)[:, None]
    shards = replicas if max(problem.zeros) > 0 else np.ones_like(replicas)
    per_parameter = width + wide + ((wide if width < 4 else 0) + 2 * wide) / shards
    per_layer = sorts.layer_state * per_parameter + held * sorts.layer_tile
    once = np.broadcast_to(sorts.once_tile, per_layer.shape).copy()
    once[0] += sorts.first_state * per_parameter[0]
    once[-1] += sorts.last_state * per_parameter[-1] + sorts.logits
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
