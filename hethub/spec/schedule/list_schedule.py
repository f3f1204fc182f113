"""Interleaved chunks run on paper: every lane's order of passes, for tiles and replicas of any kind.

A lane works through its samples in the same time as any other, backward twice as long as forward; that is all the time
there is in it, so the order is a function of the plan alone. Having run once, it cannot deadlock.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from hethub.spec.plan import PlanSpec
from hethub.spec.schedule.actions import Kind, Pass
from hethub.spec.schedule.microbatches import Load, Tiling, asked_in_flight, loads

Step = tuple[Kind, int, int]  # what is done at which station to which of its stage's tiles


def depth(stage: int, num_stages: int, per_stage: float, per_wave: float, num_chunks: int) -> float:
    """Forwards that Megatron runs before a stage's first backward, for so many tiles per stage of the pipeline."""
    return (num_stages - stage - 1) * 2 * per_stage + (num_chunks - 1) * per_wave


class _Lane:
    """What a lane has before it, what it may run next, and what it has run."""

    def __init__(self, limit: int, ticks: int) -> None:
        self.limit, self.held = limit, 0
        self.ticks = ticks  # of one sample in one layer, forward
        self.busy = False
        self.line: list[tuple[int, int, int]] = []  # forwards to come, as (wave, station, tile), a heap
        self.gone: set[tuple[int, int, int]] = set()  # those of them that ran out of line
        self.ready: set[tuple[int, int, int]] = set()  # those of them that could run
        self.backwards: list[tuple[int, int, int]] = []  # (wave, -station, tile) that could run, a heap
        self.order: list[Pass] = []


