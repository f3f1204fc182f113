"""List schedule of interleaved chunks: every actor's order of passes, for microbatches and replicas of any kind.

An actor works through its samples in the same time as any other, backward twice as long as forward; that is all the
time there is in it, so the order is a function of the plan alone. Having run once so, it cannot deadlock.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence

from hethub.spec.plan import PlanSpec
from hethub.spec.schedule.actions import Kind
from hethub.spec.schedule.in_flight import asked_in_flight
from hethub.spec.schedule.microbatches import Load, Microbatching, loads
from hethub.spec.schedule.orders import ActorOrder, Operation, listed

Step = tuple[Kind, int, int]  # what is done at which station to which of its stage's microbatches


def depth(stage: int, num_stages: int, per_stage: float, per_microstep: float, num_chunks: int) -> float:
    """Return how many forwards Megatron runs before a stage's first backward, for `per_stage` microbatches of each stage."""
    return (num_stages - stage - 1) * 2 * per_stage + (num_chunks - 1) * per_microstep


class _Actor:
    """What an actor has before it, what it may run next, and what it has run."""

    def __init__(self, limit: int, ticks: int) -> None:
        self.limit, self.held = limit, 0
        self.ticks = ticks  # of one sample in one layer, forward
        self.busy = False
        self.line: list[tuple[int, int, int]] = []  # forwards to come, as (microstep, station, microbatch), a heap
        self.gone: set[tuple[int, int, int]] = set()  # those of them that ran out of line
        self.ready: set[tuple[int, int, int]] = set()  # those of them that could run
        self.backwards: list[tuple[int, int, int]] = []  # (microstep, -station, microbatch) that could run, a heap
        self.operations: list[Operation] = []  # that it has begun, and of which microbatches
        self.indices: list[int] = []


