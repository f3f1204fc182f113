"""Small changes of a draft: the neighbours that local search looks at."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from hethub.planner.candidate.candidate import Draft, DraftStage, Seats
from hethub.planner.estimate.estimator import Surrogate
from hethub.planner.estimate.microbatch_sizes import Where, fitted, resized
from hethub.planner.problem.problem import Problem

MOST_NUDGED = 8  # accelerators: beyond, samples stay divided by speed
MOST_PAIRED = 8  # stages: beyond, only the slowest stage is paired with the others


def neighbours(draft: Draft, surrogate: Surrogate) -> list[Draft]:
    """Every draft one change away."""
    every = dict.fromkeys(near for some in neighbourhoods(draft, surrogate) for near in some)
    return [near for near in every if near != draft]


def neighbourhoods(draft: Draft, surrogate: Surrogate) -> Iterator[Iterable[Draft]]:
    """The drafts one change away, sort of change by sort of change.

    With many stages, the changes of the slowest and of both ends, or of all. Where another mode or degree needs more
    memory than there is, microbatches are cut until it fits.
    """
    count, problem, slowest = len(draft.stages), surrogate.problem, surrogate.slowest(draft)
    if count <= MOST_PAIRED:
        pairs, some = list(combinations(range(count), 2)), list(range(count))
    else:
        pairs = [(min(slowest, other), max(slowest, other)) for other in range(count) if other != slowest]
        some = sorted({0, slowest, count - 1})
    yield _layers(draft, pairs)
    yield (with_room(near, problem) for near in _micro_batches(draft, problem, some))
    if problem.capabilities.any_micro_batch and not problem.constraints.micro_batch:
        yield (with_room(near, problem) for near in _even_microbatches(draft, surrogate, some))
    yield _made_to_fit(_modes(draft, problem, some), surrogate)
    yield _seats(draft, problem, pairs)
    yield _made_to_fit(_degrees(draft, problem, some), surrogate)
    if problem.size <= MOST_NUDGED:
        yield _nudges(draft)


def _layers(draft: Draft, pairs: list[tuple[int, int]]) -> Iterator[Draft]:
    """One layer from one stage of a pair to the other."""
    for a, b in pairs:
        for giver, taker in ((a, b), (b, a)):
            if draft.stages[giver].layers > 1:
                yield _shifted(draft, giver, taker, 1)


def _shifted(draft: Draft, giver: int, taker: int, layers: int) -> Draft:
    fewer = replace(draft.stages[giver], layers=draft.stages[giver].layers - layers)
    more = replace(draft.stages[taker], layers=draft.stages[taker].layers + layers)
    return draft.with_stages({giver: fewer, taker: more})


def _micro_batches(draft: Draft, problem: Problem, stages: Sequence[int]) -> Iterator[Draft]:
    """The next smaller or larger micro-batch for all, for one stage, or for one kind in a stage."""
    everywhere: list[tuple[int, int | None]] = [(index, None) for index in range(len(draft.stages))]
    kinds = sorted({own.kind for stage in draft.stages for own in stage.seats})
    for step in (-1, 1):
        yield _stepped(draft, everywhere, problem, step)
        if len(draft.stages) > 1:
            for index in stages:
                yield _stepped(draft, [(index, None)], problem, step)
        for index in stages:
            own = sorted({own.kind for own in draft.stages[index].seats})
            for kind in own if len(own) > 1 else ():
                yield _stepped(draft, [(index, kind)], problem, step)
        for kind in kinds if len(kinds) > 1 else ():
            yield _stepped(draft, [(index, kind) for index, _ in everywhere], problem, step)


def _even_microbatches(draft: Draft, surrogate: Surrogate, stages: Sequence[int]) -> Iterator[Draft]:
    """Microbatches that come out even, fewer, more or as many, for all, for one stage, or for one kind in a stage or
    in all."""
    everywhere = range(len(draft.stages))
    places: list[Where] = [[(index, None) for index in everywhere]]
    if len(draft.stages) > 1:
        places += [[(index, None)] for index in stages]
    for index in stages:
        own = sorted({own.kind for own in draft.stages[index].seats})
        places += [[(index, kind)] for kind in own if len(own) > 1]
    for where in places:
        for step in (-1, 0, 1):
            yield resized(draft, where, surrogate, step)


def with_room(draft: Draft, problem: Problem) -> Draft:
    """The draft, roomy where its stages have microbatches of unlike sizes: by default these wait for each other."""
    if draft.roomy or problem.schedule == "gpipe" or not problem.capabilities.chooses_in_flight:
        return draft
    waves = {sum(own.micro_batch * own.number for own in stage.seats) for stage in draft.stages}
    return draft if len(waves) == 1 else replace(draft, roomy=True)


def _made_to_fit(near: Iterable[Draft], surrogate: Surrogate) -> list[Draft]:
    """The drafts, and of those that need too much memory what is left of them with smaller microbatches."""
    found = list(near)
    surrogate.weigh(found)
    smaller = [fitted(draft, surrogate) for draft in found if not surrogate.likely_fits(draft)]
    return found + [draft for draft in smaller if draft is not None]


def _stepped(draft: Draft, where: list[tuple[int, int | None]], problem: Problem, step: int) -> Draft:
    changed = {}
    for index, kind in where:
        seats = draft.stages[index].seats
        sizes = [_next(own, problem, step) if kind in (None, own.kind) else own.micro_batch for own in seats]
        changed[index] = draft.stages[index].with_sizes(sizes)
    return draft.with_stages(changed)


def _next(own: Seats, problem: Problem, step: int) -> int:
    """The seats' next smaller or larger micro-batch."""
    sizes, value = problem.micro_batches, own.micro_batch
    position = sizes.index(value) + step if value in sizes else 0
    return problem.at_most(own.kind, sizes[min(max(position, 0), len(sizes) - 1)])


