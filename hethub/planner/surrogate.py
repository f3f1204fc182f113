"""A step's seconds in closed form: ranks drafts before the predictor judges the best of them.

Per stage: the exact busy time of its slowest replica, one tile's latency, the gradients' reduction. Over stages: the
slowest way from the first forward to the last backward through each stage under 1F1B.
"""

from typing import NamedTuple

from hethub.planner.costs import UnitCosts, rank_parameters
from hethub.planner.draft import Draft, DraftStage, Seat
from hethub.planner.footprint import position
from hethub.planner.problem import Problem
from hethub.planner.samples import Worker, earliest_finish
from hethub.predictor.state_costs import BUCKET_BYTES

NEARLY = 1.02  # over the limit by the closed form, and still worth a look by the judge


class StageEstimate(NamedTuple):
    """A stage by itself: seconds of the busiest replica, of one tile each way, of the reduction and what follows it."""

    busy: float
    forward: float
    backward: float
    tiles: float  # of the busiest replica
    reduce: float
    tail: float
    finish: float  # optimizer and new weights


class Surrogate:
    """Estimates drafts; stages seen before cost nothing."""

    def __init__(self, problem: Problem, costs: UnitCosts) -> None:
        self.problem, self.costs = problem, costs
        self._stages: dict[object, StageEstimate] = {}
        self._crossings: dict[object, float] = {}
        self._workers: dict[object, Worker] = {}
        self._fits: dict[object, bool] = {}

    def seconds(self, draft: Draft) -> float:
        """The estimated step; infinite where a stage has more replicas than samples."""
        if max(draft.replica_counts) > self.problem.batch.global_batch:
            return float("inf")
        last = len(draft.stages) - 1
        stages = [self.stage(stage, index == 0, index == last, draft.even) for index, stage in enumerate(draft.stages)]
        crossing = [self._crossing(draft.stages[s], draft.stages[s + 1]) for s in range(last)] + [0.0]
        after = 0.0  # one tile through all later stages and back
        detours = [0.0] * (last + 1)
        for s in range(last, -1, -1):
            detours[s] = after
            after += stages[s].forward + stages[s].backward + (2 * crossing[s - 1] if s else 0.0)
        fill = drain = end = 0.0
        drains = []
        for s, stage in enumerate(stages):
            tile = stage.forward + stage.backward
            held = last - s + 1 + (draft.slack if s < last else 0)
            gap = max(0.0, 2 * detours[s] - (held - 1) * tile)
            circuit = stage.tiles * (tile + detours[s]) / held
            end = max(end, fill + max(stage.busy + gap, circuit) + drain)
            drains.append(drain)
            fill += stage.forward + crossing[s]
            drain += stage.backward + crossing[s]
        reduced = max(
            end - d + max(stage.tail, stage.reduce - stage.backward) for stage, d in zip(stages, drains, strict=True)
        )
        return reduced + max(stage.finish for stage in stages)

    def slowest(self, draft: Draft) -> int:
        """The stage whose busiest replica works longest."""
        last = len(draft.stages) - 1
        busy = [self.stage(stage, index == 0, index == last).busy for index, stage in enumerate(draft.stages)]
        return busy.index(max(busy))

    def likely_fits(self, draft: Draft) -> bool:
        """Whether every rank is within its memory by the closed form, or so near that only the judge can tell."""
        last = len(draft.stages) - 1
        return all(
            self._stage_fits(stage, last - index + 1 + (draft.slack if index < last else 0), index == 0, index == last)
            for index, stage in enumerate(draft.stages)
        )

    def _stage_fits(self, stage: DraftStage, held: int, first: bool, last: bool) -> bool:
        key = (stage.layers, stage.sorts, stage.recompute, stage.zero, held, first, last)
        found = self._fits.get(key)
        if found is None:
            place, count = position(first, last), len(stage.seats)
            shards = count if stage.zero else 1
            found = self._fits[key] = stage.state_shares != () or all(
                self._bytes(stage, seat, held, place, shards) <= NEARLY * self.problem.capacity(seat.unit.kind)
                for seat in self._examples(stage)
            )
        return found

    def _bytes(self, stage: DraftStage, seat: Seat, held: int, place: int, shards: int) -> float:
        found = self.problem.coefficients(seat.unit.kind, seat.unit.tp, seat.micro_batch, stage.recompute)
        return float(found.fixed(stage.layers, held, place) + found.state(stage.layers, place) / shards)

    def stage(self, stage: DraftStage, first: bool, last: bool, even: bool = False) -> StageEstimate:
        key = (stage.layers, stage.sorts, stage.recompute, stage.zero, first, last, even)
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = self._stage(stage, first, last, even)
        return found

    def _stage(self, stage: DraftStage, first: bool, last: bool, even: bool) -> StageEstimate:
        seats = {sort: next(s for s in stage.seats if s.sort == sort) for sort, _ in stage.sorts}
        workers = {sort: self._worker(stage, seat, first, last) for sort, seat in seats.items()}
        counts = [(workers[sort], count) for sort, count in stage.sorts]
        samples = self.problem.batch.global_batch
        share = -(-samples // len(stage.seats))
        busy = max(worker.seconds(share) for worker, _ in counts) if even else earliest_finish(samples, counts)
        forward = backward = tiles = 0.0
        for sort, count in stage.sorts:
            unit, b = seats[sort].unit, sort[2]
            own = min(samples, max(1, workers[sort].within(busy)))
            tile = self.costs.rate(unit, min(b, own), stage.recompute).tile(stage.layers, first, last)
            part = own * count / samples  # what of the samples passes this sort
            forward, backward = forward + part * tile.forward, backward + part * tile.backward
            tiles = max(tiles, own / min(b, own))
        reduce, tail, gather = self._reduction(stage, first, last)
        finish = gather + self._optimizer(stage, first, last)
        return StageEstimate(busy, forward, backward, tiles, reduce, tail, finish)

    def _worker(self, stage: DraftStage, seat: Seat, first: bool, last: bool) -> Worker:
        """The seat with whole tiles and proportional parts of them; exact shares of short tiles come with the plan."""
        key = (seat.sort, stage.layers, stage.recompute, first, last)
        found = self._workers.get(key)
        if found is None:
            b = seat.micro_batch
            whole = self.costs.rate(seat.unit, b, stage.recompute).tile(stage.layers, first, last).total
            found = self._workers[key] = Worker(b, tuple(whole * (i + 1) / b for i in range(b)))
        return found

    def _parameters(self, stage: DraftStage, first: bool, last: bool) -> float:
        tp = min(seat.unit.tp for seat in self._examples(stage))
        return rank_parameters(self.problem.model, tp, stage.layers, first, last)

    @staticmethod
    def _examples(stage: DraftStage) -> list[Seat]:
        return list({seat.sort: seat for seat in stage.seats}.values())

    def _reduction(self, stage: DraftStage, first: bool, last: bool) -> tuple[float, float, float]:
        """Seconds to reduce, its part that nothing hides, and to gather new weights."""
        if len(stage.seats) == 1:
            return 0.0, 0.0, 0.0
        group = self.costs.network.group([seat.unit.ranks[0] for seat in stage.seats])
        machine = self.costs.network.machines[group.machines[0][0]]
        sharing = max(1, machine.accelerators // group.most_per_machine)
        parameters = self._parameters(stage, first, last)
        num_bytes = parameters * max(4, self.costs.width)
        once = self.costs.network.reduce_scatter(group, num_bytes, sharing)
        reduce = once if stage.zero else 2 * once
        gather = self.costs.network.all_gather(group, parameters * self.costs.width, sharing) if stage.zero else 0.0
        return reduce, reduce * min(1.0, BUCKET_BYTES / num_bytes), gather

    def _optimizer(self, stage: DraftStage, first: bool, last: bool) -> float:
        owned = self._parameters(stage, first, last) / (len(stage.seats) if stage.zero else 1)
        return max(self.costs.layer_costs[seat.unit.kind].optimizer(owned) for seat in self._examples(stage))

    def _crossing(self, above: DraftStage, below: DraftStage) -> float:
        """Seconds of one tile between two stages, from the slowest pair of sorts."""
        sender, receiver = above.seats[0], below.seats[0]
        sending = len(above.seats)
        key = (sender.sort, receiver.sort, sending)
        found = self._crossings.get(key)
        if found is None:
            places = self.problem.cluster.places
            machine = places[sender.unit.ranks[0]].machine
            sharing = sum(places[seat.unit.ranks[0]].machine == machine for seat in above.seats)
            tokens = min(sender.micro_batch, receiver.micro_batch) * self.problem.batch.seq_len
            num_bytes = tokens * self.problem.model.hidden * self.costs.width
            network = self.costs.network
            found = network.link(sender.unit.ranks[0], receiver.unit.ranks[0], sharing).seconds(num_bytes)
            if receiver.unit.tp > 1:
                found += network.link(*receiver.unit.ranks[:2]).seconds(num_bytes)
            self._crossings[key] = found
        return found
