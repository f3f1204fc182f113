"""Seconds that microbatches are under way between stages, before ranks are named."""

from itertools import pairwise

from hethub.planner.candidate.candidate import Candidate, ReplicaGroup
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.problem.problem import Problem


class Crossings:
    """Boundaries of candidates; those seen before cost nothing."""

    def __init__(self, problem: Problem, costs: UnitCosts) -> None:
        self.problem, self.costs = problem, costs
        self._known: dict[object, float] = {}
        self._ways: dict[object, list[float]] = {}
        self._machine_sizes = [len(kind.machines[0]) for kind in problem.kinds]

    def of(self, candidate: Candidate) -> list[float]:
        """Seconds of one microbatch over each boundary, from the slowest pair of sorts."""
        key = tuple([stage.groups for stage in candidate.stages])
        found = self._ways.get(key)
        if found is None:
            found = self._ways[key] = self._boundaries(candidate)
        return found

    def _boundaries(self, candidate: Candidate) -> list[float]:
        used, sizes = [0] * len(self._machine_sizes), self._machine_sizes
        found = []
        for above, below in pairwise(candidate.stages):
            near = []  # per sort, whether its ranks and as many behind them are on one machine
            for kind, tp, _, number in above.groups:
                start, stop = used[kind], used[kind] + number * tp
                used[kind] = stop
                near.append(start // sizes[kind] == (2 * stop - start - 1) // sizes[kind])
            key = (above.groups, below.groups, *near)
            seconds = self._known.get(key)
            if seconds is None:
                seconds = self._known[key] = max(
                    self._crossing(one, two, one.kind == two.kind and together)
                    for one, together in zip(above.groups, near, strict=True)
                    for two in below.groups
                )
            found.append(seconds)
        return found

    def _crossing(self, sender: ReplicaGroup, receiver: ReplicaGroup, together: bool) -> float:
        key = (sender, receiver[:3], together)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._cross(sender, receiver, together)
        return found

    def _cross(self, sender: ReplicaGroup, receiver: ReplicaGroup, together: bool) -> float:
        """Seconds of one microbatch from a replica to another, on one machine or on two of their kinds."""
        one, two = self.problem.kinds[sender.kind].machines, self.problem.kinds[receiver.kind].machines
        source = one[0][0]
        target = one[0][-1] if together else two[-1][0]
        sharing = min(sender.number, max(1, len(one[0]) // sender.tp))
        tokens = min(sender.micro_batch, receiver.micro_batch) * self.problem.batch.seq_len
        num_bytes = tokens * self.problem.model.hidden * self.costs.width
        network = self.costs.network
        seconds = network.link(source, target, sharing).seconds(num_bytes)
        if receiver.tp > 1:
            seconds += network.broadcast(two[0][: receiver.tp]).seconds(num_bytes)
        return seconds
