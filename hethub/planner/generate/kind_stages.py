"""Stages of one kind each: every kind in its own number of stages, with its own TP degree, micro-batch and recompute.

Under a goal (`kind_ways`) a kind in so many stages holds a number of layers whatever the other kinds do. So dynamic
programming over the kinds, from the last stage to the first, finds for every number of stages how all layers are held
so that a microbatch passes through soonest; for all goals at once.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import Candidate, CandidateStage
from hethub.planner.candidate.settings import main_orders
from hethub.planner.estimate.cost_model import CostModel
from hethub.planner.generate.kind_ways import Ends, Goals, KindWays
from hethub.planner.generate.table import Table, tabulate
from hethub.planner.problem.problem import Problem

DEADLINES = (1.02, 1.06, 1.12, 1.2, 1.32, 1.5)  # times perfect balance
WAVES = (2, 4, 8, 12, 16, 24)  # samples
LEAST_WAVES = 8  # of a batch: of fewer, too many pass while the pipeline fills
MOST_CANDIDATES = 64

Kinds = frozenset[int]


def propose(
    problem: Problem, costs: CostModel, *, table: Table | None = None, limit_seconds: float = float("inf")
) -> list[Candidate]:
    """Plans that meet goals, the promising ones first; no deadline is beyond the limit."""
    table = tabulate(problem, costs.unit_costs) if table is None else table
    balanced_seconds = float(table.bound[0])  # what perfect balance takes
    deadlines = [balanced_seconds * times for times in DEADLINES if balanced_seconds * times < limit_seconds]
    waves = [wave for wave in WAVES if LEAST_WAVES * wave <= problem.batch.global_batch]
    if len(problem.kinds) == 1 or not deadlines or not waves:
        return []
    seconds, wave = zip(*product(deadlines, range(len(waves))), strict=True)
    goals = Goals(np.array(seconds), np.array(wave), np.array(waves))
    kinds = [KindWays(problem, costs, kind, goals) for kind in range(len(problem.kinds))]
    return TaskGraph(problem, kinds, goals).candidates() if all(kind.ways for kind in kinds) else []


class _State(NamedTuple):
    """Kinds behind each other to the last stage: seconds of a microbatch through what they hold [goal, stages,
    layers], and what stands in front: kind, stages, layers."""

    seconds: np.ndarray
    front: np.ndarray


class TaskGraph:
    """The dynamic programme over sets of kinds."""

    def __init__(self, problem: Problem, kinds: Sequence[KindWays], goals: Goals) -> None:
        self.problem, self.kinds, self.goals = problem, kinds, goals
        self.layers, self.all = problem.model.layers, Kinds(range(len(kinds)))
        self.states = {Kinds(): self._nothing()}
        self.states[Kinds()].seconds[:, 0, 0] = 0.0

    def candidates(self) -> list[Candidate]:
        """The plans of the smallest deadline and way through, for every kind in front."""
        ends: dict[int, _State] = {}
        for behind, kind in self._edges():
            together = behind | {kind}
            if together == self.all:
                state = ends.setdefault(kind, self._nothing())
            else:
                state = self.states.setdefault(together, self._nothing())
            self._extend(behind, kind, state)
        wanted = self.problem.constraints.pp
        ranked = sorted(
            (float(self.goals.seconds[goal] + state.seconds[goal, stages, -1]), kind, goal, stages)
            for kind, state in ends.items()
            for goal, stages in np.argwhere(np.isfinite(state.seconds[:, :, -1])).tolist()
            if wanted in (None, stages)
        )
        found: dict[Candidate, None] = {}
        for _, kind, goal, stages in ranked:
            if len(found) == MOST_CANDIDATES:
                break
            found[self._candidate(ends[kind], goal, stages)] = None
        return list(found)

    def _nothing(self) -> _State:
        shape = (len(self.goals.seconds), self.kinds[0].depth + 1, self.layers + 1)
        return _State(np.full(shape, np.inf), np.zeros((*shape, 3), dtype=np.int16))

    def _edges(self) -> list[tuple[Kinds, int]]:
        """Which kind may come in front of which others, few of them first."""
        orders = main_orders(self.problem)
        found = {(Kinds(order[index + 1 :]), order[index]) for order in orders for index in range(len(order))}
        return sorted(found, key=lambda edge: (len(edge[0]), sorted(edge[0]), edge[1]))

    def _ends(self, behind: Kinds, kind: int) -> Ends:
        return behind | {kind} == self.all, not behind

    def _extend(self, behind: Kinds, kind: int, new: _State) -> None:
        """Puts a kind in front of others, in every number of stages and layers with which the rest can hold what is
        left."""
        old, total = self.states[behind].seconds, self.layers + 1
        needed = max(0, self.layers - sum(self.kinds[other].most for other in self.all - behind - {kind}))
        for stages in self.kinds[kind].ways:
            table = self.kinds[kind].table(stages, self._ends(behind, kind))
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
                    new.front[:, depth, held][better] = (kind, stages, layers)

    def _candidate(self, state: _State, goal: int, stages: int) -> Candidate:
        left, layers = self.all, self.layers
        found: list[CandidateStage] = []
        while left:
            kind, number, own = state.front[goal, stages, layers].tolist()
            left, stages, layers = left - {kind}, stages - number, layers - own
            found += self.kinds[kind].stages(number, self._ends(left, kind), goal, stages, own)
            state = self.states[left]
        return Candidate(tuple(found))
