"""Exact partition of a line of units and a stack of layers into stages: dynamic programming under a deadline.

The line says in which order units may form stages. For a deadline T (seconds that any replica may be busy in a step)
the fewest units are found that hold the last l layers in d stages, for every l and d: using fewer is never worse. The
smallest feasible T of a rising series is the bottleneck; for every number of stages its own is kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import Candidate, to_candidate
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.memory_model import position
from hethub.planner.generate.small import MOST_UNITS
from hethub.planner.generate.table import Line, Table, orders, tabulate
from hethub.planner.problem.problem import Combination, Problem, Unit

MOST_STAGES = 16
MOST_CELLS = 2_000_000  # of the programme, over all settings


@dataclass(frozen=True)
class Partition:
    """Per stage from first to last, (layers, number of units), and the deadline it meets."""

    stages: tuple[tuple[int, int], ...]
    deadline_seconds: float


def propose(
    problem: Problem,
    costs: Estimator,
    *,
    table: Table | None = None,
    limit_seconds: float = float("inf"),
    most_cells: int = MOST_CELLS,
) -> Iterator[Candidate]:
    """Partitions with free numbers of replicas, for combinations whose bound leaves room below the limit."""
    table = tabulate(problem, costs.unit_costs) if table is None else table
    spent = 0
    for bound, combination in zip(table.bound, table.combinations, strict=True):
        for order in orders(problem):
            units = Line(order, 1).units(problem, combination.degrees)
            if len(units) <= MOST_UNITS:  # of which `small` tries every partition
                continue
            depths = _depths(problem, len(units))
            spent += 8 * max(depths, default=0) * problem.model.layers**2
            if bound >= limit_seconds or spent > most_cells:
                return
            counts = table.memory_counts
            partitioner = Partitioner(problem, costs.unit_costs, units, combination, memory_counts=counts)
            for partition in partitioner.partitions(depths, limit_seconds):
                yield to_candidate(problem, partition.stages, units, combination)


def _depths(problem: Problem, num_units: int) -> list[int]:
    """The numbers of stages worth trying with free numbers of replicas."""
    deepest = min(problem.model.layers, num_units, MOST_STAGES)
    return [depth for depth in range(1, deepest + 1) if problem.constraints.pp in (None, depth)]


class Partitioner:
    """The dynamic programme for a line of units from the first stage to the last, under all deadlines at once. The line is
    walked from its end: a stage's microbatches in flight depend on how many stages come after it."""

    def __init__(
        self,
        problem: Problem,
        costs: UnitCosts,
        line: Sequence[Unit],
        combination: Combination,
        *,
        memory_counts: bool = True,
    ) -> None:
        self.problem, self.costs, self.combination, self.memory_counts = problem, costs, combination, memory_counts
        self.num_layers, self.samples = problem.model.layers, problem.batch.global_batch
        walked = [(unit.device_type, unit.tp) for unit in reversed(line)]
        self.num_units, self.sorts = len(walked), sorted(set(walked))
        runs = [(self.sorts.index(sort), len(list(alike))) for sort, alike in groupby(walked)]
        self.run_sort, self.run_units = np.array(runs).T
        self.run_of = np.repeat(np.arange(len(runs)), self.run_units)
        self.sort_of = self.run_sort[self.run_of]
        rates = [costs.rate(*sort, self._micro_batch(sort), combination.recompute) for sort in self.sorts]
        per_sample = np.array([1.0 / self._micro_batch(sort) for sort in self.sorts])
        self.layer, self.embedding, self.head = (
            np.array([[part.total for part in rate] for rate in rates]).T * per_sample
        )
        # A way: so many last layers held, and how many of these the first of their stages takes, which is the model's
        # first where all are held. Arrays by stage are of 1, 2, … layers, once as any stage and once as the model's
        # first.
        self.held, self.taken = (index + 1 for index in np.tril_indices(self.num_layers))
        self.stage = self.taken - 1 + np.where(self.held == self.num_layers, self.num_layers, 0)

    def _micro_batch(self, sort: tuple[int, int]) -> int:
        return self.combination.micro_batches[sort[0]]

    @property
    def bound_seconds(self) -> float:
        """No partition has a smaller bottleneck: all layers at all units' rates."""
        return float(self.samples * self.num_layers / (1.0 / self.layer)[self.sort_of].sum())

    def partitions(self, depths: Sequence[int], below: float) -> list[Partition]:
        """The best found partition for each number of stages in `depths`, fewest first; none whose busiest unit would
        need `below` seconds or more."""
        wanted = [depth for depth in depths if depth <= min(self.num_layers, self.num_units)]
        bound = self.bound_seconds
        deadlines = [bound * step for step in DEADLINES if bound * step < below]
        if not wanted or not deadlines:
            return []
        used, taken = self._reached(np.array(deadlines), max(wanted))
        found: dict[int, Partition] = {}
        for row, deadline in enumerate(deadlines):
            if found and deadline > _GIVE_UP * found[min(found)].deadline_seconds:
                break
            for depth in wanted:
                if depth not in found and used[depth, row, -1] < _NEVER:
                    found[depth] = Partition(self._trace(used[:, row], taken[:, row], depth), deadline)
        return [found[depth] for depth in sorted(found)]

    def _reached(self, deadlines: np.ndarray, deepest: int) -> tuple[np.ndarray, np.ndarray]:
        """[stages, deadline, layers]: the fewest units that hold so many of the last layers in so many stages, and how
        many of these layers the first of the stages takes."""
        used = np.full((deepest + 1, len(deadlines), self.num_layers + 1), _NEVER)
        used[0, :, 0] = 0
        taken = np.zeros_like(used)
        least, reaches = self._least_replicas(deepest), [self._reach(deadlines, last) for last in (True, False)]
        groups = np.flatnonzero(self.taken == 1)
        for depth in range(1, deepest + 1):
            start = used[depth - 1].take(self.held - self.taken, axis=1)
            end = self._advance(start, reaches[depth > 1], least[:, depth - 1])
            ranked = np.minimum.reduceat(end * (self.num_layers + 1) + self.taken, groups, axis=1)
            fewest, taken[depth, :, 1:] = np.divmod(ranked, self.num_layers + 1)
            used[depth, :, 1:] = np.where(fewest <= self.num_units, fewest, _NEVER)
            if (used[depth] == _NEVER).all():
                break
        return used, taken

    def _reach(self, deadlines: np.ndarray, last: bool) -> "_Reach":
        """How far units reach in the model's last stage, or in others."""
        seconds = np.arange(1, self.num_layers + 1) * self.layer[:, None]
        if last:
            seconds = seconds + self.head[:, None]
        seconds = np.concatenate([seconds, seconds + self.embedding[:, None]], axis=1)  # [sort, stage]
        each = np.minimum(np.floor(deadlines[:, None, None] / seconds + 1e-9), self.samples).astype(np.int64)
        each = each.swapaxes(1, 2).reshape(-1, len(self.sorts))
        pace = np.append(each[:, self.run_sort], np.full((len(each), 1), self.samples), axis=1)
        done = np.zeros((len(each), len(self.run_sort) + 2), dtype=np.int64)
        np.cumsum(pace * np.append(self.run_units, 1), axis=1, out=done[:, 1:])
        return _Reach(pace, done)

    def _advance(self, start: np.ndarray, reach: "_Reach", least: np.ndarray) -> np.ndarray:
        """[deadline, way]: units used after a stage that begins at `start`: enough for the samples and for its
        memory."""
        if len(self.sorts) == 1:  # wherever the stage begins
            pace = reach.pace[:, 0].reshape(len(start), -1)
            enough = np.where(pace > 0, -(-self.samples // np.maximum(pace, 1)), _NEVER)
            return start + np.maximum(enough, least[0]).take(self.stage, axis=1)
        able = np.flatnonzero(start < self.num_units)
        begin, (deadline, way) = start.ravel()[able], np.divmod(able, len(self.stage))
        stage = self.stage[way]
        end = self._enough(begin, deadline * 2 * self.num_layers + stage, reach)
        for edge in (begin, np.minimum(end, self.num_units) - 1):
            end = np.maximum(end, begin + least[self.sort_of[edge], stage])
        found = np.full(start.shape, _NEVER)
        found.ravel()[able] = end
        return found

    def _enough(self, begin: np.ndarray, row: np.ndarray, reach: "_Reach") -> np.ndarray:
        """Units used after stages that begin at `begin` so that all samples are processed, under the reach of each."""
        edges, run = np.append(0, np.cumsum(self.run_units)), self.run_of[begin]
        wanted = reach.done[row, run] + (begin - edges[run]) * reach.pace[row, run] + self.samples
        # Row behind row, so far apart that one ascending array holds all.
        apart = reach.done[:, -1].max() + 1
        rows = (reach.done + apart * np.arange(len(reach.done))[:, None]).ravel()
        run = np.searchsorted(rows, wanted + apart * row) - row * reach.done.shape[1] - 1
        return edges[run] - (reach.done[row, run] - wanted) // reach.pace[row, run]

    def _least_replicas(self, deepest: int) -> np.ndarray:
        """[sort, stages, stage]: the fewest replicas of the first of so many stages whose ranks fit into memory."""
        if not self.memory_counts:
            return np.ones((len(self.sorts), deepest, 2 * self.num_layers), dtype=np.int64)
        depths, sharded = np.arange(1, deepest + 1)[:, None], self.problem.usual_zero > 0
        found = []
        for sort in self.sorts:
            own = self.costs.coefficients(*sort, self._micro_batch(sort), self.combination.recompute)
            capacity = self.problem.capacity(sort[0])
            least = {
                (first, last): own.least_replicas(
                    self.num_layers, depths[:1] if last else depths[1:], position(first, last), capacity, sharded
                )[:, 1:]
                for first in (False, True)
                for last in (False, True)
            }
            found.append(np.block([[least[False, True], least[True, True]], [least[False, False], least[True, False]]]))
        return np.array(found)

    def _trace(self, used: np.ndarray, taken: np.ndarray, depth: int) -> tuple[tuple[int, int], ...]:
        """The stages that led to all layers; units left over join the first."""
        stages, layers, end = [], self.num_layers, self.num_units
        for after in range(depth - 1, -1, -1):
            held = int(taken[after + 1, layers])
            layers -= held
            start = int(used[after, layers])
            stages.append((held, end - start))
            end = start
        return tuple(stages)


class _Reach(NamedTuple):
    """[deadline and stage, run]: samples that a unit of a run of like ones processes, and [deadline and stage, edge]
    those of all units before. One unit behind the line processes all samples: a stage that ends there has too few."""

    pace: np.ndarray
    done: np.ndarray


_NEVER = 1 << 40
_GIVE_UP = 1.2
# Multiples of the bound, finer where partitions are good.
DEADLINES = tuple(
    1.0 + d for d in (0.002, 0.006, 0.012, 0.02, 0.03, 0.045, 0.065, 0.1, 0.15, 0.25, 0.4, 0.7, 1.2, 2.5, 6.0, 20.0)
)
