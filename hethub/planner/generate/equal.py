"""Give each stage its best number of layers, for thousands of arrangements of replicas at once.

Once the replicas of each stage are given, its busy time is linear in its layers. So bisection finds the smallest deadline
within which all layers can be held. Arrangements differ in their number of stages; arrays [stage] hold the stages of one
arrangement after those of another.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.samples import earliest_finish
from hethub.planner.estimate.memory_model import FIRST, LAST, MIDDLE, ONLY, Coefficients
from hethub.planner.generate.table import Table
from hethub.planner.problem.problem import Problem


@dataclass(frozen=True)
class Stages:
    """Which entries of arrays [stage] belong to which arrangement, if arrangements have `numbers` [arrangement] stages."""

    numbers: np.ndarray

    @cached_property
    def first(self) -> np.ndarray:
        """The index of each arrangement's first stage."""
        return np.cumsum(self.numbers) - self.numbers

    @cached_property
    def last(self) -> np.ndarray:
        """The index of each arrangement's last stage."""
        return np.cumsum(self.numbers) - 1

    def at(self, arrangement: int) -> slice:
        """Return where the stages of one arrangement are."""
        return slice(self.first[arrangement], self.last[arrangement] + 1)

    @cached_property
    def of(self) -> np.ndarray:
        """The arrangement of each stage."""
        return np.repeat(np.arange(len(self.numbers)), self.numbers)

    @cached_property
    def before(self) -> np.ndarray:
        """How many stages of its arrangement come before each stage."""
        return np.arange(len(self.of)) - self.first[self.of]


@dataclass(frozen=True)
class Arrangements:
    """Combinations arranged in stages: `rows` [arrangement] are the combinations, and `composition` [sort, stage] counts the
    replicas of each sort."""

    rows: np.ndarray
    stages: Stages
    composition: np.ndarray

    @cached_property
    def replicas(self) -> np.ndarray:
        """The number of replicas of each stage."""
        return self.composition.sum(axis=0)

    def only(self, chosen: np.ndarray) -> "Arrangements":
        """Return the arrangements for which `chosen` [arrangement] is true."""
        composition = self.composition.compress(chosen.take(self.stages.of), axis=1)
        return Arrangements(self.rows[chosen], Stages(self.stages.numbers[chosen]), composition)


class Cuts(NamedTuple):
    """The layers of each stage [stage] and the estimated steps [arrangement], infinite where nothing fits."""

    layers: np.ndarray
    seconds: np.ndarray


def cut_equally(problem: Problem, table: Table, own: Arrangements) -> Cuts:
    """Return the best layers of each stage, and the steps."""
    total, stages = problem.model.layers, own.stages
    cuts = Cuts(np.zeros(len(stages.of), dtype=np.int64), np.full(len(own.rows), np.inf))
    most = _most_layers(problem, table, own) if table.memory_counts else np.full(len(stages.of), float(total))
    able = stages.numbers <= total
    able &= np.minimum.reduceat(most, stages.first) >= 1
    able &= np.add.reduceat(most, stages.first) >= total
    able &= np.maximum.reduceat(own.replicas, stages.first) <= problem.batch.global_batch
    if not able.any():
        return cuts
    kept = able.take(stages.of)
    own, most = own.only(able), most[kept]
    per_layer, extra, latency = _linear(problem, table, own)
    found = _spread(total, own.stages, per_layer, extra, most)
    busy, through = per_layer * found + extra, latency * found
    first = own.stages.first
    cuts.layers[kept] = found
    cuts.seconds[able] = (
        np.maximum.reduceat(busy, first) + np.add.reduceat(through, first) - np.maximum.reduceat(through, first)
    )
    return cuts


def _linear(problem: Problem, table: Table, own: Arrangements) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays [stage]: busy seconds per layer, busy seconds beside the layers, and the seconds per layer of one
    microbatch."""
    samples, composition, rows = problem.batch.global_batch, own.composition, own.rows[own.stages.of]
    present = composition > 0
    layer = np.where(present, table.layer.T.take(rows, axis=1), 0.0)  # [sort, stage]
    # Samples come whole: alike replicas end with the one that has the most.
    per_layer = np.ceil(samples / own.replicas) * layer.sum(axis=0)
    mixed = np.flatnonzero(present.sum(axis=0) > 1)
    if len(mixed):
        numbers = composition.take(mixed, axis=1)
        per_layer[mixed] = earliest_finish(samples, table.layer[rows[mixed]], numbers.T)
    extra = np.zeros(len(rows))
    for stage, figures in ((own.stages.first, table.embedding), (own.stages.last, table.head)):
        numbers = composition.take(stage, axis=1)
        part = (numbers * figures[own.rows].T).sum(axis=0) / (numbers * layer.take(stage, axis=1)).sum(axis=0)
        extra[stage] += per_layer[stage] * part
    latency = np.where(present, table.microbatch.T.take(rows, axis=1), 0.0).max(axis=0)
    return per_layer, extra, latency


def _most_layers(problem: Problem, table: Table, own: Arrangements) -> np.ndarray:
    """Return the most layers [stage] that fit into the memory of all sorts present, with as many microbatches in flight as
    there are stages from this one on."""
    stages = own.stages
    place = np.full(len(stages.of), MIDDLE)
    place[stages.first], place[stages.last] = FIRST, LAST
    place[stages.first[stages.numbers == 1]] = ONLY
    held = stages.numbers[stages.of] - stages.before
    shards = own.replicas if problem.usual_zero > 0 else np.ones_like(own.replicas)
    rows = own.rows[stages.of]
    _, num_sorts, num_places = table.memory.once.shape
    memory = [part.ravel() for part in table.memory]
    most = np.full(len(rows), float(problem.model.layers))
    for sort, replicas in enumerate(own.composition):
        stage = np.flatnonzero(replicas)
        row, microbatches, shared = rows.take(stage), held.take(stage), shards.take(stage)
        at = (row * num_sorts + sort) * num_places + place.take(stage)
        own_memory = Coefficients(*(part.take(at) for part in memory))
        fitting = own_memory.most_layers(microbatches, shared, table.capacity[:, sort].take(row))
        most[stage] = np.minimum(most.take(stage), np.floor(fitting))
    return most


def _spread(total: int, stages: Stages, per_layer: np.ndarray, extra: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Return whole numbers of layers [stage], from one to `most`, that sum to `total` in each arrangement and make its busiest
    stage as little busy as possible."""

    def held(deadline: np.ndarray) -> np.ndarray:
        return np.minimum(np.maximum(np.floor((deadline.take(stages.of) - extra) / per_layer + 1e-9), 1), most)

    def sums(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, stages.first)

    low = (total + sums(extra / per_layer)) / sums(1 / per_layer)
    high = low + np.maximum.reduceat(per_layer, stages.first)
    while (short := sums(held(high)) < total).any():
        low, high = np.where(short, high, low), np.where(short, 1.3 * high, high)
    while ((high - low) > ROUGHLY * high).any():
        middle = (low + high) / 2
        enough = sums(held(middle)) >= total
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    layers = held(high)
    while (surplus := sums(layers) - total).any():
        # One from the stage that ends last, the first among equals.
        ends = np.where((layers > 1) & (surplus > 0).take(stages.of), per_layer * layers + extra, -np.inf)
        last = np.flatnonzero(np.isfinite(ends) & (ends == np.maximum.reduceat(ends, stages.first).take(stages.of)))
        layers[last[np.unique(stages.of[last], return_index=True)[1]]] -= 1
    return layers.astype(np.int64)


ROUGHLY = 1e-3  # how near the deadline is bisected; what it leaves too many of is taken away
