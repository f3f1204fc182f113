"""How many microbatches an actor holds before their backward under 1F1B: the fewest that cannot deadlock, and the
default."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain, repeat
from operator import sub

from hethub.spec.errors import BadInput
from hethub.spec.plan import PlanSpec
from hethub.spec.schedule.microbatches import Microbatching, as_one_replica, deal_sizes, load_alone, sizes_of


def is_even(plan: PlanSpec) -> bool:
    """Whether all replicas of all stages are equal in load, and those of a stage in what they may hold."""
    sizes = {(r.micro_batch, r.samples) for stage in plan.stages for r in stage.replicas}
    counts = {len(stage.replicas) for stage in plan.stages}
    held = all(len({r.in_flight for r in stage.replicas}) == 1 for stage in plan.stages)
    return len(sizes) == len(counts) == 1 and held


def is_regular(plan: PlanSpec) -> bool:
    """Whether replica i of every stage gets the same samples in the same microbatches, in rounds all replicas do, and
    nothing says how many microbatches are held."""
    sizes = {sizes_of(stage.replicas) for stage in plan.stages}
    in_rounds = any(map(plan.runs_in_rounds, range(len(plan.stages))))
    given = any(replica.in_flight for stage in plan.stages for replica in stage.replicas)
    return len(sizes) == 1 and not given and (not in_rounds or is_even(plan))


def even_limits(plan: PlanSpec) -> list[list[int]]:
    """Return what `in_flight_limits` returns, for an even plan and without its microbatches: one replica of each stage stands
    for all."""
    limits: list[int] = []
    num_microbatches = load_alone(plan.stages[0].replicas[0]).num_microbatches
    for stage in range(len(plan.stages) - 1, -1, -1):
        least = limits[0] if limits else 1  # no stage holds fewer than those below it
        default = min(least + 1, num_microbatches) if limits else 1
        limits.insert(0, _granted(asked_in_flight(plan, stage)[0], least, default, num_microbatches))
    return [
        [limit] * (1 if plan.runs_in_rounds(index) else len(stage.replicas))
        for index, (stage, limit) in enumerate(zip(plan.stages, limits, strict=True))
    ]


def in_flight_limits(plan: PlanSpec) -> list[list[int]]:
    """Return for each stage and actor how many microbatches it may hold before their backward under 1F1B. An actor is a
    replica, or all replicas of a stage that runs in rounds.

    A backward waits for backwards further down, and these wait for every forward that is listed before them. `frontier` is
    the sample up to which the stage above must have run forward; it grows with the position. So the least limit that
    cannot deadlock is the largest distance from a backward to the forwards it waits for, counted in the replica's own
    microbatches; one less nearly always does deadlock. The default is larger, such that the replica below finds one more
    microbatch ready. Raises BadInput if the plan gives less than this least limit.
    """
    found: list[_Stage] = []
    for index in range(len(plan.stages) - 1, -1, -1):
        sizes, asked = sizes_of(plan.stages[index].replicas), tuple(asked_in_flight(plan, index))
        found.insert(0, _over(found[0] if found else None, sizes, plan.runs_in_rounds(index), asked))
    return [list(stage.limits) for stage in found]


def _granted(asked: tuple[int | None, str], least: int, default: int, num_microbatches: int) -> int:
    """Return how many microbatches an actor may hold: as many as are asked for, or else the default. `asked` has the place in
    the plan that asks. Raises BadInput if fewer than `least` are asked for."""
    given, place = asked
    if given is not None and given < least:
        raise BadInput(
            f"{place}.in_flight is {given}, but a microbatch's backward waits for {least} of this replica's forwards; give at least "
            f"{least}, or remove it for the default of {default}."
        )
    return min(default if given is None else given, num_microbatches)


def asked_in_flight(plan: PlanSpec, stage: int) -> list[tuple[int | None, str]]:
    """Return for each actor of a stage the `in_flight` that the plan gives, and where it does. If all replicas are one actor,
    the smallest one counts."""
    given = [
        (replica.in_flight, f"stages[{stage}].replicas[{position}]")
        for position, replica in enumerate(plan.stages[stage].replicas)
    ]
    if not plan.runs_in_rounds(stage):
        return given
    return [min(given, key=lambda one: one[0] or math.inf)]


def places(microbatching: Microbatching, num_actors: int) -> list[list[int]]:
    """Return the places of each actor's own microbatches on the sample axis."""
    found: list[list[int]] = [[] for _ in range(num_actors)]
    for place, actor in enumerate(microbatching.replicas):
        found[actor].append(place)
    return found


