"""A step's seconds in closed form: ranks drafts before the predictor judges the best of them.

Per stage: the exact busy time of its slowest replica, one tile's latency, the gradients' reduction. Over stages: the
slowest way from the first forward to the last backward through each stage under 1F1B, and the slowest circuit that
tiles in flight allow.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from hethub.planner.costs import UnitCosts, rank_parameters
from hethub.planner.crossings import Crossings
from hethub.planner.draft import Draft, DraftStage, Seats, chains, merged
from hethub.planner.flights import default_flights, enough_flights, round_trips, slowest_circuit
from hethub.planner.footprint import Mode, position
from hethub.planner.problem import Problem
from hethub.planner.samples import Worker, earliest_finish
from hethub.predictor.links import Group
from hethub.predictor.state_costs import BUCKET_BYTES
from hethub.spec.plan import ScheduleName

_PROBED = (1e9, 2e9)  # bytes: seconds of a collective are linear in them
NEARLY = 1.02  # over the limit by the closed form, and still worth a look by the judge


class StageEstimate(NamedTuple):
    """A stage by itself: seconds of the busiest replica, of one tile each way, of the reduction and what follows it."""

    busy: float
    forward: float
    backward: float  # what the tile above waits for
    tiles: float  # of the busiest replica
    wave: int  # samples of one tile on every replica
    reduce: float
    tail: float
    finish: float  # optimizer and new weights

    @property
    def tile(self) -> float:
        return self.forward + self.backward


class _Room(NamedTuple):
    """Bytes of a rank that tiles may fill, and what a tile held fills, and one whose weights' gradients are put off."""

    free: float
    tile: float
    put_off: float


