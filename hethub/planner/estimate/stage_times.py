"""Stages of candidates by themselves in closed form: seconds, samples and memory, for many stages at once.

Arrays are [stage] or [stage, sort]: where a stage has fewer sorts of replicas than others, nobody is of the rest.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import CandidateStage, ReplicaGroup
from hethub.planner.candidate.samples import earliest_finish, largest_able, within
from hethub.planner.estimate.costs import UnitCosts, rank_parameters
from hethub.planner.estimate.memory_model import FIRST, LAST, ONLY, Coefficients, Mode
from hethub.planner.problem.problem import Problem
from hethub.predictor.cost.links import Group
from hethub.predictor.pipeline.state_costs import BUCKET_BYTES
from hethub.spec.plan import ScheduleName

_PROBED = (1e9, 2e9)  # bytes: seconds of a collective are linear in them
NEARLY = 1.02  # over the limit by the closed form, and still worth a look by the evaluator
_UNLIMITED = float(1 << 30)
_BOUNDLESS = float(1 << 60)  # bytes where nobody is: finite, so that they can be taken from each other


class Placed(NamedTuple):
    """A stage where it stands: what of the model's ends it holds (`memory_model.position`), whether its samples come in
    equal parts, whatever the speeds, and under which schedule."""

    stage: CandidateStage
    place: int
    even: bool
    schedule: ScheduleName

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether it holds the embedding and the head."""
        return self.place in (FIRST, ONLY), self.place in (LAST, ONLY)


class StageEstimate(NamedTuple):
    """Stages by themselves, in arrays of one shape: seconds of the busiest replica, of one microbatch each way, of the
    reduction and what follows it."""

    busy: np.ndarray
    least: np.ndarray  # the same on its microbatches alone
    forward: np.ndarray
    backward: np.ndarray  # what the microbatch above waits for
    microbatches: np.ndarray  # of the busiest replica
    wave: np.ndarray  # samples of one microbatch on every replica
    reduce: np.ndarray
    tail: np.ndarray
    finish: np.ndarray  # optimizer and new weights
    most: np.ndarray  # microbatches that every rank has memory for, or nearly so
    sure: np.ndarray  # microbatches that every rank has memory for

    @property
    def microbatch(self) -> np.ndarray:
        """Seconds of one microbatch both ways."""
        return self.forward + self.backward


class Division(NamedTuple):
    """How stages divide the samples: seconds of the busiest replica on its microbatches alone [stage], and [stage,
    sort] samples of a replica and seconds of each in whole microbatches."""

    least: np.ndarray
    taken: np.ndarray
    per_sample: np.ndarray


class Room(NamedTuple):
    """Bytes of ranks that microbatches may fill, and what a microbatch held fills, and one whose weights' gradients
    are put off."""

    free: Any
    microbatch: Any
    deferred_wgrad: Any


class _Sort(NamedTuple):
    """One of the replicas of a stage: seconds of a whole microbatch each way, by layer and for what embedding and head
    add."""

    micro_batch: Any
    forward: Any
    backward: Any
    embedding_forward: Any
    embedding_backward: Any
    head_forward: Any
    head_backward: Any


class _Side(NamedTuple):
    """Stages side by side: their layers, replicas and ZeRO levels [stage], and [stage, sort] how many replicas are of
    a sort, over how many ranks of its degree training state is cut, how large their microbatches are, and seconds of
    these each way."""

    stages: Sequence[Placed]
    layers: np.ndarray
    replicas: np.ndarray
    zero: np.ndarray
    numbers: np.ndarray
    shards: np.ndarray
    micro_batches: np.ndarray
    forward: np.ndarray
    backward: np.ndarray


class _Sums(NamedTuple):
    """What stages sum over their replicas, [stage]: parameters, and seconds of a sum of any bytes, and of each."""

    parameters: np.ndarray
    latency: np.ndarray
    per_byte: np.ndarray

    def seconds(self, width: int) -> np.ndarray:
        """Seconds to reduce or to gather `width` bytes of every parameter."""
        found: np.ndarray = self.latency + self.per_byte * self.parameters * width
        return found


