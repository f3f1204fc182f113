"""The neighbours of a candidate: the plans one small change away, which the local search looks at."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from hethub.planner.candidate.candidate import EXTRA_IN_FLIGHT, Candidate, CandidateStage, Pattern, ReplicaGroup, Where
from hethub.planner.candidate.samples import one_moved
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.microbatch_sizes import fitted, resized
from hethub.planner.generate.modes import patterns
from hethub.planner.problem.problem import OFFLOADED, Problem

MOST_NUDGED = 8  # with more accelerators, samples stay divided by speed and unused accelerators join no stage
MOST_PAIRED = 8  # with more stages, only the slowest stage is paired with the others


def neighbours(candidate: Candidate, costs: Estimator) -> list[Candidate]:
    """Return every candidate one change away."""
    every = dict.fromkeys(near for some in neighbourhoods(candidate, costs) for near in some)
    return [near for near in every if near != candidate]


def neighbourhoods(candidate: Candidate, costs: Estimator) -> Iterator[Iterable[Candidate]]:
    """Yield the candidates one change away, one list for each sort of change. Candidates with several chunks whose stages fall
    out of step are left out: there every action waits for another stage, and a step takes up to 40 times its estimate."""
    for some in _changed(candidate, costs):
        yield [near for near in some if near.pattern.chunks == 1 or near.is_in_step or not candidate.is_in_step]


def _changed(candidate: Candidate, costs: Estimator) -> Iterator[Iterable[Candidate]]:
    """Yield each sort of change: of single stages (with many stages only the slowest and both ends) and of all at once. Where a
    new mode or degree needs too much memory, the microbatches are made smaller until it fits."""
    count, problem, slowest = len(candidate.stages), costs.problem, costs.of(candidate).slowest
    if count <= MOST_PAIRED:
        pairs, some = list(combinations(range(count), 2)), list(range(count))
    else:
        pairs = [(min(slowest, other), max(slowest, other)) for other in range(count) if other != slowest]
        some = sorted({0, slowest, count - 1})
    yield (with_room(near) for near in _micro_batches(candidate, problem, some))
    if not problem.constraints.micro_batch:
        yield (with_room(near) for near in _even_microbatches(candidate, costs, some))
    yield _made_to_fit(_modes(candidate, problem, some), costs)
    yield _groups(candidate, problem, pairs)
    yield _made_to_fit(_degrees(candidate, problem, some), costs)
    if problem.constraints.pp is None and problem.constraints.dp is None:
        yield _made_to_fit(_depths(candidate, problem), costs)
    if problem.size <= MOST_NUDGED:
        yield _made_to_fit(_more_replicas(candidate, problem, some), costs)
        yield nudges(candidate)


def _micro_batches(candidate: Candidate, problem: Problem, stages: Sequence[int]) -> Iterator[Candidate]:
    """Yield the next smaller or larger micro-batch: for all stages, one stage, one device type in a stage, or one type in all."""
    everywhere = range(len(candidate.stages))
    device_types = sorted({own.device_type for stage in candidate.stages for own in stage.groups})
    in_all: list[Where] = [[(index, own) for index in everywhere] for own in device_types if len(device_types) > 1]
    for step in (-1, 1):

        def size(_: int, own: ReplicaGroup, step: int = step) -> int:
            return _next(own, problem, step)

        yield from (candidate.with_sizes(where, size) for where in [*_places(candidate, stages), *in_all])


def _even_microbatches(candidate: Candidate, costs: Estimator, stages: Sequence[int]) -> Iterator[Candidate]:
    """Yield microbatches of even sizes, one fewer, one more or as many: for all, for one stage, or one device type in a stage."""
    for where in _places(candidate, stages):
        for step in (-1, 0, 1):
            yield resized(candidate, where, costs, step)


def _places(candidate: Candidate, stages: Sequence[int]) -> list[Where]:
    """Return the places for a change: all stages together, each of `stages`, and each device type in one of them."""
    found: list[Where] = [[(index, None) for index in range(len(candidate.stages))]]
    if len(candidate.stages) > 1:
        found += [[(index, None)] for index in stages]
    for index in stages:
        own = sorted({group.device_type for group in candidate.stages[index].groups})
        found += [[(index, device_type)] for device_type in own if len(own) > 1]
    return found


def with_room(candidate: Candidate) -> Candidate:
    """Return the candidate, with extra microbatches in flight where its stages have microbatches of unlike sizes: with the
    default number in flight such stages wait for each other."""
    chooses = candidate.pattern.schedule in EXTRA_IN_FLIGHT
    if candidate.extra_in_flight or not chooses or candidate.is_in_step:
        return candidate
    return replace(candidate, extra_in_flight=1)


def _made_to_fit(near: Iterable[Candidate], costs: Estimator) -> list[Candidate]:
    """Return the candidates and, for those that need too much memory, variants with smaller microbatches that fit."""
    found = list(near)
    costs.estimate(found)
    smaller = [fitted(candidate, costs) for candidate in found if not costs.likely_fits(candidate)]
    return found + [candidate for candidate in smaller if candidate is not None]


def _next(own: ReplicaGroup, problem: Problem, step: int) -> int:
    """Return the group's next smaller or larger micro-batch among those searched. From a size between them it goes to the
    smallest, from which larger ones are reached: going to the nearest made three of 27 reference questions 0.1 to 2 % slower."""
    sizes, value = problem.micro_batches, own.micro_batch
    position = sizes.index(value) + step if value in sizes else 0
    return problem.at_most(own.device_type, sizes[min(max(position, 0), len(sizes) - 1)])


def _modes(candidate: Candidate, problem: Problem, stages: Sequence[int]) -> Iterator[Candidate]:
    """Yield another recompute, ZeRO level or offload in one stage or all, another schedule, other numbers in flight."""
    everywhere = range(len(candidate.stages))
    for recompute in problem.recomputes:
        for chosen in _ones_and_all(stages, everywhere):
            if any(candidate.stages[index].recompute != recompute for index in chosen):
                yield _each(candidate, chosen, recompute=recompute)
    wide = [index for index in everywhere if candidate.stages[index].replicas > 1]
    for zero in problem.zeros:
        for chosen in _ones_and_all([index for index in stages if index in wide], wide):
            if any(candidate.stages[index].zero != zero for index in chosen):
                yield _each(candidate, chosen, zero=zero)
    for part in OFFLOADED:
        for chosen in _ones_and_all(stages, everywhere):
            changed = {index: candidate.stages[index] for index in chosen}
            back = any(part in stage.offload for stage in changed.values())
            for index, stage in changed.items():
                if back:
                    changed[index] = replace(stage, offload=tuple(own for own in stage.offload if own != part))
                else:  # offload makes room, so that less has to be recomputed
                    offload = tuple(sorted({*stage.offload, part}))
                    changed[index] = replace(stage, offload=offload, recompute=problem.recomputes[0])
            yield candidate.with_stages(changed)
    for pattern in patterns(problem, candidate):
        if pattern != candidate.pattern:
            for level in {0, candidate.extra_in_flight}.intersection(EXTRA_IN_FLIGHT.get(pattern.schedule, (0,))):
                yield replace(candidate, pattern=pattern, extra_in_flight=level)
    if len(candidate.stages) > 1:
        for level in EXTRA_IN_FLIGHT.get(candidate.pattern.schedule, (0,)):
            if level != candidate.extra_in_flight:
                yield replace(candidate, extra_in_flight=level)


def _ones_and_all(some: Sequence[int], every: Sequence[int]) -> list[Sequence[int]]:
    return [[index] for index in some] + ([every] if len(every) > 1 else [])


def _each(candidate: Candidate, indices: Sequence[int], **changes: object) -> Candidate:
    return candidate.with_stages({index: replace(candidate.stages[index], **changes) for index in indices})  # type: ignore[arg-type]


def _groups(candidate: Candidate, problem: Problem, pairs: list[tuple[int, int]]) -> Iterator[Candidate]:
    """Yield, for pairs of stages, a replica moved from one to the other, and replicas of unlike device types exchanged."""
    for a, b in pairs:
        for giver, taker in ((a, b), (b, a)) if problem.constraints.dp is None else ():
            if candidate.stages[giver].replicas > 1:
                for own in candidate.stages[giver].groups:
                    for layers in (0, 1, 2):  # that move with it
                        if candidate.stages[giver].layers > layers:
                            yield _moved(candidate, giver, own, taker, layers)
        for one in candidate.stages[a].groups:
            for two in candidate.stages[b].groups:
                if one[:2] != two[:2]:
                    now = (one.micro_batch, two.micro_batch)
                    for sizes in dict.fromkeys((now, now[::-1], (min(now),) * 2)):
                        one_size, two_size = map(problem.at_most, (one.device_type, two.device_type), sizes[::-1])
                        yield _exchanged(candidate, (a, one, one_size), (b, two, two_size))


def _more_replicas(candidate: Candidate, problem: Problem, stages: Sequence[int]) -> Iterator[Candidate]:
    """Yield a stage with one more replica, made of unused accelerators, with the micro-batch of another replica or half of it."""
    if problem.constraints.dp is not None:
        return
    groups = [own for stage in candidate.stages for own in stage.groups]
    for device_type, each in enumerate(problem.device_types):
        left = each.size - sum(own.number * own.tp for own in groups if own.device_type == device_type)
        for tp in (tp for tp in problem.degrees_of(device_type) if tp <= left):
            for index in stages:
                stage = candidate.stages[index]
                sizes = [size for own in stage.groups for size in (own.micro_batch, max(1, own.micro_batch // 2))]
                for size in dict.fromkeys(problem.at_most(device_type, size) for size in sizes):
                    more = [*stage.groups, ReplicaGroup(device_type, tp, size, 1)]
                    yield candidate.with_stages({index: stage.with_groups(more)})


def _degrees(candidate: Candidate, problem: Problem, stages: Sequence[int]) -> Iterator[Candidate]:
    """Yield twice or half the TP degree for one device type in a stage, with the same or the next larger micro-batch."""
    given = problem.constraints
    if given.tp is not None or given.dp is not None:
        return
    for index in stages:
        stage = candidate.stages[index]
        for own in stage.groups:
            for tp, count in ((2 * own.tp, own.number // 2), (own.tp // 2, 2 * own.number)):
                if tp in problem.degrees_of(own.device_type) and count * tp == own.number * own.tp:
                    rest = [other for other in stage.groups if other != own]
                    for micro_batch in dict.fromkeys((own.micro_batch, _next(own, problem, 1))):
                        groups = [*rest, ReplicaGroup(own.device_type, tp, micro_batch, count)]
                        yield candidate.with_stages({index: stage.with_groups(groups)})


def _depths(candidate: Candidate, problem: Problem) -> Iterator[Candidate]:
    """Yield one stage fewer (two neighbours joined) or one more (a stage cut into halves). With one stage zero_bubble is 1F1B."""
    stages = candidate.stages
    plain = len(stages) == 2 and candidate.pattern.schedule in problem.other_schedules
    left = replace(candidate, pattern=Pattern(problem.schedule), extra_in_flight=0) if plain else candidate
    for index, (one, other) in enumerate(pairwise(stages)):
        joined = replace(one, layers=one.layers + other.layers).with_groups([*one.groups, *other.groups])
        yield replace(left, stages=(*stages[:index], joined, *stages[index + 2 :]))
    for index, own in enumerate(stages):
        if own.layers > 1 and not any(group.number % 2 for group in own.groups):
            half = [group._replace(number=group.number // 2) for group in own.groups]
            parts = [replace(own, layers=layers).with_groups(half) for layers in (own.layers // 2, -(-own.layers // 2))]
            yield replace(candidate, stages=(*stages[:index], *parts, *stages[index + 1 :]))


def nudges(candidate: Candidate) -> Iterator[Candidate]:
    """Yield one sample moved from one replica of a stage to another: where a stage waits anyway, not only speed counts."""
    for index, stage in enumerate(candidate.stages):
        for moved in one_moved(stage.nudges or (0,) * stage.replicas):
            yield candidate.with_stages({index: replace(stage, nudges=moved if any(moved) else ())})


def _less(stage: CandidateStage, one: ReplicaGroup) -> list[ReplicaGroup]:
    """Return the stage's replicas without one replica of the group `one`."""
    return [own._replace(number=own.number - (own == one)) for own in stage.groups]


def _moved(candidate: Candidate, giver: int, own: ReplicaGroup, taker: int, layers: int) -> Candidate:
    """Move a replica from one stage to another, and so many layers with it."""
    stage, target = candidate.stages[giver], candidate.stages[taker]
    fewer = replace(stage.with_groups(_less(stage, own)), layers=stage.layers - layers)
    more = replace(target.with_groups([*target.groups, own._replace(number=1)]), layers=target.layers + layers)
    return candidate.with_stages({giver: fewer, taker: more})


def _exchanged(
    candidate: Candidate, here: tuple[int, ReplicaGroup, int], there: tuple[int, ReplicaGroup, int]
) -> Candidate:
    """Exchange a replica of one stage for one of another, each given as (stage, group, micro-batch afterwards)."""
    changed = {}
    for (index, own, _), (_, other, micro_batch) in ((here, there), (there, here)):
        stage = candidate.stages[index]
        groups = [*_less(stage, own), other._replace(number=1, micro_batch=micro_batch)]
        changed[index] = stage.with_groups(groups)
    return candidate.with_stages(changed)