class Surrogate:
    """Estimates drafts; stages seen before cost nothing."""

    def __init__(self, problem: Problem, costs: UnitCosts) -> None:
        self.problem, self.costs = problem, costs
        self._seconds: dict[Draft, float] = {}
        self._holds: dict[Draft, list[int]] = {}
        self._stages: dict[object, StageEstimate] = {}
        self._computing: dict[object, float] = {}
        self._bytes: dict[object, tuple[float, ...]] = {}
        self._collectives: dict[object, tuple[float, float]] = {}
        self.crossings = Crossings(problem, costs)
        self._most_held: dict[object, int] = {}
        self._groups: dict[object, Group] = {}

    def seconds(self, draft: Draft) -> float:
        """The estimated step; infinite where a stage has more replicas than samples, or memory does not suffice."""
        found = self._seconds.get(draft)
        if found is None:
            found = self._seconds[draft] = self._estimate(draft)
        return found

    def _estimate(self, draft: Draft) -> float:
        if max(draft.replica_counts) > self.problem.batch.global_batch or self.problem.forbids_any(draft.mixtures):
            return float("inf")
        stages, crossing = self.stages(draft), self.crossings.of(draft)
        held = self.holds(draft)
        filled = (draft.schedule or self.problem.schedule) == "zero_bubble"  # weights' gradients fill the drain
        # Who has the shorter update begins the next step while others still step (predictor/step.py).
        first = min([stage.finish for stage in stages])
        tied = self._tied(draft)
        fill = drain = end = shown = 0.0
        circuit, trips = 0.0, round_trips(stages, crossing)
        if len(stages) > 1:
            around = slowest_circuit(stages, trips, held, self.problem.batch.global_batch)
            circuit = stages[0].finish - first + around
        last = len(stages) - 1
        for s, (stage, hold) in enumerate(zip(stages, held, strict=True)):
            away = trips[s][-1] - stage.tile  # until a tile is back from all later stages
            fill = max(fill, stage.finish - first)
            slack = away - (hold - 1) * stage.forward
            end = max(end, fill + stage.busy + max(0.0, slack))
            if not filled:
                gap = max(0.0, slack) + max(0.0, away - (hold - 1) * stage.backward)
                end = max(end, fill + stage.busy + gap + drain)
            reduce = max(stage.tail, stage.reduce - stage.backward) + (tied if s in (0, last) else 0.0)
            shown = max(shown, reduce - drain)
            if s < last:
                fill += stage.forward + crossing[s]
                drain += stage.backward + crossing[s]
        return max(end, circuit) + shown + first

    def is_faster(self, draft: Draft, seconds: float) -> bool:
        """Whether the estimate is below `seconds` and the draft likely fits."""
        return self.least(draft) < seconds and self.seconds(draft) < seconds and self.likely_fits(draft)

    def least(self, draft: Draft) -> float:
        """Seconds that the draft's busiest replica computes at least, whatever the schedule: no prediction is shorter."""
        last = len(draft.stages) - 1
        return max([self._busy(stage, s == 0, s == last, draft.even) for s, stage in enumerate(draft.stages)])

    def least_in_passes(self, draft: Draft) -> float:
        """The same where every replica gathers new weights and steps between its tiles, as under ministages."""
        last = len(draft.stages) - 1
        return max(
            self._busy(stage, s == 0, s == last, draft.even) + self.stage(stage, s == 0, s == last, draft.even).finish
            for s, stage in enumerate(draft.stages)
        )

    def _tied(self, draft: Draft) -> float:
        """Seconds to sum a tied head's gradients over the ranks of both ends, and to send its new weights."""
        if not self.problem.model.tied_head or len(draft.stages) == 1:
            return 0.0
        seats = merged([*draft.stages[0].seats, *draft.stages[-1].seats])
        latency, per_byte = self._collective(seats)
        each = self.problem.model.vocab * self.problem.model.hidden / min(own.tp for own in seats)
        return 2 * latency + per_byte * each * (max(4, self.costs.width) + self.costs.width)

    def holds(self, draft: Draft) -> list[int]:
        """Tiles in flight per stage: by depth, or for a roomy draft as many as its circuits need to run at the pace of
        the busiest stage, where they fit; never fewer than the stage below holds."""
        found = self._holds.get(draft)
        if found is None:
            found = self._holds[draft] = self._in_flight(draft)
        return found

    def _in_flight(self, draft: Draft) -> list[int]:
        last = len(draft.stages) - 1
        schedule = draft.schedule or self.problem.schedule
        if not draft.roomy or not last:
            return default_flights(self._under(draft, schedule))
        # Where weights' gradients are put off, as many tiles as if they were not keep the gaps to be filled few.
        plain = self.problem.schedule if draft.schedule == "zero_bubble" else schedule
        stages, crossing = self._under(draft, plain), self.crossings.of(draft)
        pace = self.problem.batch.global_batch / max(stage.busy for stage in stages)
        room = [self._most(stage, s == 0, s == last, schedule) for s, stage in enumerate(draft.stages)]
        held = enough_flights(
            stages, round_trips(stages, crossing), pace, room, [ceil(stage.tiles) for stage in stages]
        )
        if schedule == "zero_bubble" and (most := self._most_under_way(draft, held)) < self._under_way(draft, held):
            held = [min(h, max(int(most // stage.wave), 1)) for h, stage in zip(held, stages, strict=True)]
        return held

    def samples(self, draft: Draft, index: int) -> list[int]:
        """About how many samples each of a stage's replicas takes, by seats."""
        total, stage, last = self.problem.batch.global_batch, draft.stages[index], len(draft.stages) - 1
        if draft.even or len(stage.seats) == 1:
            return [-(-total // stage.replicas)] * len(stage.seats)
        workers = self._workers(stage, index == 0, index == last)
        busy = self._busy(stage, index == 0, index == last, draft.even)
        return [min(total, max(1, worker.within(busy))) for worker, _ in workers]

    def slowest(self, draft: Draft) -> int:
        """The stage whose busiest replica works longest."""
        busy = [stage.busy for stage in self.stages(draft)]
        return busy.index(max(busy))

    def likely_fits(self, draft: Draft) -> bool:
        """Whether every rank is within its memory by the closed form, or so near that only the judge can tell."""
        last, schedule = len(draft.stages) - 1, draft.schedule or self.problem.schedule
        held = self.holds(draft)
        for s, (stage, hold) in enumerate(zip(draft.stages, held, strict=True)):
            if hold > self._most(stage, s == 0, s == last, schedule):
                return False
        return schedule != "zero_bubble" or self._under_way(draft, held) <= self._most_under_way(draft, held)

    def _under_way(self, draft: Draft, held: Sequence[int]) -> int:
        """Samples at most under way in a stage: what zero_bubble lets all others put off up to."""
        return max([stage.wave * h for stage, h in zip(self.stages(draft), held, strict=True)])

    def _most_under_way(self, draft: Draft, held: Sequence[int]) -> float:
        """Up to how many samples every stage has memory for, those put off among them, beside the tiles it holds."""
        last, most = len(draft.stages) - 1, float("inf")
        for s, (stage, hold, waves) in enumerate(zip(draft.stages, held, self.stages(draft), strict=True)):
            for own in stage.seats:
                room = self._room(stage, own, position(s == 0, s == last), "zero_bubble", NEARLY)
                put_off = int((room.free - hold * room.tile) / max(room.put_off, 1.0))
                most = min(most, waves.wave * (hold + put_off + 1) - 1)
        return most

    def _most(self, stage: DraftStage, first: bool, last: bool, schedule: ScheduleName) -> int:
        """The most tiles that every rank of a stage has memory for, by the closed form; named shares are left to the
        judge."""
        key = (stage.core, stage.state_shares != (), first, last, schedule)
        found = self._most_held.get(key)
        if found is None:
            place = position(first, last)
            found = min(self.room(stage, own, place, schedule, slack=NEARLY) for own in stage.seats)
            self._most_held[key] = found
        return found

    def room(self, stage: DraftStage, own: Seats, place: int, schedule: ScheduleName | None, slack: float = 1.0) -> int:
        """The most tiles that one of the seats' ranks has memory for, by the closed form."""
        if stage.state_shares:
            return 1 << 30
        found = self._room(stage, own, place, schedule or self.problem.schedule, slack)
        return int(found.free / max(found.tile, 1.0))

    def _room(self, stage: DraftStage, own: Seats, place: int, schedule: ScheduleName, slack: float) -> _Room:
        mode = Mode(stage.zero, "1f1b" if schedule == "gpipe" else schedule)
        key = (own[:3], stage.recompute, mode, place)
        found = self._bytes.get(key)
        if found is None:
            at = self.problem.coefficients(*own[:3], stage.recompute, mode)
            found = self._bytes[key] = tuple(float(part[place]) for part in at)
        once, layer, tile, layer_tile, state_once, state_layer, put_off = found
        shards = stage.replicas if stage.zero else 1
        kept = once + layer * stage.layers + (state_once + state_layer * stage.layers) / shards
        free = slack * self.problem.capacity(own.kind) - kept
        return _Room(free, tile + layer_tile * stage.layers, put_off * stage.layers)

    def stages(self, draft: Draft) -> list[StageEstimate]:
        """Every stage by itself."""
        return self._under(draft, draft.schedule or self.problem.schedule)

    def _under(self, draft: Draft, schedule: ScheduleName) -> list[StageEstimate]:
        last, even = len(draft.stages) - 1, draft.even
        found = [self.stage(stage, s == 0, s == last, even, schedule) for s, stage in enumerate(draft.stages)]
        if not draft.alike or even or not last or len(set(draft.replica_counts)) > 1:
            return found
        if all(len(stage.seats) == 1 for stage in draft.stages):
            return found
        return self._chained(draft, found)

    def _chained(self, draft: Draft, alone: list[StageEstimate]) -> list[StageEstimate]:
        """The stages where replica i of every stage gets the same samples (`complete`): a chain goes at the pace of its
        slowest stage, and all others of it wait."""
        last, samples = len(draft.stages) - 1, self.problem.batch.global_batch
        each = []
        for count, sorts in chains(draft):
            if len({own.micro_batch for own in sorts}) > 1:
                return alone
            tiles = [
                self._worker(stage, own, s == 0, s == last)
                for s, (stage, own) in enumerate(zip(draft.stages, sorts, strict=True))
            ]
            each.append((max(tiles, key=lambda tile: tile.tile_seconds[-1]), count, tiles))
        end = earliest_finish(samples, [(slowest, count) for slowest, count, _ in each])
        taken = [min(samples, max(1, slowest.within(end))) for slowest, _, _ in each]
        loads = [(n, tiles) for n, (_, _, tiles) in zip(taken, each, strict=True)]
        most = max(n / tiles[0].micro_batch for n, tiles in loads)
        return [
            stage._replace(busy=max(stage.busy, *(tiles[s].seconds(n) for n, tiles in loads)), tiles=most)
            for s, stage in enumerate(alone)
        ]

    def stage(
        self, stage: DraftStage, first: bool, last: bool, even: bool = False, schedule: ScheduleName = "1f1b"
    ) -> StageEstimate:
        key = (stage.core, first, last, even, schedule)
        found = self._stages.get(key)
        if found is None:
            found = self._stage(stage, first, last, even)
            if stage.zero >= 2 and stage.replicas > 1:
                found = self._in_rounds(stage, found, first, last)
            if schedule == "zero_bubble":
                found = found._replace(backward=found.backward - self._put_off(stage))
            self._stages[key] = found
        return found

    def _busy(self, stage: DraftStage, first: bool, last: bool, even: bool) -> float:
        """Seconds of the stage's busiest replica on its tiles alone."""
        key = (stage.layers, stage.seats, stage.recompute, first, last, even)
        found = self._computing.get(key)
        if found is None:
            samples, workers = self.problem.batch.global_batch, self._workers(stage, first, last)
            share = -(-samples // stage.replicas)
            found = max([w.seconds(share) for w, _ in workers]) if even else earliest_finish(samples, workers)
            self._computing[key] = found
        return found

    def _workers(self, stage: DraftStage, first: bool, last: bool) -> list[tuple[Worker, int]]:
        return [(self._worker(stage, own, first, last), own.number) for own in stage.seats]

    def _put_off(self, stage: DraftStage) -> float:
        """Seconds of a tile's backward that nobody above waits for."""
        seats = stage.seats
        return stage.layers * min(self.costs.put_off(*own[:3], stage.recompute) for own in seats)

    def _in_rounds(self, stage: DraftStage, alone: StageEstimate, first: bool, last: bool) -> StageEstimate:
        """The stage under ZeRO-2/3, its replicas in lockstep: every tile waits for gathers and reductions of its layers
        that compute does not hide."""
        group, network = self._group(stage.seats), self.costs.network
        parameters, sharing = self._parameters(stage, first, last), self.costs.sharing(group)
        gather = network.all_gather(group, parameters * self.costs.width, sharing) if stage.zero == 3 else 0.0
        reduce = network.reduce_scatter(group, parameters * max(4, self.costs.width), sharing)
        tiles = [self.costs.rate(*own[:3], stage.recompute).tile(stage.layers, first, last) for own in stage.seats]
        forward = max(gather, *(tile.forward for tile in tiles)) + gather / stage.layers
        backward = max(gather + reduce, *(tile.backward for tile in tiles)) + (gather + reduce) / stage.layers
        rounds = max(alone.tiles, self.problem.batch.global_batch / alone.wave)
        return alone._replace(
            busy=max(alone.busy, rounds * (forward + backward)), forward=forward, backward=backward, tiles=rounds,
            reduce=0.0, tail=reduce / stage.layers,
        )  # fmt: skip

    def _stage(self, stage: DraftStage, first: bool, last: bool, even: bool) -> StageEstimate:
        samples = self.problem.batch.global_batch
        workers, share = self._workers(stage, first, last), -(-samples // stage.replicas)
        busy = self._busy(stage, first, last, even)
        forward = backward = tiles = 0.0
        for own, (worker, count) in zip(stage.seats, workers, strict=True):
            taken = share if even or len(workers) == 1 else min(samples, max(1, worker.within(busy)))
            size = min(own.micro_batch, taken)
            tile = self.costs.rate(own.kind, own.tp, size, stage.recompute).tile(stage.layers, first, last)
            part = taken * count / samples  # what of the samples passes these
            forward, backward = forward + part * tile.forward, backward + part * tile.backward
            tiles = max(tiles, taken / size)
        wave = sum(own.number * own.micro_batch for own in stage.seats)
        reduce, tail, gather = self._reduction(stage, first, last)
        finish = gather + self._optimizer(stage, first, last)
        return StageEstimate(busy, forward, backward, tiles, min(wave, samples), reduce, tail, finish)

    def _worker(self, stage: DraftStage, own: Seats, first: bool, last: bool) -> Worker:
        """A replica with whole tiles and proportional parts of them; exact shares of short tiles come with the plan."""
        b = own.micro_batch
        whole = self.costs.rate(own.kind, own.tp, b, stage.recompute).tile(stage.layers, first, last).total
        return Worker(b, tuple(whole * (i + 1) / b for i in range(b)))

    def _parameters(self, stage: DraftStage, first: bool, last: bool) -> float:
        tp = min(own.tp for own in stage.seats)
        return rank_parameters(self.problem.model, tp, stage.layers, first, last)

    def _reduction(self, stage: DraftStage, first: bool, last: bool) -> tuple[float, float, float]:
        """Seconds to reduce, its part that nothing hides, and to gather new weights."""
        if stage.replicas == 1:
            return 0.0, 0.0, 0.0
        latency, per_byte = self._collective(stage.seats)
        parameters = self._parameters(stage, first, last)
        num_bytes = parameters * max(4, self.costs.width)
        once = latency + per_byte * num_bytes
        reduce = once if stage.zero else 2 * once
        gather = latency + per_byte * parameters * self.costs.width if stage.zero else 0.0
        return reduce, reduce * min(1.0, BUCKET_BYTES / num_bytes), gather

    def _collective(self, seats: Sequence[Seats]) -> tuple[float, float]:
        """Seconds of a reduce-scatter or an all-gather over replicas: of any, and more per byte."""
        key = tuple([(own.kind, own.tp, own.number) for own in seats])
        found = self._collectives.get(key)
        if found is None:
            group, network = self._group(seats), self.costs.network
            one, two = (network.reduce_scatter(group, num_bytes, self.costs.sharing(group)) for num_bytes in _PROBED)
            per_byte = (two - one) / (_PROBED[1] - _PROBED[0])
            found = self._collectives[key] = (one - per_byte * _PROBED[0], per_byte)
        return found

    def _group(self, seats: Sequence[Seats]) -> Group:
        """Where one rank of every replica is, as if they were the first to be seated."""
        key = tuple((own.kind, own.tp, own.number) for own in seats)
        found = self._groups.get(key)
        if found is None:
            ranks = []
            for kind, tp, count in key:
                slots = (m[i] for m in self.problem.kinds[kind].machines for i in range(0, len(m) - tp + 1, tp))
                ranks += [rank for rank, _ in zip(slots, range(count), strict=False)]
            found = self._groups[key] = self.costs.network.group(ranks)
        return found

    def _optimizer(self, stage: DraftStage, first: bool, last: bool) -> float:
        owned = self._parameters(stage, first, last) / (stage.replicas if stage.zero else 1)
        return max(self.costs.layer_costs[own.kind].optimizer(owned) for own in stage.seats)