class PaperRun:
    """All lanes at once: the next forward in line if it could run and there is room for it, else a backward.

    Forwards stand in line as Megatron has them: waves of tiles, about as many as there are stages, pass one chunk after
    the other. `tilings` are the stages' tiles, those of a lane under its number.
    """

    def __init__(self, plan: PlanSpec, tilings: Sequence[Tiling]) -> None:
        self.plan, self.tilings, self.stages = plan, tilings, len(plan.stages)
        self.stations = self.stages * plan.num_chunks  # (chunk, stage) in the order in which a sample passes them
        work = [loads(own) for own in tilings]
        self.abreast = max(sum(load.largest for load in lanes) for lanes in work)  # samples that a stage has at once
        self.num_waves = max(1, plan.global_batch // (self.stages * self.abreast))
        ticks = math.lcm(*(load.samples * plan.stages[s].num_layers for s, lanes in enumerate(work) for load in lanes))
        self.lanes = [
            [
                _Lane(self._limit(stage, lane, load), ticks // (load.samples * plan.stages[stage].num_layers))
                for lane, load in enumerate(lanes)
            ]
            for stage, lanes in enumerate(work)
        ]
        self.above, self.below = self._overlaps(-1), self._overlaps(1)
        self.lacks: dict[Step, int] = {}  # what a pass still waits for
        self.awake = {lane: None for lanes in self.lanes for lane in lanes}  # those that may have something to do
        self._queue()

    def _overlaps(self, way: int) -> list[list[list[int]]]:
        """Per stage and tile, the tiles of the stage before (-1) or after (1) it that share samples with it."""
        found = []
        for stage, own in enumerate(self.tilings):
            other = self.tilings[(stage + way) % self.stages]
            found.append(
                [
                    list(range(bisect_left(other.stops, start + 1), bisect_left(other.starts, stop)))
                    for start, stop in zip(own.starts, own.stops, strict=True)
                ]
            )
        return found

    def _limit(self, stage: int, lane: int, load: Load) -> int:
        asked, _ = asked_in_flight(self.plan, stage)[lane]
        if asked is not None:
            return asked
        per_batch = load.samples / load.largest  # tiles of the lane
        per_stage = per_batch * self.abreast / self.plan.global_batch
        least = depth(stage, self.stages, per_stage, per_batch / self.num_waves, self.plan.num_chunks)
        return max(1, math.ceil(least + per_stage))

    def _queue(self) -> None:
        for station in range(self.stations):
            stage = station % self.stages
            for n in range(len(self.tilings[stage].stops)):
                heapq.heappush(self._lane(station, n).line, self._rank(station, n))
                self.lacks[Kind.FORWARD, station, n] = len(self.above[stage][n]) if station else 0
                self.lacks[Kind.BACKWARD, station, n] = 1
                if station + 1 < self.stations:
                    self.lacks[Kind.BACKWARD, station, n] += len(self.below[stage][n])
                if not station:
                    self._lane(station, n).ready.add(self._rank(station, n))

    def _lane(self, station: int, n: int) -> _Lane:
        stage = station % self.stages
        return self.lanes[stage][self.tilings[stage].replicas[n]]

    def _rank(self, station: int, n: int) -> tuple[int, int, int]:
        start = self.tilings[station % self.stages].starts[n]
        return start * self.num_waves // self.plan.global_batch, station, n

    def run(self) -> list[list[list[Pass]]]:
        """Every lane's passes in the order in which they ran."""
        left = len(self.lacks)
        under_way: list[tuple[int, int, Step]] = []  # by when they end, then by when they started
        started, now = 0, 0
        while left:
            begun = [step for lane in self.awake if not lane.busy for step in self._pick(lane)]
            self.awake.clear()
            if not begun and not under_way:
                begun = [self._out_of_line()]
            for step in begun:
                heapq.heappush(under_way, (now + self._ticks(*step), started, step))
                started += 1
            now = under_way[0][0]
            while under_way and under_way[0][0] == now:
                self._done(*heapq.heappop(under_way)[2])
                left -= 1
        return [[lane.order for lane in lanes] for lanes in self.lanes]

    def _ticks(self, kind: Kind, station: int, n: int) -> int:
        chunk = self.plan.stages[station % self.stages].chunks[station // self.stages]
        own = self.tilings[station % self.stages]
        return (
            self._lane(station, n).ticks
            * (own.stops[n] - own.starts[n])
            * chunk.size
            * (1 if kind is Kind.FORWARD else 2)
        )

    def _pick(self, lane: _Lane) -> Iterator[Step]:
        while lane.line and lane.line[0] in lane.gone:
            heapq.heappop(lane.line)
        if lane.held < lane.limit and lane.line and lane.line[0] in lane.ready:
            yield self._forward(lane, heapq.heappop(lane.line))
        elif lane.backwards:
            _, station, n = heapq.heappop(lane.backwards)
            yield self._start(lane, Kind.BACKWARD, -station, n)

    def _forward(self, lane: _Lane, rank: tuple[int, int, int]) -> Step:
        lane.ready.remove(rank)
        return self._start(lane, Kind.FORWARD, *rank[1:])

    def _start(self, lane: _Lane, kind: Kind, station: int, n: int) -> Step:
        lane.busy = True
        lane.held += 1 if kind is Kind.FORWARD else -1
        lane.order.append(Pass(kind, station // self.stages, self.tilings[station % self.stages].indices[n]))
        return kind, station, n

    def _out_of_line(self) -> Step:
        """Where all lanes wait for each other, the first forward that could run does, and gets room for it."""
        able = [lane for lanes in self.lanes for lane in lanes if lane.ready]
        assert able, "passes wait for each other"
        lane = min(able, key=lambda one: (one.held >= one.limit, min(one.ready)))
        lane.limit = max(lane.limit, lane.held + 1)
        lane.gone.add(min(lane.ready))
        return self._forward(lane, min(lane.ready))

    def _done(self, kind: Kind, station: int, n: int) -> None:
        lane = self._lane(station, n)
        lane.busy, self.awake[lane] = False, None
        stage = station % self.stages
        if kind is Kind.FORWARD:
            if station + 1 < self.stations:
                for m in self.below[stage][n]:
                    self._less(Kind.FORWARD, station + 1, m)
            self._less(Kind.BACKWARD, station, n)
        elif station:
            for m in self.above[stage][n]:
                self._less(Kind.BACKWARD, station - 1, m)

    def _less(self, kind: Kind, station: int, n: int) -> None:
        self.lacks[kind, station, n] -= 1
        if self.lacks[kind, station, n]:
            return
        lane, (wave, _, _) = self._lane(station, n), self._rank(station, n)
        self.awake[lane] = None
        if kind is Kind.FORWARD:
            lane.ready.add(self._rank(station, n))
        else:
            heapq.heappush(lane.backwards, (wave, -station, n))
