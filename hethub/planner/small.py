"""Small clusters: every way to put a handful of units into stages, not only consecutive or equal ones."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import groupby, product

import numpy as np

from hethub.planner.cuts import ESTIMATE_ERR
from hethub.planner.draft import Draft, DraftStage, Seats, merged
from hethub.planner.equal import Arrangements, Stages, cut_equally
from hethub.planner.problem import Combination, Problem, Unit
from hethub.planner.surrogate import Surrogate
from hethub.planner.table import Table

MOST_UNITS = 5
MOST_WEIGHED = 8_000  # drafts

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


def small_drafts(
    problem: Problem, table: Table, surrogate: Surrogate, best: float, memory_counts: bool
) -> Iterator[tuple[Draft, float]]:
    """The best cut of every ordered partition with its estimate, for combinations of few units whose bound is below `best`
    and the estimates so far, the smallest bounds first, until very many were weighed."""
    weighed = 0
    for row in np.nonzero((table.units <= MOST_UNITS) & (table.bound < best))[0]:
        if table.bound[row] >= best or weighed > MOST_WEIGHED:
            return
        combination, examples = table.combinations[row], table.examples[row]
        counts = tuple(int(count) for count in table.counts[row, : len(examples)])
        allowed = [c for c in ordered_partitions(counts) if _is_allowed(problem, c)]
        for _, group in groupby(sorted(allowed, key=len), key=len):
            same = list(group)
            composition = np.zeros((table.counts.shape[1], len(same) * len(same[0])), dtype=np.int64)
            composition[: len(counts)] = np.array(same).reshape(-1, len(counts)).T
            own = Arrangements(np.full(len(same), row), Stages(np.full(len(same), len(same[0]))), composition)
            cuts = cut_equally(problem, table, own, memory_counts=memory_counts)
            # These seconds know no communication, which tells small clusters' plans apart: `best` are estimates.
            near = [
                index
                for index, seconds in enumerate(cuts.seconds)
                if np.isfinite(seconds) and seconds <= ESTIMATE_ERR * best
            ]
            starts = [tuple(cuts.layers.reshape(len(same), -1)[index].tolist()) for index in near]
            makers = [cache(partial(_draft, problem, combination, examples, same[index])) for index in near]
            surrogate.weigh(make(cut) for make, layers in zip(makers, starts, strict=True) for cut in _near(layers))
            for make, layers in zip(makers, starts, strict=True):
                for draft, estimate in _downhill(layers, make, surrogate):
                    weighed += 1
                    if estimate < best and surrogate.likely_fits(draft):
                        best = estimate
                    yield draft, estimate


def _downhill(
    layers: tuple[int, ...], make: Callable[[tuple[int, ...]], Draft], surrogate: Surrogate
) -> Iterator[tuple[Draft, float]]:
    """The balanced cut and all with one layer moved, then those around the best of them while estimates fall: fill, drain
    and samples that cannot be divided count as well as balance."""
    seen: dict[tuple[int, ...], float] = {}
    least = float("inf")
    while True:
        new = {near: make(near) for near in _near(layers) if near not in seen}
        surrogate.weigh(new.values())
        for near, draft in new.items():
            seen[near] = surrogate.seconds(draft)
            yield draft, seen[near]
        layers = min(seen, key=seen.__getitem__)
        if seen[layers] >= least:
            return
        least = seen[layers]


def _is_allowed(problem: Problem, composition: Composition) -> bool:
    """Whether fixed degrees allow these stages."""
    given = problem.constraints
    return given.pp in (None, len(composition)) and all(given.dp in (None, sum(stage)) for stage in composition)


def _near(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The cut, and those with one layer moved."""
    yield layers
    for giver in range(len(layers)):
        for taker in range(len(layers)):
            if giver != taker and layers[giver] > 1:
                yield tuple(x - (i == giver) + (i == taker) for i, x in enumerate(layers))


def _draft(
    problem: Problem,
    combination: Combination,
    examples: tuple[Unit, ...],
    composition: Composition,
    layers: tuple[int, ...],
) -> Draft:
    stages = []
    for counts, x in zip(composition, layers, strict=True):
        seats = [
            Seats(unit.kind, unit.tp, combination.micro_batches[unit.kind], count)
            for unit, count in zip(examples, counts, strict=True)
        ]
        stages.append(DraftStage(x, merged(seats), combination.recompute, problem.usual_zero))
    return Draft(tuple(stages))
