"""Small clusters: every way to put a handful of units into stages, not only consecutive or equal ones."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, product

import numpy as np

from hethub.planner.candidate.candidate import Candidate, to_candidate
from hethub.planner.candidate.samples import one_moved
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.equal import Arrangements, Stages, cut_equally
from hethub.planner.generate.table import Table
from hethub.planner.problem.problem import Combination, Problem, Unit
from hethub.predictor.cost.cache import memoized

MOST_UNITS = 5
MOST_ESTIMATED = 2_000  # candidates
AT_ONCE = 128  # arrangements
CUT_ERR = 1.15  # a balanced cut's seconds over those of the best one, estimated with communication
WORTH_MOVING = 1.2  # times the shortest estimate: balanced cuts whose layers are moved

Layers = tuple[int, ...]  # of every stage
Composition = tuple[tuple[int, ...], ...]  # per stage, how many units of each sort


@cache
def ordered_partitions(counts: tuple[int, ...]) -> tuple[Composition, ...]:
    """All sequences of non-empty stages that use up `counts` units of each sort; equal units are not told apart."""
    if not any(counts):
        return ((),)
    found = []
    for stage in product(*(range(number + 1) for number in counts)):
        if any(stage):
            rest = tuple(number - used for number, used in zip(counts, stage, strict=True))
            found += [(stage, *tail) for tail in ordered_partitions(rest)]
    return tuple(found)


@dataclass(frozen=True)
class _Arrangement:
    """An ordered partition of a combination's units, with its balanced cut."""

    problem: Problem
    combination: Combination
    examples: tuple[Unit, ...]  # a unit of every sort
    composition: Composition
    layers: Layers

    @memoized
    def candidate(self, layers: Layers) -> Candidate:
        """Of a cut."""
        units = [
            unit
            for counts in self.composition
            for unit, number in zip(self.examples, counts, strict=True)
            for _ in range(number)
        ]
        stages = list(zip(layers, map(sum, self.composition), strict=True))
        return to_candidate(self.problem, stages, units, self.combination)


# Seconds without communication, the combination, the arrangement, and the combination's others.
_Waiting = tuple[float, int, _Arrangement, Iterator[tuple[float, _Arrangement]]]


def propose(
    problem: Problem, costs: Estimator, table: Table, limit_seconds: float = float("inf")
) -> Iterator[Candidate]:
    """Cuts of ordered partitions of few units, estimated: the partitions that can be fastest first, as long as these
    may be better than the limit and the estimates so far, until many were estimated."""
    shortest, estimated = limit_seconds, 0

    def noted(candidate: Candidate) -> Candidate:
        nonlocal shortest, estimated
        estimate = costs.seconds(candidate)
        estimated += 1
        if estimate < shortest and costs.likely_fits(candidate):
            shortest = estimate
        return candidate

    arrangements = _in_order(problem, table, lambda: shortest)
    while some := list(islice(arrangements, AT_ONCE)):
        balanced = {arrangement.candidate(arrangement.layers): arrangement for arrangement in some}
        costs.estimate(balanced)
        yield from map(noted, balanced)
        near = [of for candidate, of in balanced.items() if costs.seconds(candidate) <= WORTH_MOVING * shortest]
        costs.estimate(of.candidate(cut) for of in near for cut in one_moved(of.layers, least=1))
        for of in near:
            yield from map(noted, _downhill(of, costs))
        if estimated > MOST_ESTIMATED:
            return


def _in_order(problem: Problem, table: Table, shortest: Callable[[], float]) -> Iterator[_Arrangement]:
    """All arrangements that may be better than `shortest()`, those of the fewest seconds first. No partition of a
    combination takes less than its bound, so those of the next need not be cut before."""
    queue: list[_Waiting] = []  # the next of every combination
    for row in np.nonzero(table.units <= MOST_UNITS)[0].tolist():
        while queue and queue[0][0] <= table.bound[row]:
            yield _first(queue)
        if table.bound[row] >= shortest():
            break
        _push(queue, row, _cut(problem, table, row, CUT_ERR * shortest()))
    while queue and queue[0][0] < CUT_ERR * shortest():
        yield _first(queue)


def _first(queue: list[_Waiting]) -> _Arrangement:
    """Takes the first arrangement out; where seconds are equal, that of the first combination."""
    _, row, arrangement, others = heapq.heappop(queue)
    _push(queue, row, others)
    return arrangement


def _push(queue: list[_Waiting], row: int, others: Iterator[tuple[float, _Arrangement]]) -> None:
    """Puts in the next of a combination's arrangements, if there is one."""
    for seconds, arrangement in islice(others, 1):
        heapq.heappush(queue, (seconds, row, arrangement, others))


def _cut(problem: Problem, table: Table, row: int, limit: float) -> Iterator[tuple[float, _Arrangement]]:
    """Every ordered partition of a combination that takes less than the limit, with its balanced cut, behind its seconds
    without communication; those of the fewest seconds first."""
    combination, examples = table.combinations[row], table.examples[row]
    counts = tuple(table.counts[row, : len(examples)].tolist())
    allowed = [composition for composition in ordered_partitions(counts) if problem.allows(list(map(sum, composition)))]
    if not allowed:
        return
    stages = Stages(np.array([len(composition) for composition in allowed]))
    replicas = np.zeros((table.counts.shape[1], len(stages.of)), dtype=np.int64)
    replicas[: len(counts)] = np.concatenate(allowed).T
    cuts = cut_equally(problem, table, Arrangements(np.full(len(allowed), row), stages, replicas))
    ranked = np.argsort(cuts.seconds, kind="stable")
    ranked = ranked[cuts.seconds[ranked] < limit]
    for index in ranked.tolist():
        layers = tuple(cuts.layers[stages.first[index] : stages.last[index] + 1].tolist())
        yield float(cuts.seconds[index]), _Arrangement(problem, combination, examples, allowed[index], layers)


def _downhill(of: _Arrangement, costs: Estimator) -> Iterator[Candidate]:
    """The cuts with one layer moved, then those around the best of them while estimates fall: fill, drain and samples
    that cannot be divided count as well as balance."""
    layers = of.layers
    seen = {layers: costs.seconds(of.candidate(layers))}
    while True:
        least = seen[layers]
        new = {near: of.candidate(near) for near in one_moved(layers, least=1) if near not in seen}
        costs.estimate(new.values())
        seen.update((near, costs.seconds(candidate)) for near, candidate in new.items())
        yield from new.values()
        layers = min(seen, key=seen.__getitem__)
        if seen[layers] >= least:
            return
