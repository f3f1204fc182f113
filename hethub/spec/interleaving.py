"""Interleaved 1F1B: stages of several chunks, every chunk a station of its own on a sample's way.

Where all replicas are alike the order is Megatron's (arXiv 2104.04473, §2.2). Anywhere else the lists come from a
simulated run in which every pass takes one tick; having run once, they cannot deadlock.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hethub.spec.action import Kind
from hethub.spec.errors import BadInput
from hethub.spec.plan import PlanSpec
from hethub.spec.tiling import Load, Tile, asked_in_flight, is_regular, loads, overlapping


class Pass(NamedTuple):
    """A lane's `index`-th tile in a part of its stage."""

    kind: Kind
    part: int
    index: int  # type: ignore[assignment]  # hides tuple.index


def interleave(plan: PlanSpec, tiles: Sequence[Sequence[Tile]]) -> list[list[list[Pass]]]:
    """Per stage and lane, its passes in order. `tiles` are the stages' tiles, those of a lane under its number.

    `in_flight` counts passes held, of all chunks together. The default is Megatron's depth in proportion to the lane's
    samples, and more where the tiles would wait for each other otherwise. Raises BadInput where the plan gives less than
    that.
    """
    if is_regular(plan) and len(tiles[0]) // _num_lanes(tiles[0]) % len(tiles) == 0:
        return [_megatron(plan, stage, own) for stage, own in enumerate(tiles)]
    found = _Simulation(plan, tiles).run()
    for stage, lanes in enumerate(found):
        for lane, (asked, place) in enumerate(asked_in_flight(plan, stage)):
            if asked is not None and (held := most_held(lanes[lane])) > asked:
                raise BadInput(
                    f"{place}.in_flight is {asked}, but interleaved chunks of these tiles wait for {held} forwards of this replica; "
                    f"give at least {held}, or remove it."
                )
    return found


def most_held(passes: Sequence[Pass]) -> int:
    """The most passes that have run forward and not yet backward."""
    held = most = 0
    for one in passes:
        held += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(one.kind, 0)
        most = max(most, held)
    return most


def _num_lanes(tiles: Sequence[Tile]) -> int:
    return len({tile.replica for tile in tiles})


