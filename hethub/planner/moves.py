"""Small changes of a draft: the neighbours that local search looks at."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from hethub.planner.draft import Draft, DraftStage, Seat
from hethub.planner.problem import Problem

MOST_NUDGED = 8  # accelerators: beyond, samples stay divided by speed
MOST_PAIRED = 8  # stages: beyond, only the slowest stage is paired with the others


def neighbours(draft: Draft, problem: Problem, slowest: int) -> Iterator[Draft]:
    """Every draft one change away; with many stages, those that change the `slowest` or all."""
    count = len(draft.stages)
    if count <= MOST_PAIRED:
        pairs = list(combinations(range(count), 2))
    else:
        pairs = [(min(slowest, other), max(slowest, other)) for other in range(count) if other != slowest]
    yield from _layers(draft, pairs)
    yield from _micro_batches(draft, problem)
    yield from _modes(draft, problem)
    yield from _seats(draft, problem, pairs)
    if problem.size <= MOST_NUDGED:
        yield from _nudges(draft)


def _layers(draft: Draft, pairs: list[tuple[int, int]]) -> Iterator[Draft]:
    """One layer from one stage of a pair to the other."""
    for a, b in pairs:
        for giver, taker in ((a, b), (b, a)):
            if draft.stages[giver].layers > 1:
                yield _shifted(draft, giver, taker, 1)


def _shifted(draft: Draft, giver: int, taker: int, layers: int) -> Draft:
    fewer = replace(draft.stages[giver], layers=draft.stages[giver].layers - layers)
    more = replace(draft.stages[taker], layers=draft.stages[taker].layers + layers)
    return draft.with_stage(giver, fewer).with_stage(taker, more)


def _micro_batches(draft: Draft, problem: Problem) -> Iterator[Draft]:
    """The next smaller or larger micro-batch for all, for one stage, or for one kind in a stage."""
    sizes = problem.micro_batches
    everywhere: list[tuple[int, int | None]] = [(index, None) for index in range(len(draft.stages))]
    for step in (-1, 1):
        yield _stepped(draft, everywhere, sizes, step)
        if len(draft.stages) > 1:
            for index in range(len(draft.stages)):
                yield _stepped(draft, [(index, None)], sizes, step)
        for index, stage in enumerate(draft.stages):
            sorts = {seat.unit.kind for seat in stage.seats}
            for kind in sorted(sorts) if len(sorts) > 1 else ():
                yield _stepped(draft, [(index, kind)], sizes, step)
        kinds = sorted({seat.unit.kind for stage in draft.stages for seat in stage.seats})
        for kind in kinds if len(kinds) > 1 else ():
            yield _stepped(draft, [(index, kind) for index, _ in everywhere], sizes, step)


def _stepped(draft: Draft, where: list[tuple[int, int | None]], sizes: tuple[int, ...], step: int) -> Draft:
    for index, kind in where:
        seats = tuple(
            replace(seat, micro_batch=_next(seat.micro_batch, sizes, step)) if kind in (None, seat.unit.kind) else seat
            for seat in draft.stages[index].seats
        )
        draft = draft.with_stage(index, replace(draft.stages[index], seats=seats))
    return draft


def _next(value: int, sizes: tuple[int, ...], step: int) -> int:
    position = sizes.index(value) + step if value in sizes else 0
    return sizes[min(max(position, 0), len(sizes) - 1)]


def _modes(draft: Draft, problem: Problem) -> Iterator[Draft]:
    """Another recompute or ZeRO level in a stage, more tiles in flight, samples divided per stage or per chain."""
    for index, stage in enumerate(draft.stages):
        for recompute in problem.recomputes:
            if recompute != stage.recompute:
                yield draft.with_stage(index, replace(stage, recompute=recompute))
        for zero in problem.zeros:
            if zero != stage.zero and len(stage.seats) > 1:
                yield draft.with_stage(index, replace(stage, zero=zero))
    if problem.schedule == "1f1b" and len(draft.stages) > 1 and problem.capabilities.chooses_in_flight:
        for slack in (draft.slack + 1, draft.slack - 1, draft.slack + 4):
            if slack >= 0:
                yield replace(draft, slack=slack)
    yield replace(draft, alike=not draft.alike)


def _seats(draft: Draft, problem: Problem, pairs: list[tuple[int, int]]) -> Iterator[Draft]:
    """One replica from one stage of a pair to the other; replicas of unlike kinds exchanged."""
    for a, b in pairs:
        for giver, taker in ((a, b), (b, a)) if problem.constraints.dp is None else ():
            if len(draft.stages[giver].seats) > 1:
                for position in _one_of_each_kind(draft.stages[giver]):
                    moved = _moved(draft, giver, position, taker)
                    yield moved
                    for layers in (1, 2):  # and the layers that it worked on
                        if draft.stages[giver].layers > layers:
                            yield _shifted(moved, giver, taker, layers)
        for i in _one_of_each_kind(draft.stages[a]):
            for j in _one_of_each_kind(draft.stages[b]):
                if _sort(draft.stages[a].seats[i]) != _sort(draft.stages[b].seats[j]):
                    one, two = draft.stages[a].seats[i].micro_batch, draft.stages[b].seats[j].micro_batch
                    for sizes in dict.fromkeys(((one, two), (two, one), (min(one, two),) * 2)):
                        yield _exchanged(draft, a, i, b, j, sizes)


def _nudges(draft: Draft) -> Iterator[Draft]:
    """One sample from one replica of a stage to another: where a stage waits anyway, speed is not all that counts."""
    for index, stage in enumerate(draft.stages):
        count = len(stage.seats)
        now = stage.nudges or (0,) * count
        for giver in range(count):
            for taker in range(count):
                if giver != taker:
                    moved = tuple(n - (i == giver) + (i == taker) for i, n in enumerate(now))
                    yield draft.with_stage(index, replace(stage, nudges=moved if any(moved) else ()))


def _sort(seat: Seat) -> tuple[int, int]:
    return seat.unit.kind, seat.unit.tp


def _one_of_each_kind(stage: DraftStage) -> list[int]:
    """The last seat of every sort of unit: equal ones are interchangeable."""
    return list({_sort(seat): position for position, seat in enumerate(stage.seats)}.values())


def _moved(draft: Draft, index: int, position: int, other: int) -> Draft:
    stage, target = draft.stages[index], draft.stages[other]
    seat = stage.seats[position]
    left = stage.seats[:position] + stage.seats[position + 1 :]
    moved = replace(target, seats=(*target.seats, seat), nudges=())
    return draft.with_stage(index, replace(stage, seats=left, nudges=())).with_stage(other, moved)


def _exchanged(draft: Draft, a: int, i: int, b: int, j: int, sizes: tuple[int, ...]) -> Draft:
    """Two seats exchanged; `sizes` are the micro-batches in stage `a` and in stage `b` afterwards."""
    one, two = list(draft.stages[a].seats), list(draft.stages[b].seats)
    one[i], two[j] = replace(two[j], micro_batch=sizes[0]), replace(one[i], micro_batch=sizes[1])
    first, second = replace(draft.stages[a], seats=tuple(one)), replace(draft.stages[b], seats=tuple(two))
    return draft.with_stage(a, first).with_stage(b, second)
