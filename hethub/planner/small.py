"""Small clusters: every way to put a handful of units into stages, not only consecutive or equal ones."""

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np

from hethub.planner.cuts import ESTIMATE_ERR, Bounded
from hethub.planner.draft import Draft, DraftStage, Seat
from hethub.planner.equal import Sorts, cut_equally
from hethub.planner.problem import Combination, Problem, Unit

MOST_UNITS = 5

Composition = tuple[tuple[int, ...], ...]  # per stage, how many units of each sort


@cache
def ordered_partitions(counts: tuple[int, ...]) -> tuple[Composition, ...]:
    """All sequences of non-empty stages that use up `counts` units of each sort; equal units are not told apart."""
    if not any(counts):
        return ((),)
    found = []
    for stage in product(*(range(count + 1) for count in counts)):
        if any(stage):
            rest = tuple(count - used for count, used in zip(counts, stage, strict=True))
            found += [(stage, *tail) for tail in ordered_partitions(rest)]
    return tuple(found)


def small_drafts(problem: Problem, bounded: Bounded, best: float, memory_counts: bool) -> Iterator[Draft]:
    """The best cut of every ordered partition, for combinations of few units whose bound is below `best`."""
    constraints = problem.constraints
    for bound, combination, sorts in bounded:
        counts = tuple(int(count) for count in sorts.counts)
        if bound >= best or sum(counts) > MOST_UNITS:
            continue
        for composition in ordered_partitions(counts):
            if constraints.pp not in (None, len(composition)):
                continue
            if constraints.dp is not None and any(sum(stage) != constraints.dp for stage in composition):
                continue
            cut = cut_equally(problem, sorts, np.array(composition), memory_counts=memory_counts)
            if cut is None or cut.seconds > ESTIMATE_ERR * best:
                continue
            best = min(best, cut.seconds)
            for layers in _near(cut.layers):
                yield _draft(problem, combination, sorts, composition, layers)


def _near(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The balanced cut, and those with one layer moved: fill and drain count as well as balance."""
    yield layers
    for giver in range(len(layers)):
        for taker in range(len(layers)):
            if giver != taker and layers[giver] > 1:
                yield tuple(x - (i == giver) + (i == taker) for i, x in enumerate(layers))


def _draft(
    problem: Problem, combination: Combination, sorts: Sorts, composition: Composition, layers: tuple[int, ...]
) -> Draft:
    waiting: list[list[Unit]] = []
    for example in sorts.examples:
        same = problem.units(example.kind, combination.degrees[example.kind])
        waiting.append([unit for unit in same if unit.tp == example.tp])
    stages = []
    for counts, x in zip(composition, layers, strict=True):
        units = [waiting[sort].pop(0) for sort, count in enumerate(counts) for _ in range(count)]
        seats = tuple(Seat(u, combination.micro_batches[u.kind]) for u in sorted(units, key=lambda unit: unit.ranks))
        stages.append(DraftStage(x, seats, combination.recompute, max(problem.zeros)))
    return Draft(tuple(stages))