_NOBODY = _Sort(1, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
_NO_BYTES = Coefficients(*(0.0 for _ in Coefficients._fields))  # type: ignore[arg-type]
ANY_ROOM = Room(float("inf"), 0.0, 0.0)
_ALONE = (0.0, 0.0)  # a replica has nobody to sum with


class StageTimes:
    """Estimates of stages."""

    def __init__(self, problem: Problem, costs: UnitCosts) -> None:
        self.problem, self.costs = problem, costs
        self._sorts: dict[object, _Sort] = {}
        self._bytes: dict[object, Coefficients] = {}
        self._largest: dict[object, int] = {}
        self._collectives: dict[object, tuple[float, float]] = {}
        self._capacity = [problem.capacity(kind) for kind in range(len(problem.kinds))]  # bytes of a rank

    def divided(self, stages: Sequence[Placed]) -> Division:
        """How the stages divide the samples."""
        return self._divided(self._side_by_side(stages))

    def estimates(self, stages: Sequence[Placed]) -> tuple[StageEstimate, Division, Room]:
        """The stages in full, how they divide the samples, and what their ranks have for microbatches, or nearly so."""
        own = self._side_by_side(stages)
        division, sums, room = self._divided(own), self._sums(own), self._rooms(own)
        forward, backward, microbatches = self._microbatches(own, division.taken)
        num_bytes = np.maximum(sums.parameters * self.costs.gradient_width, 1.0)
        reduce = (sums.latency + sums.per_byte * num_bytes) * np.where(own.zero > 0, 1, 2)
        gather = np.where(own.zero > 0, sums.seconds(self.costs.width), 0.0)
        named = np.array([placed.stage.state_shares != () for placed in stages])  # left to the evaluator
        most = np.trunc(room.free / np.maximum(room.microbatch, 1.0)).min(axis=1)
        sure = np.trunc((room.free - (NEARLY - 1) * self._capacities(own)) / np.maximum(room.microbatch, 1.0)).min(
            axis=1
        )
        found = StageEstimate(
            busy=division.least, least=division.least, forward=forward, backward=backward, microbatches=microbatches,
            wave=np.minimum((own.numbers * own.micro_batches).sum(axis=1), self.problem.batch.global_batch),
            reduce=reduce, tail=reduce * np.minimum(1.0, BUCKET_BYTES / num_bytes),
            finish=gather + self._optimizer(own, sums.parameters / own.shards.max(axis=1)),
            most=np.where(named, _UNLIMITED, np.minimum(most, _UNLIMITED)),
            sure=np.where(named, _UNLIMITED, np.minimum(sure, _UNLIMITED)),
        )  # fmt: skip
        met = (own.zero >= 2) & (own.replicas > 1)
        if met.any():
            rounds = self._in_rounds(own, found, sums)
            found = StageEstimate(*(np.where(met, *each) for each in zip(rounds, found, strict=True)))
        return found._replace(backward=found.backward - self._deferred_wgrad(stages) * own.layers), division, room

    def room(
        self, stage: CandidateStage, own: ReplicaGroup, place: int, schedule: ScheduleName, slack: float = 1.0
    ) -> Room:
        """What one of the group's ranks has for microbatches, by the closed form."""
        shards = stage.ranks / own.tp if stage.zero else 1
        at = self._coefficients(stage, own, place, schedule)
        return _room(at, stage.layers, shards, slack * self._capacity[own.kind])

    def largest(self, stage: CandidateStage, own: ReplicaGroup, place: int, schedule: ScheduleName, held: int) -> int:
        """The largest micro-batch up to that of the group with which its ranks have memory for so many microbatches;
        named state shares are left to the evaluator. 0 where one sample is too much."""
        if stage.state_shares:
            return own.micro_batch
        key = (stage.layers, stage.recompute, stage.zero, stage.replicas, own[:3], place, schedule, held)
        found = self._largest.get(key)
        if found is None:

            def is_able(size: int) -> bool:
                room = self.room(stage, own._replace(micro_batch=size), place, schedule)
                return bool(room.free >= held * max(room.microbatch, 1.0))

            found = self._largest[key] = largest_able(is_able, own.micro_batch)
        return found

    def collective(self, groups: Sequence[ReplicaGroup]) -> tuple[float, float]:
        """Seconds of a reduce-scatter or an all-gather over replicas: of any, and more per byte."""
        key = tuple([(own.kind, own.tp, own.number) for own in groups])
        found = self._collectives.get(key)
        if found is None:
            group, network = self._group(groups), self.costs.network
            one, two = (network.reduce_scatter(group, num_bytes, self.costs.sharing(group)) for num_bytes in _PROBED)
            per_byte = (two - one) / (_PROBED[1] - _PROBED[0])
            found = self._collectives[key] = (one - per_byte * _PROBED[0], per_byte)
        return found

    def _side_by_side(self, stages: Sequence[Placed]) -> _Side:
        width = max([len(placed.stage.groups) for placed in stages])
        sorts = [[self._sort(own, placed) for own in placed.stage.groups] for placed in stages]
        numbers = [[own.number for own in placed.stage.groups] for placed in stages]
        shards = [[p.stage.ranks / own.tp if p.stage.zero else 1.0 for own in p.stage.groups] for p in stages]
        each = _Sort(*np.array(_padded(sorts, width, _NOBODY)).transpose(2, 0, 1))
        layers = np.array([float(placed.stage.layers) for placed in stages])
        x = layers[:, None]
        return _Side(
            stages=stages,
            layers=layers,
            replicas=np.array([placed.stage.replicas for placed in stages]),
            zero=np.array([placed.stage.zero for placed in stages]),
            numbers=np.array(_padded(numbers, width, 0)),
            shards=np.array(_padded(shards, width, 1.0)),
            micro_batches=each.micro_batch,
            forward=x * each.forward + each.embedding_forward + each.head_forward,
            backward=x * each.backward + each.embedding_backward + each.head_backward,
        )

    def _sort(self, own: ReplicaGroup, placed: Placed) -> _Sort:
        key = (own[:3], placed.stage.recompute, placed.place)
        found = self._sorts.get(key)
        if found is None:
            layer, *ends = self.costs.rate(*own[:3], placed.stage.recompute)
            there = zip(placed.ends, ends, strict=True)
            beside = [seconds if holds else 0.0 for holds, part in there for seconds in part]
            found = self._sorts[key] = _Sort(own.micro_batch, *layer, *beside)
        return found

    def _divided(self, own: _Side) -> Division:
        total = self.problem.batch.global_batch
        per_sample = (own.forward + own.backward) / own.micro_batches
        share = -(-total // own.replicas)
        least = share * np.where(own.numbers > 0, per_sample, 0.0).max(axis=1)
        taken = np.repeat(share[:, None].astype(float), per_sample.shape[1], axis=1)
        by_speed = np.array([not placed.even and len(placed.stage.groups) > 1 for placed in own.stages])
        if by_speed.any():
            rates = per_sample[by_speed]
            least[by_speed] = ended = earliest_finish(total, rates, own.numbers[by_speed])
            taken[by_speed] = np.clip(within(ended, rates), 1, total)
        return Division(least, taken, per_sample)

    def _microbatches(self, own: _Side, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of a microbatch each way as the samples see it on average, and the most microbatches of a replica;
        no microbatch is larger than its replica's samples."""
        forward, backward = own.forward.copy(), own.backward.copy()
        for s, i in np.argwhere(taken < own.micro_batches).tolist():
            placed, group = own.stages[s], own.stages[s].stage.groups[i]
            rate = self.costs.rate(group.kind, group.tp, int(taken[s, i]), placed.stage.recompute)
            forward[s, i], backward[s, i] = rate.microbatch(placed.stage.layers, *placed.ends)
        part = taken * own.numbers / self.problem.batch.global_batch  # what of the samples passes a sort
        microbatches = np.where(own.numbers > 0, taken / np.minimum(own.micro_batches, taken), 0.0)
        return (part * forward).sum(axis=1), (part * backward).sum(axis=1), microbatches.max(axis=1)

    def _in_rounds(self, own: _Side, alone: StageEstimate, sums: _Sums) -> StageEstimate:
        """Stages under ZeRO-2/3, their replicas in lockstep: every microbatch waits for gathers and reductions of its
        layers that compute does not hide."""
        gather = np.where(own.zero == 3, sums.seconds(self.costs.width), 0.0)
        reduce = sums.seconds(self.costs.gradient_width)
        slowest = [np.where(own.numbers > 0, each, 0.0).max(axis=1) for each in (own.forward, own.backward)]
        forward = np.maximum(gather, slowest[0]) + gather / own.layers
        backward = np.maximum(gather + reduce, slowest[1]) + (gather + reduce) / own.layers
        rounds = np.maximum(alone.microbatches, self.problem.batch.global_batch / alone.wave)
        return alone._replace(
            busy=np.maximum(alone.busy, rounds * (forward + backward)), forward=forward, backward=backward, microbatches=rounds,
            reduce=np.zeros_like(reduce), tail=reduce / own.layers,
        )  # fmt: skip

    def _deferred_wgrad(self, stages: Sequence[Placed]) -> np.ndarray:
        """[stage]: seconds of a layer's backward that the microbatch above does not wait for."""
        found = [
            min([self.costs.deferred_wgrad(*own[:3], placed.stage.recompute) for own in placed.stage.groups])
            if placed.schedule == "zero_bubble"
            else 0.0
            for placed in stages
        ]
        return np.array(found)

    def _rooms(self, own: _Side) -> Room:
        """[stage, sort]: what ranks have for microbatches, or nearly so."""
        width = own.numbers.shape[1]
        kept = [
            [self._coefficients(p.stage, group, p.place, p.schedule) for group in p.stage.groups] for p in own.stages
        ]
        at = Coefficients(*np.array(_padded(kept, width, _NO_BYTES)).transpose(2, 0, 1))
        return _room(at, own.layers[:, None], own.shards, NEARLY * self._capacities(own))

    def _capacities(self, own: _Side) -> np.ndarray:
        """[stage, sort]: bytes of a rank."""
        capacities = [[self._capacity[group.kind] for group in placed.stage.groups] for placed in own.stages]
        return np.array(_padded(capacities, own.numbers.shape[1], _BOUNDLESS))

    def _coefficients(
        self, stage: CandidateStage, own: ReplicaGroup, place: int, schedule: ScheduleName
    ) -> Coefficients:
        key = (own[:3], stage.recompute, stage.zero, schedule, place)
        found = self._bytes.get(key)
        if found is None:
            mode = Mode(stage.zero, "1f1b" if schedule == "gpipe" else schedule)
            at = self.costs.coefficients(*own[:3], stage.recompute, mode)
            found = self._bytes[key] = Coefficients(*(float(part[place]) for part in at))  # type: ignore[arg-type]
        return found

    def _sums(self, own: _Side) -> _Sums:
        met = [self.collective(p.stage.groups) if p.stage.replicas > 1 else _ALONE for p in own.stages]
        tp = np.array([min([group.tp for group in placed.stage.groups]) for placed in own.stages])
        first, last = np.array([placed.ends for placed in own.stages]).T
        return _Sums(rank_parameters(self.problem.model, tp, own.layers, first, last), *np.array(met).T)

    def _optimizer(self, own: _Side, owned: np.ndarray) -> np.ndarray:
        """[stage]: seconds of a rank that owns so many parameters, on the slowest kind."""
        slowest = np.zeros_like(owned)
        for kind in {group.kind for placed in own.stages for group in placed.stage.groups}:
            here = np.array([kind in {group.kind for group in placed.stage.groups} for placed in own.stages])
            slowest = np.where(here, np.maximum(slowest, self.costs.layer_costs[kind].optimizer(owned)), slowest)
        return slowest

    def _group(self, groups: Sequence[ReplicaGroup]) -> Group:
        """Where one rank of every replica is, as if they were the first to be assigned."""
        machines: Counter[int] = Counter()
        islands: Counter[str] = Counter()
        for kind, tp, _, number in groups:
            island, left = self.problem.kinds[kind].island, number
            for ranks in self.problem.kinds[kind].machines:
                here = min(left, len(ranks) // tp)
                if here:
                    machines[self.costs.network.places[ranks[0]].machine] += here
                    islands[island] += here
                left -= here
        return Group(machines.total(), tuple(machines.items()), tuple(islands.items()))


def _room(at: Coefficients, layers: Any, shards: Any, capacity: Any) -> Room:
    """What ranks of so much memory have for microbatches."""
    kept = at.once + at.layer * layers + (at.state_once + at.state_layer * layers) / shards
    return Room(capacity - kept, at.microbatch + at.layer_microbatch * layers, at.layer_deferred_wgrad * layers)


def _padded(rows: Sequence[list[Any]], width: int, blank: Any) -> list[list[Any]]:
    """The rows, all of one width."""
    return [row + [blank] * (width - len(row)) for row in rows]
