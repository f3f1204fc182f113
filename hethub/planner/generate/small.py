"""Generate plans of small clusters: all ways to put a handful of units into stages, also unequal ones in any order."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product, repeat, takewhile
from operator import itemgetter

import numpy as np

from hethub.planner.candidate.candidate import Candidate, to_candidate
from hethub.planner.candidate.samples import one_moved
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.equal import Arrangements, Stages, cut_equally
from hethub.planner.generate.table import Table
from hethub.planner.problem.problem import Problem

MOST_UNITS = 5
MOST_ESTIMATED = 2_000  # candidates
AT_ONCE = 128  # arrangements
CUT_ERR = 1.15  # a balanced cut's seconds over those of the best one, estimated with communication
WORTH_MOVING = 1.2  # times the shortest estimate: balanced cuts whose layers are moved

Composition = tuple[tuple[int, ...], ...]  # per stage, how many units of each sort


@cache
def ordered_partitions(counts: tuple[int, ...]) -> tuple[Composition, ...]:
    """Return all sequences of non-empty stages that together use `counts` units of each sort. Equal units are not told
    apart."""
    if not any(counts):
        return ((),)
    found = []
    for stage in product(*(range(number + 1) for number in counts)):
        if any(stage):
            rest = tuple(number - used for number, used in zip(counts, stage, strict=True))
            found += [(stage, *tail) for tail in ordered_partitions(rest)]
    return tuple(found)


def propose(
    problem: Problem, costs: Estimator, table: Table, limit_seconds: float = float("inf")
) -> Iterator[Candidate]:
    """Yield cuts of all ordered partitions of few units, with their estimates computed.

    Partitions whose balanced cut is fastest come first. It ends when the next ones cannot beat `limit_seconds` and the
    estimates so far, or after MOST_ESTIMATED estimates."""
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
        balanced = list(dict.fromkeys(made() for _, made in near))
        costs.estimate(balanced)
        yield from map(noted, balanced)
        moved = [candidate for candidate in balanced if costs.seconds(candidate) <= WORTH_MOVING * shortest]
        costs.estimate(near for candidate in moved for near in _with_one_moved(candidate))
        for candidate in moved:
            yield from map(noted, _downhill(candidate, costs))
        if estimated > MOST_ESTIMATED:
            return


def _cut(problem: Problem, table: Table, row: int, limit: float) -> Iterator[tuple[float, Callable[[], Candidate]]]:
    """Yield the ordered partitions of a combination whose balanced cut takes less than `limit` seconds without communication,
    the fastest first: these seconds, and a function that makes the candidate."""
    combination, examples = table.combinations[row], table.examples[row]
    counts = tuple(table.counts[row, : len(examples)].tolist())
    allowed = [composition for composition in ordered_partitions(counts) if problem.allows(list(map(sum, composition)))]
    if not allowed:
        return
    stages = Stages(np.array([len(composition) for composition in allowed]))
    replicas = np.zeros((table.counts.shape[1], len(stages.of)), dtype=np.int64)
    replicas[: len(counts)] = np.concatenate(allowed).T
    cuts = cut_equally(problem, table, Arrangements(np.full(len(allowed), row), stages, replicas))

    def candidate(index: int) -> Candidate:
        units = [list(chain(*map(repeat, examples, numbers))) for numbers in allowed[index]]
        return to_candidate(problem, zip(cuts.layers[stages.at(index)].tolist(), units, strict=True), combination)

    ranked = np.argsort(cuts.seconds, kind="stable")
    for index in ranked[cuts.seconds[ranked] < limit].tolist():
        yield float(cuts.seconds[index]), partial(candidate, index)


def _downhill(candidate: Candidate, costs: Estimator) -> Iterator[Candidate]:
    """Yield the candidates with one layer moved, then those around the best of them, for as long as estimates fall. Balance is
    not all that counts: filling and draining the pipeline take time too, and samples cannot be divided."""
    seen = {candidate: costs.seconds(candidate)}
    while True:
        least = seen[candidate]
        new = [near for near in _with_one_moved(candidate) if near not in seen]
        seen.update(zip(new, costs.estimate(new), strict=True))
        yield from new
        candidate = min(seen, key=seen.__getitem__)
        if seen[candidate] >= least:
            return


def _with_one_moved(candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidates that differ from this one by one layer in another stage."""
    for layers in one_moved([stage.layers for stage in candidate.stages], least=1):
        each = enumerate(zip(candidate.stages, layers, strict=True))
        yield candidate.with_stages(
            {index: replace(stage, layers=x) for index, (stage, x) in each if x != stage.layers}
        )
