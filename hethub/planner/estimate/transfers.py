"""Seconds that microbatches are under way between stages, before ranks are named."""

from itertools import pairwise

from hethub.planner.candidate.candidate import Candidate, ReplicaGroup
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.problem.problem import Problem
from hethub.predictor.cost.cache import memoized

Groups = tuple[ReplicaGroup, ...]  # of a stage


class P2pCosts:
    """Boundaries of candidates; those seen before cost nothing."""

    def __init__(self, problem: Problem, costs: UnitCosts) -> None:
        self.problem, self.costs = problem, costs
        self._machine_sizes = [len(device_type.machines[0]) for device_type in problem.device_types]

    def of(self, candidate: Candidate) -> list[float]:
        """Seconds of one microbatch over each boundary, from the slowest pair of sorts."""
        return self._boundaries(tuple([stage.groups for stage in candidate.stages]))

    @memoized
    def _boundaries(self, stages: tuple[Groups, ...]) -> list[float]:
        used, sizes = [0] * len(self._machine_sizes), self._machine_sizes
        found = []
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
            self._p2p_seconds(one, two, one.device_type == two.device_type and neighbours)
            for one, neighbours in zip(above, near, strict=True)
            for two in below
        )

    def _p2p_seconds(self, sender: ReplicaGroup, receiver: ReplicaGroup, neighbours: bool) -> float:
        """Seconds of one microbatch from a replica to another, on one machine or on two of their device types."""
        one = self.problem.device_types[sender.device_type].machines
        two = self.problem.device_types[receiver.device_type].machines
        source = one[0][0]
        target = one[0][-1] if neighbours else two[-1][0]
        sharing = min(sender.number, max(1, len(one[0]) // sender.tp))
        tokens = min(sender.micro_batch, receiver.micro_batch) * self.problem.batch.seq_len
        num_bytes = tokens * self.problem.model.hidden * self.costs.width
        network = self.costs.network
        seconds = network.link(source, target, sharing).seconds(num_bytes)
        ends = ((one, sender.tp), (two, receiver.tp))
        told = [network.broadcast(at[0][:width]).seconds(num_bytes) for at, width in ends if width > 1]
        return seconds + max(told, default=0.0)