def _modes(draft: Draft, problem: Problem, stages: Sequence[int]) -> Iterator[Draft]:
    """Another recompute or ZeRO level in one stage or in all, more microbatches in flight, samples by stage or by
    chain."""
    everywhere = range(len(draft.stages))
    for recompute in problem.recomputes:
        for chosen in _ones_and_all(stages, everywhere):
            if any(draft.stages[index].recompute != recompute for index in chosen):
                yield _each(draft, chosen, recompute=recompute)
    wide = [index for index in everywhere if draft.stages[index].replicas > 1]
    for zero in problem.zeros:
        for chosen in _ones_and_all([index for index in stages if index in wide], wide):
            if any(draft.stages[index].zero != zero for index in chosen):
                yield _each(draft, chosen, zero=zero)
    if len(draft.stages) > 1 and problem.capabilities.chooses_in_flight:
        if problem.schedule != "gpipe":
            yield replace(draft, roomy=not draft.roomy)
        for schedule in problem.other_schedules:
            yield replace(draft, schedule=None if draft.schedule == schedule else schedule)
    yield replace(draft, alike=not draft.alike)


def _ones_and_all(some: Sequence[int], every: Sequence[int]) -> list[Sequence[int]]:
    return [[index] for index in some] + ([every] if len(every) > 1 else [])


def _each(draft: Draft, indices: Sequence[int], **changes: object) -> Draft:
    return draft.with_stages({index: replace(draft.stages[index], **changes) for index in indices})  # type: ignore[arg-type]


def _seats(draft: Draft, problem: Problem, pairs: list[tuple[int, int]]) -> Iterator[Draft]:
    """One replica from one stage of a pair to the other; replicas of unlike kinds exchanged."""
    for a, b in pairs:
        for giver, taker in ((a, b), (b, a)) if problem.constraints.dp is None else ():
            if draft.stages[giver].replicas > 1:
                for own in draft.stages[giver].seats:
                    moved = _moved(draft, giver, own, taker)
                    yield moved
                    for layers in (1, 2):  # and the layers that it worked on
                        if draft.stages[giver].layers > layers:
                            yield _shifted(moved, giver, taker, layers)
        for one in draft.stages[a].seats:
            for two in draft.stages[b].seats:
                if one[:2] != two[:2]:
                    now = (one.micro_batch, two.micro_batch)
                    for sizes in dict.fromkeys((now, now[::-1], (min(now),) * 2)):
                        ones, twos = problem.at_most(one.kind, sizes[1]), problem.at_most(two.kind, sizes[0])
                        yield _exchanged(draft, (a, one, ones), (b, two, twos))


def _degrees(draft: Draft, problem: Problem, stages: Sequence[int]) -> Iterator[Draft]:
    """Twice or half the TP degree for one kind in a stage, its micro-batch going with it or staying."""
    given = problem.constraints
    if given.tp is not None or given.dp is not None:
        return
    for index in stages:
        stage = draft.stages[index]
        for own in stage.seats:
            for tp, count in ((2 * own.tp, own.number // 2), (own.tp // 2, 2 * own.number)):
                if tp in problem.degrees_of(own.kind) and count * tp == own.number * own.tp:
                    rest = [other for other in stage.seats if other != own]
                    for micro_batch in dict.fromkeys((own.micro_batch, _next(own, problem, 1))):
                        seats = [*rest, Seats(own.kind, tp, micro_batch, count)]
                        yield draft.with_stage(index, stage.with_seats(seats))


def _nudges(draft: Draft) -> Iterator[Draft]:
    """One sample from one replica of a stage to another: where a stage waits anyway, speed is not all that counts."""
    for index, stage in enumerate(draft.stages):
        count = stage.replicas
        now = stage.nudges or (0,) * count
        for giver in range(count):
            for taker in range(count):
                if giver != taker:
                    moved = tuple(n - (i == giver) + (i == taker) for i, n in enumerate(now))
                    yield draft.with_stage(index, replace(stage, nudges=moved if any(moved) else ()))


def _less(stage: DraftStage, one: Seats) -> list[Seats]:
    """The stage's replicas but for one of `one`."""
    return [own._replace(number=own.number - (own == one)) for own in stage.seats]


def _moved(draft: Draft, giver: int, own: Seats, taker: int) -> Draft:
    stage, target = draft.stages[giver], draft.stages[taker]
    more = target.with_seats([*target.seats, own._replace(number=1)])
    return draft.with_stages({giver: stage.with_seats(_less(stage, own)), taker: more})


def _exchanged(draft: Draft, here: tuple[int, Seats, int], there: tuple[int, Seats, int]) -> Draft:
    """A replica of one stage and one of another exchanged, each given as (stage, seats, micro-batch afterwards)."""
    changed = {}
    for (index, own, _), (_, other, micro_batch) in ((here, there), (there, here)):
        stage = draft.stages[index]
        seats = [*_less(stage, own), other._replace(number=1, micro_batch=micro_batch)]
        changed[index] = stage.with_seats(seats)
    return draft.with_stages(changed)