def _depth(stage: int, num_stages: int, num_chunks: int) -> int:
    """Forwards that Megatron runs before a stage's first backward."""
    return (num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages


def _megatron(plan: PlanSpec, stage: int, tiles: Sequence[Tile]) -> list[list[Pass]]:
    """Groups of as many tiles as there are stages pass one chunk after the other, the same list for every lane."""
    stages, chunks = len(plan.stages), plan.num_chunks
    num_lanes = _num_lanes(tiles)
    total = len(tiles) // num_lanes * chunks
    warm = min(_depth(stage, stages, chunks), total)
    chunk = [k % (stages * chunks) // stages for k in range(total)]
    index = [k // (stages * chunks) * stages + k % stages for k in range(total)]
    forwards = [Pass(Kind.FORWARD, chunk[k], index[k]) for k in range(total)]
    backwards = [Pass(Kind.BACKWARD, chunks - 1 - chunk[k], index[k]) for k in range(total)]
    order = forwards[:warm]
    for k in range(total - warm):
        order += (forwards[warm + k], backwards[k])
    return [order + backwards[total - warm :]] * num_lanes


class _Lane:
    """What a lane may run next, and what it has run."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self.forwards: list[tuple[int, int, int]] = []  # (wave, station, tile), a heap
        self.backwards: list[tuple[int, int, int]] = []  # (wave, -station, tile)
        self.order: list[Pass] = []


class _Simulation:
    """All lanes at once, tick by tick: a backward if one is ready, else a forward if there is room for it."""

    def __init__(self, plan: PlanSpec, tiles: Sequence[Sequence[Tile]]) -> None:
        self.tiles, self.stages = tiles, len(plan.stages)
        self.stations = self.stages * plan.num_chunks  # (chunk, stage) in the order in which a sample passes them
        numbers = [{tile: n for n, tile in enumerate(own)} for own in tiles]
        self.above, self.below = (
            [
                [
                    [numbers[other][one] for one in overlapping(tiles[other], tile.samples)]
                    for tile in tiles[stage]
                    for other in [(stage + way) % self.stages]
                ]
                for stage in range(self.stages)
            ]
            for way in (-1, 1)
        )
        sizes = [loads(own) for own in tiles]
        self.wave = self.stages * max(sum(load.largest for load in lanes) for lanes in sizes)
        self.lanes = [
            [_Lane(self._limit(plan, stage, lane, load)) for lane, load in enumerate(lanes)]
            for stage, lanes in enumerate(sizes)
        ]
        last = self.stations - 1
        self.lacks_forward = [
            [len(self.above[v % self.stages][n]) if v else 0 for n in range(len(tiles[v % self.stages]))]
            for v in range(self.stations)
        ]
        self.lacks_backward = [
            [1 + (len(self.below[v % self.stages][n]) if v < last else 0) for n in range(len(tiles[v % self.stages]))]
            for v in range(self.stations)
        ]

    def _limit(self, plan: PlanSpec, stage: int, lane: int, load: Load) -> int:
        asked, _ = asked_in_flight(plan, stage)[lane]
        if asked is not None:
            return asked
        per_stage = self.wave / self.stages * load.samples / plan.global_batch / load.largest  # of the lane's tiles
        return max(1, math.ceil((_depth(stage, self.stages, plan.num_chunks) + 1) * per_stage))

    def run(self) -> list[list[list[Pass]]]:
        """Every lane's passes in the order in which they ran."""
        for n in range(len(self.tiles[0])):
            self._ready(Kind.FORWARD, 0, n)
        left = 2 * sum(len(self.tiles[v % self.stages]) for v in range(self.stations))
        while left:
            started = [one for lanes in self.lanes for lane in lanes for one in self._pick(lane)]
            if not started:
                started = self._make_room()
            for kind, station, n in started:
                self._done(kind, station, n)
            left -= len(started)
        return [[lane.order for lane in lanes] for lanes in self.lanes]

    def _ready(self, kind: Kind, station: int, n: int) -> None:
        tile = self.tiles[station % self.stages][n]
        lane, wave = self.lanes[station % self.stages][tile.replica], tile.samples.start // self.wave
        if kind is Kind.FORWARD:
            heapq.heappush(lane.forwards, (wave, station, n))
        else:
            heapq.heappush(lane.backwards, (wave, -station, n))

    def _pick(self, lane: _Lane) -> Iterator[tuple[Kind, int, int]]:
        if lane.backwards:
            _, station, n = heapq.heappop(lane.backwards)
            yield self._start(lane, Kind.BACKWARD, -station, n)
        elif lane.forwards and lane.held < lane.limit:
            _, station, n = heapq.heappop(lane.forwards)
            yield self._start(lane, Kind.FORWARD, station, n)

    def _start(self, lane: _Lane, kind: Kind, station: int, n: int) -> tuple[Kind, int, int]:
        lane.held += 1 if kind is Kind.FORWARD else -1
        lane.order.append(Pass(kind, station // self.stages, self.tiles[station % self.stages][n].index))
        return kind, station, n

    def _make_room(self) -> list[tuple[Kind, int, int]]:
        """Where every lane is full and none has a backward, the first forward in line is let in."""
        full = [lane for lanes in self.lanes for lane in lanes if lane.forwards]
        assert full, "passes wait for each other"
        lane = min(full, key=lambda one: one.forwards[0])
        lane.limit = lane.held + 1
        return list(self._pick(lane))

    def _done(self, kind: Kind, station: int, n: int) -> None:
        if kind is Kind.FORWARD:
            if station + 1 < self.stations:
                for m in self.below[station % self.stages][n]:
                    self._less(Kind.FORWARD, self.lacks_forward, station + 1, m)
            self._less(Kind.BACKWARD, self.lacks_backward, station, n)
        elif station:
            for m in self.above[station % self.stages][n]:
                self._less(Kind.BACKWARD, self.lacks_backward, station - 1, m)

    def _less(self, kind: Kind, lacks: list[list[int]], station: int, n: int) -> None:
        lacks[station][n] -= 1
        if not lacks[station][n]:
            self._ready(kind, station, n)
