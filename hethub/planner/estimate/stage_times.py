"""Estimate each stage of candidates by itself, in closed form: its seconds, samples and memory. Many stages are computed
at once, in the arrays that stage_figures.py describes."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from hethub.planner.candidate.candidate import CandidateStage, Pattern, ReplicaGroup
from hethub.planner.candidate.samples import earliest_finish, within
from hethub.planner.estimate.costs import UnitCosts, rank_parameters
from hethub.planner.estimate.memory_model import ENDS, MIDDLE, Coefficients
from hethub.planner.estimate.memory_probes import Mode
from hethub.planner.estimate.stage_figures import Division, Placed, Room, Side, Sort, StageEstimate, Sums
from hethub.planner.problem.problem import Problem
from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.constants import is_cpu
from hethub.predictor.cost.groups import Operation
from hethub.predictor.cost.node_links import host_gbytes_per_second
from hethub.predictor.memory.state import optimizer_bytes
from hethub.predictor.pipeline.state.costs import BUCKET_BYTES
from hethub.spec.plan import Offload, Recompute

_PROBED = (1e9, 2e9)  # bytes: seconds of a collective are linear in them
NEARLY = 1.02  # over the limit by the closed form, and still worth a look by the evaluator
_UNLIMITED = float(1 << 30)
_BOUNDLESS = float(1 << 60)  # bytes where nobody is: finite, so that they can be taken from each other


_NOBODY, _NO_TIME = ReplicaGroup(-1, 1 << 30, 1, 0), Sort(1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
_NO_BYTES = Coefficients(*(0.0 for _ in Coefficients._fields))  # type: ignore[arg-type]
ANY_ROOM = Room(float("inf"), 0.0, 0.0)
_ALONE = (0.0, 0.0)  # a replica has nobody to sum with


class StageTimes:
    """Estimates stages of one problem."""

    def __init__(self, problem: Problem, costs: UnitCosts) -> None:
        self.problem, self.costs = problem, costs
        devices, fit = [device_type.accelerator for device_type in problem.device_types], costs.network.fit
        firsts = [problem.cluster.places[device_type.ranks[0]] for device_type in problem.device_types]
        nodes = [problem.cluster.machines[place.machine] for place in firsts]
        per_host = problem.cluster.links.staging.per_host_gbytes_per_second
        real = not problem.cluster.emulated
        on_cpu = np.array([real and is_cpu(device) for device in devices])
        self.host_seconds, both = (  # of a byte where all of a machine offload, and where others go the other way
            [
                1e-9 / host_gbytes_per_second(device, fit, per_host, directions * node.accelerators)
                for device, node in zip(devices, nodes, strict=True)
            ]
            for directions in (1, 2)
        )
        host_bytes = [node.host_memory_bytes / node.accelerators for node in nodes]  # for a rank
        # By device type, and last what nobody has, whose device type is -1.
        self._capacity = np.array([*map(problem.capacity, range(len(devices))), _BOUNDLESS])  # bytes of a rank
        self._host_one_way = np.append(self.host_seconds, 0.0)  # seconds of a byte
        # The same each way at once; CPUs copy one after the other.
        self._host_both_ways = np.append(np.where(on_cpu, 2 * self._host_one_way[:-1], both), 0.0)
        self._host_bytes = np.append(host_bytes, _BOUNDLESS)
        # Seconds until a rank's part of its host is full.
        self._host_filled = np.append(self._host_bytes[:-1] * self.host_seconds, 1.0)
        self._overlap = np.append(np.where(on_cpu, 1.0, fit["overlap_cost"]), 0.0)
        self._beside_step = np.append(self._overlap[:-1] * real, np.inf)

    def divided(self, stages: Sequence[Placed]) -> Division:
        """Return how the stages divide the samples among their replicas."""
        return self._divided(self._side_by_side(stages))

    def estimates(self, stages: Sequence[Placed]) -> tuple[StageEstimate, Division, Room]:
        """Return everything estimated of the stages, how they divide the samples, and the memory that their ranks have for
        microbatches, up to NEARLY times the limit."""
        own = self._side_by_side(stages)
        division, sums, room = self._divided(own), self._sums(own), self._rooms(own)
        forward, backward, microbatches = self._microbatches(own, division.taken)
        num_bytes = np.maximum(sums.parameters * self.costs.gradient_width, 1.0)
        reduce = (sums.latency + sums.per_byte * num_bytes) * np.where(own.zero > 0, 1, 2)
        gather = np.where((own.zero == 1) | (own.zero == 2), sums.seconds(self.costs.width), 0.0)
        most = np.trunc(room.free / np.maximum(room.microbatch, 1.0)).min(axis=1)
        surely = room.free - (NEARLY - 1) * self._capacity[own.device_types]
        sure = np.trunc(surely / np.maximum(room.microbatch, 1.0)).min(axis=1)
        found = StageEstimate(
            busy=division.least, forward=forward, backward=backward,
            covered=_covered(own, division), microbatches=microbatches,
            microstep=np.minimum((own.numbers * own.micro_batches).sum(axis=1), self.problem.batch.global_batch),
            reduce=reduce, tail=reduce * np.minimum(1.0, BUCKET_BYTES / num_bytes),
            finish=gather + self._optimizer(own, sums.parameters / own.shards.max(axis=1)) + self._stored(own, sums),
            most=np.minimum(most, _UNLIMITED),
            sure=np.minimum(sure, _UNLIMITED),
            host=self._hosted(own, sums),
            host_microbatch=(self._copied(own) / self._host_filled[own.device_types]).max(axis=1),
        )  # fmt: skip
        moves = (own.zero >= 2) & (own.replicas > 1)
        moves |= np.array(["parameters" in p.stage.offload or "activations" in p.stage.offload for p in stages])
        if moves.any():
            moving = self._with_transfers(own, found, sums)
            found = StageEstimate(*(np.where(moves, *each) for each in zip(moving, found, strict=True)))
        slowed = self._slowed(own, found)
        return (
            found._replace(
                backward=found.backward - self._deferred_wgrad(stages) * own.layers,
                reduce=found.reduce + slowed,
                tail=found.tail + slowed,
            ),
            division,
            room,
        )

    def largest(
        self, stage: CandidateStage, own: ReplicaGroup, place: int, pattern: Pattern, held: float, slack: float = 1.0
    ) -> int:
        """Return the largest micro-batch, no larger than the group's own, with which its ranks have memory for `held`
        microbatches. It is 0 where even one sample is too much."""
        shards = stage.ranks / own.tp if stage.zero else 1.0
        return self._largest(own[:3], Mode.of(stage, pattern), place, stage.layers, shards, held, slack)

    @memoized
    def _largest(
        self, sort: tuple[int, int, int], mode: Mode, place: int, layers: int, shards: float, held: float, slack: float
    ) -> int:
        device_type, tp, most = sort
        capacity = slack * self.problem.capacity(device_type)

        def is_able(size: int) -> bool:
            room = _room(self._coefficients(device_type, tp, size, mode, place), layers, shards, capacity)
            return bool(room.free >= held * max(room.microbatch, 1.0))

        # Mostly the one asked for is; else below one that is able all are.
        return most if is_able(most) else bisect_left(range(1, most), True, key=lambda size: not is_able(size))

    def collective(self, groups: Sequence[ReplicaGroup], zero: int = 1) -> tuple[float, float]:
        """Return the latency and the seconds per byte of a reduce-scatter or an all-gather over the replicas, under ZeRO-0
        of half an all-reduce. Each sort of replica is taken to have the first ranks of its device type, whatever else
        was assigned before."""
        sorts = tuple([(own.device_type, own.tp, own.number) for own in groups])
        return self._collective(sorts, "reduce_scatter" if zero else "all_reduce")

    @memoized
    def _collective(self, sorts: tuple[tuple[int, int, int], ...], operation: Operation) -> tuple[float, float]:
        network = self.costs.network
        group = network.group([rank for sort in sorts for rank in self._first_ranks(*sort)])
        one, two = (
            network.reduce_scatter(group, num_bytes, network.sharing(group), operation) for num_bytes in _PROBED
        )
        per_byte = (two - one) / (_PROBED[1] - _PROBED[0])
        return one - per_byte * _PROBED[0], per_byte

    def _first_ranks(self, device_type: int, tp: int, number: int) -> list[int]:
        """Return the first rank of each of the device type's first `number` units of this degree."""
        units = self.problem.units(device_type, tp)
        return [unit.ranks[0] for unit in units if unit.tp == tp][:number]

    def _side_by_side(self, stages: Sequence[Placed]) -> Side:
        width = max([len(placed.stage.groups) for placed in stages])
        groups = np.array(_padded([list(placed.stage.groups) for placed in stages], width, _NOBODY))
        device_types, tp, micro_batches, numbers = groups.transpose(2, 0, 1)
        shards = [[p.stage.ranks / own.tp if p.stage.zero else 1.0 for own in p.stage.groups] for p in stages]
        sorts = [[self._sort(*own[:3], p.stage.recompute, p.place) for own in p.stage.groups] for p in stages]
        each = Sort(*np.array(_padded(sorts, width, _NO_TIME)).transpose(2, 0, 1))
        layers = np.array([float(placed.stage.layers) for placed in stages])
        x = layers[:, None]
        return Side(
            stages=stages,
            layers=layers,
            replicas=np.array([placed.stage.replicas for placed in stages]),
            zero=np.array([placed.stage.zero for placed in stages]),
            device_types=device_types,
            tp=tp,
            numbers=numbers,
            shards=np.array(_padded(shards, width, 1.0)),
            micro_batches=micro_batches,
            forward=x * each.forward + each.embedding_forward + each.head_forward,
            backward=x * each.backward + each.embedding_backward + each.head_backward,
        )

    @memoized
    def _sort(self, device_type: int, tp: int, micro_batch: int, recompute: Recompute, place: int) -> Sort:
        layer, *ends = self.costs.rate(device_type, tp, micro_batch, recompute)
        there = zip(ENDS[place], ends, strict=True)
        beside = [seconds if holds else 0.0 for holds, part in there for seconds in part]
        return Sort(*layer, *beside)

    def _divided(self, own: Side) -> Division:
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

    def _microbatches(self, own: Side, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds of a microbatch forward and backward, averaged over the samples, and the most microbatches of
        any replica. No microbatch is larger than its replica's samples."""
        forward, backward = own.forward.copy(), own.backward.copy()
        for s, i in np.argwhere(taken < own.micro_batches).tolist():
            placed, group = own.stages[s], own.stages[s].stage.groups[i]
            rate = self.costs.rate(group.device_type, group.tp, int(taken[s, i]), placed.stage.recompute)
            forward[s, i], backward[s, i] = rate.microbatch(placed.stage.layers, *placed.ends)
        part = taken * own.numbers / self.problem.batch.global_batch  # what of the samples passes a sort
        microbatches = np.where(own.numbers > 0, taken / np.minimum(own.micro_batches, taken), 0.0)
        return (part * forward).sum(axis=1), (part * backward).sum(axis=1), microbatches.max(axis=1)

    def _with_transfers(self, own: Side, alone: StageEstimate, sums: Sums) -> StageEstimate:
        """Return the estimates of stages whose passes overlap with transfers: gathers and reductions of their layers,
        weights fetched from the host, or copies of what layers keep.

        The replicas of a round work in lockstep. Under schedules that go chunk by chunk, state moves once for all
        microbatches."""
        whole = np.array([placed.pattern.goes_chunk_by_chunk for placed in own.stages])
        rounds = np.maximum(alone.microbatches, self.problem.batch.global_batch / alone.microstep)
        met, number = own.replicas > 1, np.where(whole, 1.0, rounds)
        sharded, gathered = (own.zero >= 2) & met, (own.zero == 3) & met
        host = self._host_one_way[own.device_types].max(axis=1)
        fetched = sums.parameters * self.costs.width * host / np.where(gathered, own.replicas, 1)
        gather = np.where(gathered, sums.seconds(self.costs.width, own.layers), 0.0)
        gather = gather + np.where(_offloads(own, "parameters"), fetched, 0.0)
        # Where passes turn, the layer between two of them stays.
        gather *= 1.0 - np.array([placed.pattern.schedule == "1f1b" for placed in own.stages]) / own.layers
        reduce = np.where(sharded, sums.seconds(self.costs.gradient_width, own.layers), 0.0)
        copied = self._copied(own)
        forward, backward = (
            np.where(own.numbers > 0, np.maximum(each, copied), 0.0).max(axis=1) for each in (own.forward, own.backward)
        )
        overlap = self._overlap[own.device_types].max(axis=1)
        scale, lockstep = np.where(whole, rounds, 1.0), sharded & ~whole
        # Two layers' sums at most go on beside the next forward, where its weights leave them time.
        late = np.where(lockstep, np.clip(forward - gather, 0.0, 2 * reduce / own.layers), 0.0)
        ahead, behind = (
            np.maximum(0.0, seconds - scale * compute) * (1 - overlap) + overlap * seconds
            for seconds, compute in ((gather, forward), (gather + reduce, backward + late))
        )
        slowed = (forward + backward) / np.maximum(alone.forward + alone.backward, 1e-12)
        longer = np.where(copied.max(axis=1) > 0, alone.busy * np.maximum(slowed, 1.0), alone.busy)
        computing = np.where(lockstep, np.maximum(longer, rounds * (forward + backward)), longer)
        return alone._replace(
            busy=computing + number * (ahead + behind),
            forward=forward + ahead / scale,
            backward=backward + behind / scale,
            covered=np.where(lockstep, backward + behind, alone.covered),
            microbatches=np.where(lockstep, rounds, alone.microbatches),
            reduce=np.where(sharded, reduce / own.layers, alone.reduce),
            tail=np.where(sharded, reduce / own.layers, alone.tail),
        )

    def _slowed(self, own: Side, found: StageEstimate) -> np.ndarray:
        """Return by how many seconds a step's single reduction slows the backward that hides it, [stage]. On CPUs this is
        all the time it takes."""
        cost = self._beside_step[own.device_types].min(axis=1)
        once = (own.zero < 2) & (own.replicas > 1)
        one_sample = np.where(own.numbers > 0, own.backward / own.micro_batches, np.inf).min(axis=1)
        return np.where(once, cost * np.minimum(found.reduce - found.tail, one_sample), 0.0)

    def _copied(self, own: Side) -> np.ndarray:
        """Return the seconds of copying a microbatch's activations to the host, [stage, sort]; 0 where they stay."""
        found = np.zeros(own.numbers.shape)
        for s, placed in enumerate(own.stages):
            if "activations" in placed.stage.offload:
                plain = Mode(placed.stage.recompute, placed.stage.zero)
                for i, group in enumerate(placed.stage.groups):
                    at = self._coefficients(*group[:3], plain, MIDDLE)
                    found[s, i] = at.layer_microbatch * placed.stage.layers * self.host_seconds[group.device_type]
        return found

    def _hosted(self, own: Side, sums: Sums) -> np.ndarray:
        """Return how much of its part of the host's memory a rank fills, [stage]: with offloaded state, and with the copy
        from which its checkpoint is written (weight and moments of the parameters it steps). The evaluator also rounds
        pinned buffers up; this does not."""
        owned = sums.parameters / own.shards.max(axis=1)
        kept = np.where(own.zero == 3, owned, sums.parameters)
        optimizer = _offloads(own, "optimizer") * owned * optimizer_bytes(self.costs.width)
        saved = (
            3
            * self.costs.gradient_width
            * sums.parameters
            / np.where(own.zero > 0, own.shards.max(axis=1), own.replicas)
        )
        found = saved + optimizer + _offloads(own, "parameters") * kept * self.costs.width
        return found / self._host_bytes[own.device_types].min(axis=1)

    def _stored(self, own: Side, sums: Sums) -> np.ndarray:
        """Return the seconds that new weights take from their owners' hosts over the accelerators to all hosts, [stage]."""
        seconds = 2 * self.costs.width * sums.parameters * self._host_one_way[own.device_types].max(axis=1)
        sent = (own.replicas > 1) & (own.zero > 0) & (own.zero < 3)  # else each rank steps all that it holds
        return np.where(_offloads(own, "parameters") & sent, seconds, 0.0)

    def _deferred_wgrad(self, stages: Sequence[Placed]) -> np.ndarray:
        """Return the seconds of a layer's backward that zero_bubble puts off, so that the stage before does not wait for
        them, [stage]."""
        found = [
            min([self.costs.deferred_wgrad(*own[:3]) for own in placed.stage.groups])
            if placed.pattern.defers_wgrad
            else 0.0
            for placed in stages
        ]
        return np.array(found)

    def _rooms(self, own: Side) -> Room:
        """Return the memory that ranks have for microbatches, up to NEARLY times the limit, [stage, sort]."""
        width = own.numbers.shape[1]
        kept = []
        for p in own.stages:
            mode = Mode.of(p.stage, p.pattern)
            kept.append([self._coefficients(*g[:3], mode, p.place) for g in p.stage.groups])
        at = Coefficients(*np.array(_padded(kept, width, _NO_BYTES)).transpose(2, 0, 1))
        return _room(at, own.layers[:, None], own.shards, NEARLY * self._capacity[own.device_types])

    @memoized
    def _coefficients(self, device_type: int, tp: int, micro_batch: int, mode: Mode, place: int) -> Coefficients:
        at = self.costs.coefficients(device_type, tp, micro_batch, mode)
        return Coefficients(*[float(part[place]) for part in at])  # type: ignore[arg-type]

    def _sums(self, own: Side) -> Sums:
        met = [self.collective(p.stage.groups, p.stage.zero) if p.stage.replicas > 1 else _ALONE for p in own.stages]
        first, last = np.array([placed.ends for placed in own.stages]).T
        return Sums(rank_parameters(self.problem.model, own.tp.min(axis=1), own.layers, first, last), *np.array(met).T)

    def _optimizer(self, own: Side, owned: np.ndarray) -> np.ndarray:
        """Return the optimizer's seconds on the slowest device type if a rank owns `owned` parameters, [stage]. Where nothing
        is sharded, the ranks of wider replicas hold and step fewer than those of the narrowest."""
        slowest, narrowest = np.zeros_like(owned), own.tp.min(axis=1)
        for device_type, cost in enumerate(self.costs.layer_costs):
            part = narrowest / np.where(own.device_types == device_type, own.tp, np.inf).min(axis=1)
            seconds = cost.optimizer(owned * np.where(own.zero == 0, part, 1.0))
            slowest = np.where(part > 0, np.maximum(slowest, seconds), slowest)
        fetched = owned * optimizer_bytes(self.costs.width) * self._host_both_ways[own.device_types].max(axis=1)
        return np.where(_offloads(own, "optimizer"), np.maximum(slowest, fetched), slowest)


def _offloads(own: Side, what: Offload) -> np.ndarray:
    """Return which stages offload it, [stage]."""
    return np.array([what in placed.stage.offload for placed in own.stages])


def _covered(own: Side, division: Division) -> np.ndarray:
    """Return the seconds from when the last replica begins its last backward until all replicas have ended, [stage]."""
    ends = np.where(own.numbers > 0, division.taken * division.per_sample, 0.0)
    begun = np.where(own.numbers > 0, ends - own.backward * np.minimum(1.0, division.taken / own.micro_batches), 0.0)
    return ends.max(axis=1) - begun.max(axis=1)


def _room(at: Coefficients, layers: Any, shards: Any, capacity: Any) -> Room:
    """Return what ranks with `capacity` bytes have for microbatches."""
    kept = at.once + at.layer * layers + (at.state_once + at.state_layer * layers) / shards
    return Room(capacity - kept, at.microbatch + at.layer_microbatch * layers, at.layer_deferred_wgrad * layers)


def _padded(rows: Sequence[list[Any]], width: int, blank: Any) -> list[list[Any]]:
    """Return the rows, filled up with `blank` to one width."""
    return [row + [blank] * (width - len(row)) for row in rows]
