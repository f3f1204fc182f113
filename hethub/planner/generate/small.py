"""Small clusters: every way to put a handful of units into stages, not only consecutive or equal ones."""

import heapq
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count, islice, product
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import Candidate, to_candidate
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.equal import Arrangements, Stages, cut_equally
from hethub.planner.generate.table import Table, tabulate
from hethub.planner.problem.problem import Combination, Problem, Unit

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


class _Arrangement(NamedTuple):
    """An ordered partition with its balanced cut, the seconds of that without communication, and what makes candidates
    of cuts."""

    seconds: float
    layers: Layers
    make: Callable[[Layers], Candidate]


def propose(
    problem: Problem,
    costs: Estimator,
    *,
    table: Table | None = None,
    limit_seconds: float = float("inf"),
) -> Iterator[Candidate]:
    """Cuts of ordered partitions of few units, estimated: the partitions that can be fastest first, as long as these
    may be better than the limit and the estimates so far, until many were estimated."""
    table = tabulate(problem, costs.unit_costs) if table is None else table
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
        balanced = {arrangement.make(arrangement.layers): arrangement for arrangement in some}
        costs.estimate(balanced)
        yield from map(noted, balanced)
        near = [of for candidate, of in balanced.items() if costs.seconds(candidate) <= WORTH_MOVING * shortest]
        costs.estimate(of.make(cut) for of in near for cut in _near(of.layers))
        for of in near:
            yield from map(noted, _downhill(of.layers, of.make, costs))
        if estimated > MOST_ESTIMATED:
            return


def _in_order(problem: Problem, table: Table, shortest: Callable[[], float]) -> Iterator[_Arrangement]:
    """All arrangements that may be better than `shortest()`, those of the fewest seconds first. No partition of a
    combination takes less than its bound, so those of the next need not be cut before."""
    queue: list[tuple[float, int, _Arrangement]] = []
    number = count()  # where seconds are equal, who came first
    for row in np.nonzero(table.units <= MOST_UNITS)[0].tolist():
        while queue and queue[0][0] <= table.bound[row]:
            yield heapq.heappop(queue)[2]
        if table.bound[row] >= shortest():
            break
        for arrangement in _cut(problem, table, row, CUT_ERR * shortest()):
            heapq.heappush(queue, (arrangement.seconds, next(number), arrangement))
    while queue and queue[0][0] < CUT_ERR * shortest():
        yield heapq.heappop(queue)[2]


def _cut(problem: Problem, table: Table, row: int, limit: float) -> Iterator[_Arrangement]:
    """Every ordered partition of a combination that takes less than the limit, with its balanced cut."""
    combination, examples = table.combinations[row], table.examples[row]
    counts = tuple(table.counts[row, : len(examples)].tolist())
    allowed = [composition for composition in ordered_partitions(counts) if _is_allowed(problem, composition)]
    if not allowed:
        return
    stages = Stages(np.array([len(composition) for composition in allowed]))
    replicas = np.zeros((table.counts.shape[1], len(stages.of)), dtype=np.int64)
    replicas[: len(counts)] = np.concatenate(allowed).T
    own = Arrangements(np.full(len(allowed), row), stages, replicas)
    cuts = cut_equally(problem, table, own)
    for index in np.nonzero(cuts.seconds < limit)[0].tolist():
        layers = tuple(cuts.layers[stages.first[index] : stages.last[index] + 1].tolist())
        yield _Arrangement(float(cuts.seconds[index]), layers, _maker(problem, combination, examples, allowed[index]))


def _maker(
    problem: Problem, combination: Combination, examples: tuple[Unit, ...], composition: Composition
) -> Callable[[Layers], Candidate]:
    """What makes candidates of an ordered partition's cuts, each once."""

    @cache
    def made(layers: Layers) -> Candidate:
        units = [
            unit for counts in composition for unit, number in zip(examples, counts, strict=True) for _ in range(number)
        ]
        return to_candidate(problem, list(zip(layers, map(sum, composition), strict=True)), units, combination)

    return made


def _downhill(layers: Layers, make: Callable[[Layers], Candidate], costs: Estimator) -> Iterator[Candidate]:
    """The cuts with one layer moved, then those around the best of them while estimates fall: fill, drain and samples
    that cannot be divided count as well as balance."""
    seen = {layers: costs.seconds(make(layers))}
    while True:
        least = seen[layers]
        new = {near: make(near) for near in _near(layers) if near not in seen}
        costs.estimate(new.values())
        seen.update((near, costs.seconds(candidate)) for near, candidate in new.items())
        yield from new.values()
        layers = min(seen, key=seen.__getitem__)
        if seen[layers] >= least:
            return


def _is_allowed(problem: Problem, composition: Composition) -> bool:
    """Whether fixed degrees allow these stages."""
    given = problem.constraints
    return given.pp in (None, len(composition)) and all(given.dp in (None, sum(stage)) for stage in composition)


def _near(layers: Layers) -> Iterator[Layers]:
    """The cuts with one layer moved."""
    for giver in range(len(layers)):
        for taker in range(len(layers)):
            if giver != taker and layers[giver] > 1:
                yield tuple(x - (i == giver) + (i == taker) for i, x in enumerate(layers))