class ListSchedule:
    """All actors at once: the next forward in line if it could run and there is room for it, else a backward.

    Forwards stand in line as Megatron has them: microsteps of microbatches, about as many as there are stages, pass one
    chunk after the other. `microbatchings` are the stages' microbatches, those of an actor under its number.
    """

    def __init__(self, plan: PlanSpec, microbatchings: Sequence[Microbatching]) -> None:
        self.plan, self.microbatchings, self.stages = plan, microbatchings, len(plan.stages)
        self.stations = self.stages * plan.num_chunks  # (chunk, stage) in the order in which a sample passes them
        work = [loads(own) for own in microbatchings]
        self.abreast = max(sum(load.largest for load in actors) for actors in work)  # samples that a stage has at once
        self.num_microsteps = max(1, plan.global_batch // (self.stages * self.abreast))
        ticks = math.lcm(
            *(load.samples * plan.stages[s].num_layers for s, actors in enumerate(work) for load in actors)
        )
        self.actors = [
            [
                _Actor(self._limit(stage, actor, load), ticks // (load.samples * plan.stages[stage].num_layers))
                for actor, load in enumerate(actors)
            ]
            for stage, actors in enumerate(work)
        ]
        # By stage and microbatch who runs a pass; by station and microbatch its turn in line, and a forward's ticks.
        self.owners = [
            [actors[replica] for replica in own.replicas]
            for actors, own in zip(self.actors, microbatchings, strict=True)
        ]
        self.turns = [self._turns(station) for station in range(self.stations)]
        self.ticks = [self._ticks(station) for station in range(self.stations)]
        self.above, self.below = self._overlaps(-1), self._overlaps(1)
        self.lacks = self._lacks()  # what a pass still waits for
        self.awake = {actor: None for actors in self.actors for actor in actors}  # those that may have something to do
        self._queue()

    def _overlaps(self, direction: int) -> list[list[list[int]]]:
        """Return for each stage and microbatch the microbatches of the stage before (-1) or after (1) that share samples with
        it."""
        found = []
        for stage, own in enumerate(self.microbatchings):
            other = self.microbatchings[(stage + direction) % self.stages]
            found.append(
                [
                    list(range(bisect_left(other.stops, start + 1), bisect_left(other.starts, stop)))
                    for start, stop in zip(own.starts, own.stops, strict=True)
                ]
            )
        return found

    def _limit(self, stage: int, actor: int, load: Load) -> int:
        asked, _ = asked_in_flight(self.plan, stage)[actor]
        if asked is not None:
            return asked
        per_batch = load.samples / load.largest  # microbatches of the actor
        per_stage = per_batch * self.abreast / self.plan.global_batch
        least = depth(stage, self.stages, per_stage, per_batch / self.num_microsteps, self.plan.num_chunks)
        return max(1, math.ceil(least + per_stage))

    def _turns(self, station: int) -> list[tuple[int, int, int]]:
        batch, starts = self.plan.global_batch, self.microbatchings[station % self.stages].starts
        return [(start * self.num_microsteps // batch, station, n) for n, start in enumerate(starts)]

    def _ticks(self, station: int) -> list[int]:
        stage = station % self.stages
        layers, own = self.plan.stages[stage].chunks[station // self.stages].size, self.microbatchings[stage]
        return [
            actor.ticks * layers * (stop - start)
            for actor, start, stop in zip(self.owners[stage], own.starts, own.stops, strict=True)
        ]

    def _lacks(self) -> dict[Kind, list[list[int]]]:
        """Return by kind, station and microbatch for how many passes a pass waits."""
        forwards, backwards = [], []
        for station in range(self.stations):
            above, below = self.above[station % self.stages], self.below[station % self.stages]
            forwards.append([len(own) if station else 0 for own in above])
            backwards.append([1 + (len(own) if station + 1 < self.stations else 0) for own in below])
        return {Kind.FORWARD: forwards, Kind.BACKWARD: backwards}

    def _queue(self) -> None:
        for station, turns in enumerate(self.turns):
            for actor, turn in zip(self.owners[station % self.stages], turns, strict=True):
                actor.line.append(turn)
                if not station:
                    actor.ready.add(turn)
        for actor in self.awake:
            heapq.heapify(actor.line)

    def run(self) -> list[list[ActorOrder]]:
        """Run all passes, and return those of each actor in the order in which they ran."""
        left = 2 * sum(map(len, self.turns))
        under_way: list[tuple[int, int, Step]] = []  # by when they end, then by when they started
        started, now = 0, 0
        while left:
            begun = [step for actor in self.awake if not actor.busy and (step := self._pick(actor))]
            self.awake.clear()
            if not begun and not under_way:
                begun = [self._out_of_line()]
            for step in begun:
                kind, station, n = step
                taken = self.ticks[station][n] * (1 if kind is Kind.FORWARD else 2)
                heapq.heappush(under_way, (now + taken, started, step))
                started += 1
            now = under_way[0][0]
            while under_way and under_way[0][0] == now:
                self._done(*heapq.heappop(under_way)[2])
                left -= 1
        return [[listed(actor.operations, actor.indices) for actor in actors] for actors in self.actors]

    def _pick(self, actor: _Actor) -> Step | None:
        """Return what an actor begins now, or None if it must wait."""
        while actor.line and actor.line[0] in actor.gone:
            heapq.heappop(actor.line)
        if actor.held < actor.limit and actor.line and actor.line[0] in actor.ready:
            return self._forward(actor, heapq.heappop(actor.line))
        if not actor.backwards:
            return None
        _, station, n = heapq.heappop(actor.backwards)
        return self._start(actor, Kind.BACKWARD, -station, n)

    def _forward(self, actor: _Actor, turn: tuple[int, int, int]) -> Step:
        actor.ready.remove(turn)
        return self._start(actor, Kind.FORWARD, *turn[1:])

    def _start(self, actor: _Actor, kind: Kind, station: int, n: int) -> Step:
        actor.busy = True
        actor.held += 1 if kind is Kind.FORWARD else -1
        chunk, stage = divmod(station, self.stages)
        actor.operations.append((kind, chunk))
        actor.indices.append(self.microbatchings[stage].indices[n])
        return kind, station, n

    def _out_of_line(self) -> Step:
        """Return what runs if all actors wait for each other: the first forward that only lacks room. It is given room."""
        able = [actor for actors in self.actors for actor in actors if actor.ready]
        assert able, "passes wait for each other"
        actor = min(able, key=lambda one: (one.held >= one.limit, min(one.ready)))
        actor.limit = max(actor.limit, actor.held + 1)
        actor.gone.add(min(actor.ready))
        return self._forward(actor, min(actor.ready))

    def _done(self, kind: Kind, station: int, n: int) -> None:
        stage = station % self.stages
        actor = self.owners[stage][n]
        actor.busy, self.awake[actor] = False, None
        if kind is Kind.FORWARD:
            if station + 1 < self.stations:
                for m in self.below[stage][n]:
                    self._less(Kind.FORWARD, station + 1, m)
            self._less(Kind.BACKWARD, station, n)
        elif station:
            for m in self.above[stage][n]:
                self._less(Kind.BACKWARD, station - 1, m)

    def _less(self, kind: Kind, station: int, n: int) -> None:
        lacks = self.lacks[kind][station]
        lacks[n] -= 1
        if lacks[n]:
            return
        actor, turn = self.owners[station % self.stages][n], self.turns[station][n]
        self.awake[actor] = None
        if kind is Kind.FORWARD:
            actor.ready.add(turn)
        else:
            heapq.heappush(actor.backwards, (turn[0], -station, n))
