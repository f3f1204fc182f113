"""Small clusters: every way to put a handful of units into stages, not only consecutive or equal ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product, takewhile
from operator import itemgetter

import numpy as np

from hethub.planner.candidate.candidate import Candidate, to_candidate
from hethub.planner.candidate.samples import one_moved
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.equal import Arrangements, Stages, cut_equally
from hethub.planner.generate.table import Table
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


@dataclass(frozen=True)
class _Arrangement:
    """An ordered partition of a combination's units, with its balanced cut."""

    problem: Problem
    combination: Combination
    examples: tuple[Unit, ...]  # a unit of every sort
    composition: Composition
    layers: Layers

    def candidate(self, layers: Layers) -> Candidate:
        """Of a cut."""
        units = [
            [unit for unit, number in zip(self.examples, counts, strict=True) for _ in range(number)]
            for counts in self.composition
        ]
        return to_candidate(self.problem, zip(layers, units, strict=True), self.combination)


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

    # No partition of a combination takes less than its bound.
    rows = np.flatnonzero((table.units <= MOST_UNITS) & (table.bound < limit_seconds)).tolist()
    cut = [own for row in rows for own in _cut(problem, table, row, CUT_ERR * limit_seconds)]
    arrangements = sorted(cut, key=itemgetter(0))
    for first in range(0, len(arrangements), AT_ONCE):
        near = takewhile(lambda own: own[0] < CUT_ERR * shortest, arrangements[first : first + AT_ONCE])
        some = [arrangement for _, arrangement in near]
        balanced = {arrangement.candidate(arrangement.layers): arrangement for arrangement in some}
        costs.estimate(balanced)
        yield from map(noted, balanced)
        moved = [of for candidate, of in balanced.items() if costs.seconds(candidate) <= WORTH_MOVING * shortest]
        costs.estimate(of.candidate(cut) for of in moved for cut in one_moved(of.layers, least=1))
        for of in moved:
            yield from map(noted, _downhill(of, costs))
        if estimated > MOST_ESTIMATED:
            return


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
        layers = tuple(cuts.layers[stages.at(index)].tolist())
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