class _Stage:
    """A stage with those below it: how many microbatches its actors may hold, and what the stage above waits for."""

    def __init__(
        self, below: "_Stage | None", microbatching: Microbatching, asked: tuple[tuple[int | None, str], ...]
    ) -> None:
        self.microbatching, self._owned = microbatching, places(microbatching, len(asked))
        if below is None:
            self._needed = [0] * len(microbatching.stops)
            least = default = [1] * len(asked)
        else:
            self._needed = below.needed(microbatching, below.frontier)
            least = _distances(self._owned, self._needed)
            default = _distances(self._owned, below.needed(microbatching, below.frontier_with_extra))
        self.limits = list(map(_granted, asked, least, default, map(len, self._owned)))

    @cached_property
    def frontier(self) -> list[int]:
        """The sample up to which forwards are listed before the backward of each microbatch."""
        return _listed(self.microbatching, self._owned, self.limits, self._needed)

    @cached_property
    def frontier_with_extra(self) -> list[int]:
        """The same if each replica holds one more microbatch."""
        return _listed(self.microbatching, self._owned, [limit + 1 for limit in self.limits], self._needed)

    def needed(self, above: Microbatching, frontier: Sequence[int]) -> list[int]:
        """Return for each microbatch of the stage above how many of that stage's microbatches, counted along the sample axis,
        must have run forward before its backward can end. `frontier` says up to which sample forwards are listed before the
        backwards below."""
        if above.stops != self.microbatching.stops:
            # The number of microbatches that start before.
            behind = map(bisect_left, repeat(self.microbatching.starts), above.stops)
            frontier = [frontier[number - 1] for number in behind]
        return list(map(bisect_left, repeat(above.starts), frontier))


@lru_cache(maxsize=256)  # plans of a search differ in a stage or two, and in layers more often than in microbatches
def _over(
    below: _Stage | None, sizes: tuple[tuple[int, int], ...], in_rounds: bool, asked: tuple[tuple[int | None, str], ...]
) -> _Stage:
    """Return the stage of these replicas and actors, with those below it."""
    microbatching = deal_sizes(sizes)
    return _Stage(below, as_one_replica(microbatching) if in_rounds else microbatching, asked)


def _distances(owned: Sequence[list[int]], needed: Sequence[int]) -> list[int]:
    """Return for each actor how many of its own microbatches, counted from one of them on, are needed at most for the backward
    of that one."""
    found = []
    for own in owned:
        reached = map(bisect_left, repeat(own), [needed[place] for place in own])
        found.append(max(1, *map(sub, reached, range(len(own)))))
    return found


def _listed(
    microbatching: Microbatching, owned: Sequence[list[int]], limits: Sequence[int], needed: Sequence[int]
) -> list[int]:
    """Return for each microbatch the sample up to which forwards are listed before its backward, or before the backwards for
    which that one waits."""
    stops = microbatching.stops
    ahead = []  # by actor, where the last of as many microbatches as it holds is
    for own, limit in zip(owned, limits, strict=True):
        ahead.append(chain(own[limit - 1 :], repeat(own[-1])))
    listed = map(next, map(ahead.__getitem__, microbatching.replicas))
    waits = [number - 1 for number in needed]
    return [stops[place] for place in accumulate(map(max, waits, listed), max)]
