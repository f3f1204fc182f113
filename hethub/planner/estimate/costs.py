"""Seconds of microbatches and messages on units of each device type, which guide the search.

They are the predictor's own costs of layers and links, asked for one replica without a plan around it. Plans themselves
are evaluated by the predictor.
"""

from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup
from hethub.planner.candidate.samples import Worker
from hethub.planner.estimate.memory_model import Coefficients, memory_model_of
from hethub.planner.estimate.memory_probes import Mode
from hethub.planner.problem.problem import Problem
from hethub.predictor.cost.cache import layer_cost_of, memoized
from hethub.predictor.cost.constants import is_cpu, packaged
from hethub.predictor.cost.layer import PassSeconds
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.software import HETHUB, element_bytes, gradient_bytes
from hethub.predictor.memory.parameters import RankParameters, rank_widths
from hethub.predictor.memory.surroundings import communicator_bytes
from hethub.spec.model import ModelSpec
from hethub.spec.plan import SCHEDULES, Recompute

Groups = tuple[ReplicaGroup, ...]  # of a stage


class Rate(NamedTuple):
    """Seconds of one microbatch on a unit: of a layer, and what embedding and head add."""

    layer: PassSeconds
    embedding: PassSeconds
    head: PassSeconds

    def microbatch(self, layers: int, first: bool, last: bool) -> PassSeconds:
        """Return the seconds of one microbatch on a stage, forward and backward."""
        forward, backward = layers * self.layer.forward, layers * self.layer.backward
        for there, part in ((first, self.embedding), (last, self.head)):
            if there:
                forward, backward = forward + part.forward, backward + part.backward
        return PassSeconds(forward, backward)


