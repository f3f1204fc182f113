"""Generate plans in which each stage holds one device type. Each device type has its own number of stages, TP degree, micro-batch
and recompute.

Under a goal (`stage_layouts`), how many layers a device type can hold in a given number of stages does not depend on the
others. So dynamic programming adds device types one by one, from the last stage to the first. For each number of stages
it finds how to hold all layers so that a microbatch passes through them soonest. All goals are computed at once.
"""

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import Candidate, CandidateStage, Pattern
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.stage_layouts import DeviceTypeLayouts, Ends, Goals
from hethub.planner.generate.table import Table, orders
from hethub.planner.problem.problem import Problem

DEADLINES = (1.02, 1.06, 1.12, 1.2, 1.32, 1.5)  # times perfect balance
MICROSTEPS = (2, 4, 8, 12, 16, 24)  # samples
LEAST_MICROSTEPS = 8  # of a batch: of fewer, too many pass while the pipeline fills
MOST_CANDIDATES = 64

DeviceTypes = frozenset[int]


def propose(problem: Problem, costs: Estimator, table: Table, limit_seconds: float = float("inf")) -> list[Candidate]:
    """Return plans that meet goals, the most promising ones first. Deadlines beyond `limit_seconds` are not tried."""
    balanced_seconds = float(table.bound[0])  # what perfect balance takes
    deadlines = [balanced_seconds * times for times in DEADLINES if balanced_seconds * times < limit_seconds]
    microsteps = [microstep for microstep in MICROSTEPS if LEAST_MICROSTEPS * microstep <= problem.batch.global_batch]
    if len(table.used) == 1 or not deadlines or not microsteps:
        return []
    seconds, microstep = zip(*product(deadlines, range(len(microsteps))), strict=True)
    goals = Goals(np.array(seconds), np.array(microstep), np.array(microsteps))
    layouts = {own: DeviceTypeLayouts(problem, costs, own, goals) for own in sorted(table.used)}
    return SubsetSearch(problem, layouts, goals).candidates() if all(own.layouts for own in layouts.values()) else []


class _State(NamedTuple):
    """What a set of device types can hold in the last stages of a pipeline. `seconds` [goal, stages, layers]: of one
    microbatch through these layers. `front` [goal, stages, layers]: the device type of the foremost of these stages, and
    the number of its stages and layers."""

    seconds: np.ndarray
    front: np.ndarray


class SubsetSearch:
    """The dynamic programme over sets of device types."""

    def __init__(self, problem: Problem, device_types: Mapping[int, DeviceTypeLayouts], goals: Goals) -> None:
        self.problem, self.device_types, self.goals = problem, device_types, goals
        self.layers, self.all = problem.model.layers, DeviceTypes(device_types)
        self.depth = next(iter(device_types.values())).depth
        self.states = {DeviceTypes(): self._nothing()}
        self.states[DeviceTypes()].seconds[:, 0, 0] = 0.0

    def candidates(self) -> list[Candidate]:
        """Return the plans with the smallest sum of deadline and time of a microbatch through all layers."""
        ends: dict[int, _State] = {}
        for behind, device_type in self._edges():
            joined = behind | {device_type}
            if joined == self.all:
                state = ends.setdefault(device_type, self._nothing())
            else:
                state = self.states.setdefault(joined, self._nothing())
            self._extend(behind, device_type, state)
        wanted = self.problem.constraints.pp
        ranked = sorted(
            (float(self.goals.seconds[goal] + state.seconds[goal, stages, -1]), device_type, goal, stages)
            for device_type, state in ends.items()
            for goal, stages in np.argwhere(np.isfinite(state.seconds[:, :, -1])).tolist()
            if wanted in (None, stages)
        )
        found: dict[Candidate, None] = {}
        for _, device_type, goal, stages in ranked:
            if len(found) == MOST_CANDIDATES:
                break
            found[self._candidate(ends[device_type], goal, stages)] = None
        return list(found)

    def _nothing(self) -> _State:
        shape = (len(self.goals.seconds), self.depth + 1, self.layers + 1)
        return _State(np.full(shape, np.inf), np.zeros((*shape, 3), dtype=np.int16))

    def _edges(self) -> list[tuple[DeviceTypes, int]]:
        """Return which device type may come in front of which set of others, the smallest sets first."""
        every = orders(self.problem, self.all)
        found = {(DeviceTypes(order[index + 1 :]), order[index]) for order in every for index in range(len(order))}
        return sorted(found, key=lambda edge: (len(edge[0]), sorted(edge[0]), edge[1]))

    def _ends(self, behind: DeviceTypes, device_type: int) -> Ends:
        return behind | {device_type} == self.all, not behind

    def _extend(self, behind: DeviceTypes, device_type: int, new: _State) -> None:
        """Put a device type in front of others, with every number of stages and layers that leaves no more layers than the
        remaining device types can hold."""
        old, total = self.states[behind].seconds, self.layers + 1
        needed = max(0, self.layers - sum(self.device_types[other].most for other in self.all - behind - {device_type}))
        for stages in self.device_types[device_type].layouts:
            table = self.device_types[device_type].table(stages, self._ends(behind, device_type))
            if table is None:
                continue
            for layers in range(stages, table.seconds.shape[2]):
                seconds = table.seconds[:, :, layers, None]
                depth, held = slice(stages, stages + seconds.shape[1]), slice(max(needed, layers), None)
                through = old[:, : seconds.shape[1], max(needed - layers, 0) : total - layers] + seconds
                there = new.seconds[:, depth, held]
                better = through < there
                if better.any():
                    np.copyto(there, through, where=better)
                    new.front[:, depth, held][better] = (device_type, stages, layers)

    def _candidate(self, state: _State, goal: int, stages: int) -> Candidate:
        left, layers = self.all, self.layers
        found: list[CandidateStage] = []
        while left:
            device_type, number, own = state.front[goal, stages, layers].tolist()
            left, stages, layers = left - {device_type}, stages - number, layers - own
            found += self.device_types[device_type].stages(number, self._ends(left, device_type), goal, stages, own)
            state = self.states[left]
        return Candidate(tuple(found), pattern=Pattern(self.problem.schedule))
