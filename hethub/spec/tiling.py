"""Tiles: how a stage's micro-batches lie on the sample axis, who needs whom, and how many must be in flight."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from hethub.spec.errors import BadInput
from hethub.spec.plan import PlanSpec, ReplicaSpec
from hethub.spec.ranges import Range, overlap


class Tile(NamedTuple):
    """The `index`-th micro-batch of a replica of a stage: samples [samples.start, samples.stop) of the step."""

    stage: int
    replica: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a tile
    samples: Range


class Transfer(NamedTuple):
    """Samples that one tile hands to a tile of the next stage; `tag` is unique among the step's activations."""

    source: Tile
    target: Tile
    samples: Range
    tag: int


def deal(stage: int, replicas: Sequence[ReplicaSpec]) -> tuple[Tile, ...]:
    """The stage's tiles in order of the sample axis, dealt by design rule 1.

    A replica's turn comes at (dealt + micro_batch) / samples, which grows with every tile of its own: all turns sorted,
    brought to a common denominator, ties as listed, are the order of dealing.
    """
    common = math.lcm(*(replica.samples for replica in replicas))
    turns = [
        (stop * (common // replica.samples), position, index)
        for position, replica in enumerate(replicas)
        for index, stop in enumerate(
            range(replica.micro_batch, replica.samples + replica.micro_batch, replica.micro_batch)
        )
    ]
    turns.sort()
    tiles, start = [], 0
    for _, position, index in turns:
        replica = replicas[position]
        stop = start + min(replica.micro_batch, replica.samples - index * replica.micro_batch)
        tiles.append(Tile(stage, position, index, Range(start, stop)))
        start = stop
    return tuple(tiles)


def rounds(tiles: Sequence[Tile]) -> tuple[tuple[Tile, ...], ...]:
    """The stage's tiles as runs that hold at most one tile of each replica, every run as long as it can be.

    There are as many as the busiest replica has tiles: between two tiles of any other lies at least one of its own.
    """
    found: list[list[Tile]] = []
    seen: set[int] = set()
    for tile in tiles:
        if not found or tile.replica in seen:
            found.append([])
            seen.clear()
        found[-1].append(tile)
        seen.add(tile.replica)
    return tuple(map(tuple, found))


def as_one_replica(groups: Sequence[Sequence[Tile]]) -> tuple[Tile, ...]:
    """Rounds as the tiles of a single replica, which they are to the stages around."""
    return tuple(
        Tile(group[0].stage, 0, index, Range(group[0].samples.start, group[-1].samples.stop))
        for index, group in enumerate(groups)
    )


class Load(NamedTuple):
    """What a lane has to do in a step."""

    num_tiles: int
    samples: int
    largest: int  # samples of its largest tile


def loads(tiles: Sequence[Tile]) -> list[Load]:
    """The load of every lane of a stage, in their order."""
    sizes: dict[int, list[int]] = {}
    for tile in tiles:
        sizes.setdefault(tile.replica, []).append(tile.samples.size)
    return [Load(len(own), sum(own), max(own)) for _, own in sorted(sizes.items())]


def overlapping(tiles: Sequence[Tile], samples: Range) -> Sequence[Tile]:
    """Those of `tiles` (in axis order, without gaps) that share a sample with `samples`."""
    first = bisect_left(tiles, samples.start + 1, key=lambda tile: tile.samples.stop)
    last = bisect_left(tiles, samples.stop, key=lambda tile: tile.samples.start)
    return tiles[first:last]


def transfers(sources: Sequence[Tile], targets: Sequence[Tile], first_tag: int = 0) -> list[Transfer]:
    """What crosses one stage boundary, in axis order: the overlaps of both tilings and nothing else."""
    crossing: list[Transfer] = []
    s = t = 0
    while s < len(sources):
        source, target = sources[s], targets[t]
        shared = overlap(source.samples, target.samples)
        crossing.append(Transfer(source, target, shared, first_tag + len(crossing)))
        s += shared.stop == source.samples.stop
        t += shared.stop == target.samples.stop
    return crossing


def is_regular(plan: PlanSpec) -> bool:
    """Whether all replicas of all stages are equal in load, and none says how many tiles it holds: plain 1F1B."""
    loads = {(r.micro_batch, r.samples, r.in_flight) for stage in plan.stages for r in stage.replicas}
    counts = {len(stage.replicas) for stage in plan.stages}
    return len(loads) == len(counts) == 1 and next(iter(loads))[2] is None


def regular_limits(plan: PlanSpec) -> list[list[int]]:
    """As `in_flight_limits` for a regular plan, without its tiles: as many as there are stages from here on."""
    replica = plan.stages[0].replicas[0]
    num_tiles = -(-replica.samples // replica.micro_batch)
    return [[min(len(plan.stages) - index, num_tiles)] * len(stage.replicas) for index, stage in enumerate(plan.stages)]


def in_flight_limits(plan: PlanSpec, tiles: Sequence[Sequence[Tile]]) -> list[list[int]]:
    """Per stage and lane, how many tiles it may hold before their backward under 1F1B.

    `tiles` are the stages' tiles; a lane is a replica, or all of them where the stage runs in rounds.

    A backward waits for backwards further down, and those for every forward listed before them. `frontier` is the
    sample up to which the stage above must have run forward; it grows with the position, so the largest distance, in a
    replica's own tiles, from a backward to the forwards it waits for cannot deadlock (one less nearly always does).
    The default lets the replica below find one more tile ready. Raises BadInput where the plan gives less than that
    distance.
    """
    limits: list[list[int]] = []
    below = _Below(starts=[], stops=[], frontier=[], roomy=[])
    for stage in range(len(plan.stages) - 1, -1, -1):
        chosen = []
        asked = asked_in_flight(plan, stage)
        owned: list[list[Range]] = [[] for _ in asked]
        for tile in tiles[stage]:
            owned[tile.replica].append(tile.samples)
        for (given, place), own in zip(asked, owned, strict=True):
            least, default = below.distances(own)
            if given is not None and given < least:
                raise BadInput(
                    f"{place}.in_flight is {given}, but a tile's backward waits for {least} of this replica's forwards; give at least "
                    f"{least}, or remove it for the default of {default}."
                )
            chosen.append(min(given or default, len(own)))
        limits.insert(0, chosen)
        below = _Below.after(tiles[stage], owned, chosen, below)
    return limits


def asked_in_flight(plan: PlanSpec, stage: int) -> list[tuple[int | None, str]]:
    """Per lane of a stage, the in_flight that the plan gives and where it does. Together, the smallest one counts."""
    given = [
        (replica.in_flight, f"stages[{stage}].replicas[{position}]")
        for position, replica in enumerate(plan.stages[stage].replicas)
    ]
    if not plan.runs_in_rounds(stage):
        return given
    return [min(given, key=lambda one: one[0] or math.inf)]


class _Below(NamedTuple):
    """The stage below: where its tiles start and stop, and per tile, up to which sample forwards are listed before its
    backward."""

    starts: list[int]
    stops: list[int]
    frontier: list[int]
    roomy: list[int]  # the same with one more tile per replica

    def distances(self, own: Sequence[Range]) -> tuple[int, int]:
        """The most tiles of `own` that must have run forward, counted from a tile, before its backward can end; and the
        most with one more tile ready below."""
        if not self.starts:
            return 1, 1
        starts = [samples.start for samples in own]
        last = [bisect_left(self.starts, samples.stop) - 1 for samples in own]
        least, default = (
            max(bisect_left(starts, frontier[tile]) - index for index, tile in enumerate(last))
            for frontier in (self.frontier, self.roomy)
        )
        return max(1, least), max(1, default)

    def whole_tiles(self, samples: Range, starts: list[int], stops: list[int]) -> int:
        """Up to where the stage above must have run forward before a tile's backward, in whole tiles of its own."""
        if not self.starts:
            return 0
        reached = self.frontier[bisect_left(self.starts, samples.stop) - 1]
        return stops[bisect_left(starts, reached) - 1]

    @staticmethod
    def after(
        tiles: Sequence[Tile], owned: Sequence[Sequence[Range]], limits: Sequence[int], below: "_Below"
    ) -> "_Below":
        starts, stops = [tile.samples.start for tile in tiles], [tile.samples.stop for tile in tiles]
        frontier, roomy, reached, reached_roomy = [], [], 0, 0
        for tile in tiles:
            own, limit = owned[tile.replica], limits[tile.replica]
            waits = below.whole_tiles(tile.samples, starts, stops)
            reached = max(reached, waits, own[min(tile.index + limit, len(own)) - 1].stop)
            reached_roomy = max(reached_roomy, waits, own[min(tile.index + limit, len(own) - 1)].stop)
            frontier.append(reached)
            roomy.append(reached_roomy)
        return _Below(starts, stops, frontier, roomy)