class UnitCosts:
    """The costs of one problem's units, by device type, TP degree, micro-batch and recompute."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.network = Network(problem.cluster, packaged(), problem.profile)
        self.width = element_bytes(HETHUB.math_precision(problem.batch.precision))
        self.gradient_width = gradient_bytes(self.width)  # bytes of a gradient on the wire: fp32 at least
        self.memory = memory_model_of(problem)
        self._on_cpu = [is_cpu(device_type.accelerator) for device_type in problem.device_types]
        batch, figures = problem.batch, (problem.software, problem.profile, packaged())
        self.layer_costs = [
            layer_cost_of(problem.model, device_type.accelerator, batch.seq_len, batch.precision, *figures)
            for device_type in problem.device_types
        ]

    @memoized
    def rate(self, device_type: int, tp: int, samples: int, recompute: Recompute) -> Rate:
        """Return the seconds of a microbatch of `samples` on a unit of `tp` ranks of the device type."""
        problem, cost = self.problem, self.layer_costs[device_type]
        tokens = samples * problem.batch.seq_len
        all_reduce = partial(self.all_reduce, device_type, tp)
        once = all_reduce(tokens * problem.model.hidden * self.width)
        loss = problem.software.loss_seconds(tokens, all_reduce)
        layer, embedding, head = cost.layer(samples, tp, recompute), cost.embedding(samples), cost.head(samples, 1 / tp)
        again = 2 * once if recompute == "full" else 0.0
        # Where zero_bubble is searched beside 1F1B, as 1F1B has it.
        apart = SCHEDULES[problem.schedule].defers_wgrad or problem.cluster.emulated or self._on_cpu[device_type]
        beside = (samples, tp, 1 / tp, once, self.network.fit["overlap_cost"])
        sums = 2 * once if tp == 1 or apart else cost.sums_beside_weights(*beside)
        return Rate(
            PassSeconds(layer.forward + 2 * once, layer.backward + sums + again),
            PassSeconds(embedding.forward + once, embedding.backward),
            PassSeconds(head.forward + once + loss, head.backward),
        )

    def worker(self, stage: CandidateStage, group: ReplicaGroup, first: bool, last: bool) -> Worker:
        """Return one of the group's replicas with the seconds of its microbatches of each size."""
        rates = (self.rate(group.device_type, group.tp, b, stage.recompute) for b in range(1, group.micro_batch + 1))
        # More samples never count as less work, whatever a measured profile says.
        microbatches = accumulate((rate.microbatch(stage.layers, first, last).total for rate in rates), max)
        return Worker(group.micro_batch, tuple(microbatches))

    def coefficients(self, device_type: int, tp: int, micro_batch: int, mode: Mode) -> Coefficients:
        """Return how the memory of a rank of the device type grows with layers and microbatches."""
        on_cpu = self._on_cpu[device_type]
        found = self.memory.coefficients(on_cpu, tp, micro_batch, mode)
        if len(self.problem.cluster.islands[self.problem.device_types[device_type].island]) > 1:
            return found
        # Probes have several ranks of an island.
        return found._replace(once=found.once - communicator_bytes(2, on_cpu=on_cpu))

    @memoized
    def deferred_wgrad(self, device_type: int, tp: int, samples: int) -> float:
        """Return the seconds of a layer's weights' gradients, which zero_bubble puts off."""
        return self.layer_costs[device_type].weight_seconds(samples, tp, 1 / tp)

    def all_reduce(self, device_type: int, tp: int, num_bytes: float) -> float:
        """Return the seconds of an all-reduce over a unit of `tp` ranks."""
        if tp == 1:
            return 0.0
        machines = self.problem.device_types[device_type].machines
        group = self.network.group(next(machine for machine in machines if len(machine) >= tp)[:tp])
        return self.network.all_reduce(group, num_bytes, self.network.sharing(group))

    def p2p_seconds(self, candidate: Candidate) -> list[float]:
        """Return the seconds of one microbatch over each boundary between stages, of the slowest pair of sorts. Ranks are
        not assigned yet."""
        return self._boundaries(tuple([stage.groups for stage in candidate.stages]))

    @memoized
    def _boundaries(self, stages: tuple[Groups, ...]) -> list[float]:
        sizes = [len(device_type.machines[0]) for device_type in self.problem.device_types]
        used, found = [0] * len(sizes), []
        for above, below in pairwise(stages):
            near = []  # per sort, whether its ranks and as many behind them are on one machine
            for device_type, tp, _, number in above:
                start, stop = used[device_type], used[device_type] + number * tp
                used[device_type] = stop
                near.append(start // sizes[device_type] == (2 * stop - start - 1) // sizes[device_type])
            found.append(self._boundary(above, below, tuple(near)))
        return found

    @memoized
    def _boundary(self, above: Groups, below: Groups, near: tuple[bool, ...]) -> float:
        return max(
            self._pair_seconds(one, two, one.device_type == two.device_type and neighbours)
            for one, neighbours in zip(above, near, strict=True)
            for two in below
        )

    def _pair_seconds(self, sender: ReplicaGroup, receiver: ReplicaGroup, neighbours: bool) -> float:
        """Return the seconds of one microbatch from one replica to another, on the same machine if they are neighbours."""
        one = self.problem.device_types[sender.device_type].machines
        two = self.problem.device_types[receiver.device_type].machines
        source = one[0][0]
        target = one[0][-1] if neighbours else two[-1][0]
        sharing = min(sender.number, max(1, len(one[0]) // sender.tp))
        tokens = min(sender.micro_batch, receiver.micro_batch) * self.problem.batch.seq_len
        num_bytes = tokens * self.problem.model.hidden * self.width
        seconds = self.network.link(source, target, sharing).seconds(num_bytes)
        ends = ((one, sender.tp), (two, receiver.tp))
        told = [self.network.broadcast(at[0][:width]).seconds(num_bytes) for at, width in ends if width > 1]
        return seconds + max(told, default=0.0)

    def layer_rate(self, device_type: int) -> float:
        """Return the device type's best layers times samples per second. It weights the device type's part of the batch
        when that is planned alone."""
        return self.layer_costs[device_type].best_layer_samples_per_second(self.problem.batch.global_batch)


def rank_parameters(
    model: ModelSpec, tp: np.ndarray, layers: np.ndarray, first: np.ndarray, last: np.ndarray
) -> np.ndarray:
    """Return the parameters that each stage sums over its replicas, on the fullest of `tp` ranks, [stage]. A tied head on
    another stage than the embedding is summed over both stages (`Estimator`) and counted in neither."""
    held = [RankParameters.of(model, rank_widths(model, degree)[0]) for degree in tp.tolist()]
    rank = RankParameters(*map(np.array, zip(*held, strict=True)))
    apart = first & ~last if model.tied_head else np.zeros_like(first)
    return rank.of_layers(layers, first, last) - apart * rank.table
