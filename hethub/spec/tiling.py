"""Tiles: how a stage's micro-batches lie on the sample axis, who needs whom, and how many must be in flight."""

import heapq
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


class _Turn:
    """A replica's place in the queue: smallest (dealt + micro_batch) / samples first, ties as listed."""

    __slots__ = ("dealt", "position", "replica")

    def __init__(self, position: int, replica: ReplicaSpec) -> None:
        self.position, self.replica, self.dealt = position, replica, 0

    def __lt__(self, other: "_Turn") -> bool:
        mine = (self.dealt + self.replica.micro_batch) * other.replica.samples
        theirs = (other.dealt + other.replica.micro_batch) * self.replica.samples
        return (mine, self.position) < (theirs, other.position)


def deal(stage: int, replicas: Sequence[ReplicaSpec]) -> tuple[Tile, ...]:
    """The stage's tiles in order of the sample axis, dealt by design rule 1."""
    queue = [_Turn(position, replica) for position, replica in enumerate(replicas)]
    heapq.heapify(queue)
    tiles, start = [], 0
    while queue:
        turn = queue[0]
        stop = start + min(turn.replica.micro_batch, turn.replica.samples - turn.dealt)
        tiles.append(Tile(stage, turn.position, turn.dealt // turn.replica.micro_batch, Range(start, stop)))
        turn.dealt += stop - start
        start = stop
        if turn.dealt == turn.replica.samples:
            heapq.heappop(queue)
        else:
            heapq.heapreplace(queue, turn)
    return tuple(tiles)


def overlapping(tiles: Sequence[Tile], samples: Range) -> Sequence[Tile]:
    """Those of `tiles` (in axis order, without gaps) that share a sample with `samples`."""
    first = bisect_left(tiles, samples.start + 1, key=lambda tile: tile.samples.stop)
    last = bisect_left(tiles, samples.stop, key=lambda tile: tile.samples.start)
    return tiles[first:last]


def transfers(sources: Sequence[Tile], targets: Sequence[Tile], first_tag: int = 0) -> list[Transfer]:
    """What crosses one stage boundary, in axis order: the overlaps of both tilings and nothing else."""
    crossing: list[Transfer] = []
    for source in sources:
        for target in overlapping(targets, source.samples):
            crossing.append(
                Transfer(source, target, overlap(source.samples, target.samples), first_tag + len(crossing))
            )
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
    """Per stage and replica, how many tiles it may hold before their backward under 1F1B.

    A backward waits for backwards further down, and those for every forward listed before them. `frontier` is the
    sample up to which the stage above must have run forward; it grows with the position, so the largest distance, in a
    replica's own tiles, from a backward to the forwards it waits for cannot deadlock (one less nearly always does).
    The default lets the replica below find one more tile ready. Raises BadInput where the plan gives less than that
    distance.
    """
    limits: list[list[int]] = []
    below = _Below(tiles=(), frontier=[], roomy=[])
    for stage in range(len(plan.stages) - 1, -1, -1):
        chosen = []
        for position, replica in enumerate(plan.stages[stage].replicas):
            own = [tile for tile in tiles[stage] if tile.replica == position]
            least = max(below.distance(own, index, below.frontier) for index in range(len(own)))
            default = max(below.distance(own, index, below.roomy) for index in range(len(own)))
            if replica.in_flight is not None and replica.in_flight < least:
                raise BadInput(
                    f"stages[{stage}].replicas[{position}].in_flight is {replica.in_flight}, but a tile's backward waits for "
                    f"{least} of this replica's forwards; give at least {least}, or remove it for the default of {default}."
                )
            chosen.append(min(replica.in_flight or default, len(own)))
        limits.insert(0, chosen)
        below = _Below.after(tiles[stage], chosen, below)
    return limits


class _Below(NamedTuple):
    """The stage below: its tiles and, per tile, up to which sample forwards are listed before its backward."""

    tiles: Sequence[Tile]
    frontier: list[int]
    roomy: list[int]  # the same with one more tile per replica

    def distance(self, own: Sequence[Tile], index: int, frontier: list[int]) -> int:
        """Tiles of `own` that must have run forward, counted from tile `index`, before its backward can end."""
        if not self.tiles:
            return 1
        reached = frontier[self._last(own[index].samples)]
        return max(1, bisect_left(own, reached, key=lambda tile: tile.samples.start) - index)

    def _last(self, samples: Range) -> int:
        return bisect_left(self.tiles, samples.stop, key=lambda tile: tile.samples.start) - 1

    @staticmethod
    def after(tiles: Sequence[Tile], limits: Sequence[int], below: "_Below") -> "_Below":
        owned: dict[int, list[Tile]] = {}
        for tile in tiles:
            owned.setdefault(tile.replica, []).append(tile)
        frontier, roomy, reached, reached_roomy = [], [], 0, 0
        for tile in tiles:
            own, limit = owned[tile.replica], limits[tile.replica]
            waits = _whole_tiles(tiles, below.frontier[below._last(tile.samples)]) if below.tiles else 0
            listed = own[min(tile.index + limit, len(own)) - 1].samples.stop
            reached = max(reached, waits, listed)
            reached_roomy = max(reached_roomy, waits, own[min(tile.index + limit, len(own) - 1)].samples.stop)
            frontier.append(reached)
            roomy.append(reached_roomy)
        return _Below(tiles, frontier, roomy)


def _whole_tiles(tiles: Sequence[Tile], reached: int) -> int:
    """`reached` rounded up to the end of the tile it falls into: a tile runs forward as a whole."""
    return tiles[bisect_left(tiles, reached, key=lambda tile: tile.samples.start) - 1].samples.stop
