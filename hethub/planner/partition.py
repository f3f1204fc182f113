"""Exact partition of a line of units and a stack of layers into stages: dynamic programming under a deadline.

The line says in which order units may form stages. For a deadline T (seconds that any replica may be busy in a step)
the fewest units are found that hold the last l layers in d stages, for every l and d: using fewer is never worse. The
smallest feasible T over a falling series is the bottleneck; for every number of stages its own is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hethub.planner.costs import UnitCosts
from hethub.planner.footprint import position
from hethub.planner.problem import Problem, Unit
from hethub.spec.plan import Recompute


@dataclass(frozen=True)
class Setting:
    """One configuration to partition: units from first to last stage, micro-batch of each kind, recompute."""

    line: tuple[Unit, ...]
    micro_batches: tuple[int, ...]
    recompute: Recompute


@dataclass(frozen=True)
class Partition:
    """Per stage from first to last, (layers, number of units), and the deadline it meets."""

    stages: tuple[tuple[int, int], ...]
    deadline_seconds: float


class Partitioner:
    """The dynamic programme for one setting. The line is walked from its end: a stage's tiles in flight depend on how
    many stages come after it."""

    def __init__(self, problem: Problem, costs: UnitCosts, setting: Setting, *, memory_counts: bool = True) -> None:
        self.problem, self.setting, self.memory_counts = problem, setting, memory_counts
        self.num_layers, self.samples = problem.model.layers, problem.batch.global_batch
        self.line = setting.line[::-1]
        classes = sorted({(unit.kind, unit.tp) for unit in self.line})
        self.class_of = np.array([classes.index((unit.kind, unit.tp)) for unit in self.line])
        self.examples = [next(u for u in self.line if (u.kind, u.tp) == key) for key in classes]
        self.rates = [costs.rate(u.kind, u.tp, self._micro_batch(u), setting.recompute) for u in self.examples]
        per_sample = [1.0 / self._micro_batch(u) for u in self.examples]
        self.layer = np.array([rate.layer.total * s for rate, s in zip(self.rates, per_sample, strict=True)])
        self.embedding = np.array([rate.embedding.total * s for rate, s in zip(self.rates, per_sample, strict=True)])
        self.head = np.array([rate.head.total * s for rate, s in zip(self.rates, per_sample, strict=True)])
        self._replicas: dict[tuple[int, bool], np.ndarray] = {}

    def _micro_batch(self, unit: Unit) -> int:
        return self.setting.micro_batches[unit.kind]

    @property
    def bound_seconds(self) -> float:
        """No partition of this setting has a smaller bottleneck: all layers at all units' rates."""
        return float(self.samples * self.num_layers / (1.0 / self.layer)[self.class_of].sum())

    def partitions(self, depths: Sequence[int], below: float) -> list[Partition]:
        """The best found partition for each number of stages in `depths`, fewest first; none whose busiest unit would
        need `below` seconds or more."""
        wanted = [depth for depth in depths if depth <= min(self.num_layers, len(self.line))]
        found: dict[int, Partition] = {}
        for step in _DEADLINES:
            deadline = self.bound_seconds * step
            missing = [depth for depth in wanted if depth not in found]
            if (
                not missing
                or deadline >= below
                or (found and step > _GIVE_UP * found[min(found)].deadline_seconds / self.bound_seconds)
            ):
                break
            for depth, partition in self._under(deadline, max(missing)).items():
                if depth in missing:
                    found[depth] = partition
        return [found[depth] for depth in sorted(found)]

    def _under(self, deadline: float, deepest: int) -> dict[int, Partition]:
        """Per feasible number of stages, a partition in which no unit is busy longer than `deadline`."""
        num_layers, count = self.num_layers, len(self.line)
        reach = {key: self._reach(deadline, *key) for key in _ENDS}
        rows = np.arange(num_layers + 1)[:, None]  # m: layers held after this stage
        columns = np.arange(1, num_layers + 1)[None, :]  # x: layers of this stage
        before = rows - columns
        used = np.full(num_layers + 1, _NEVER)
        used[0] = 0
        choices: list[np.ndarray] = []
        feasible: dict[int, Partition] = {}
        for depth in range(1, deepest + 1):
            valid = (before >= 0) & (used[np.maximum(before, 0)] <= count)
            valid &= (before == 0) if depth == 1 else (before > 0)
            start = np.where(valid, used[np.maximum(before, 0)], count)
            end = self._advance(start, columns, reach[depth == 1, False], depth, False)
            end[num_layers] = self._advance(start[num_layers:], columns, reach[depth == 1, True], depth, True)[0]
            end = np.where(valid, end, _NEVER)
            choice = end.argmin(axis=1)
            used = end[np.arange(num_layers + 1), choice]
            choices.append(choice + 1)
            if used[num_layers] <= count:
                feasible[depth] = self._trace(choices, reach, deadline)
            if not (used <= count).any():
                break
        return feasible

    def _reach(self, deadline: float, last: bool, first: bool) -> "_Reach":
        """How far units reach, in a stage that holds these ends of the model."""
        seconds = np.arange(self.num_layers + 1)[None, :] * self.layer[:, None]
        if last:
            seconds = seconds + self.head[:, None]
        if first:
            seconds = seconds + self.embedding[:, None]
        with np.errstate(divide="ignore"):
            samples = np.minimum(np.floor(deadline / seconds + 1e-9), self.samples)
        reach = np.zeros((self.num_layers + 1, len(self.line) + 1), dtype=np.int64)
        np.cumsum(samples[self.class_of].T, axis=1, out=reach[:, 1:])
        wide = int(reach[:, -1].max()) + self.samples + 1
        apart = wide * np.arange(self.num_layers + 1)
        return _Reach(reach, (reach + apart[:, None]).ravel(), apart + self.samples)

    def _advance(self, start: np.ndarray, layers: np.ndarray, reach: "_Reach", depth: int, first: bool) -> np.ndarray:
        """Units used after a stage of `layers` that begins at `start`: enough for the samples and for its memory."""
        count = len(self.line)
        wanted = reach.samples[layers, start] + reach.wanted[layers]
        end = np.searchsorted(reach.flat, wanted, side="left") - layers * (count + 1)
        if not self.memory_counts:
            return np.where(end <= count, end, _NEVER)
        least = self._least_replicas(depth, first)
        for edge in (start, np.minimum(end, count) - 1):
            end = np.maximum(end, start + least[self.class_of[np.minimum(edge, count - 1)], layers])
        return np.where(end <= count, end, _NEVER)

    def _least_replicas(self, depth: int, first: bool) -> np.ndarray:
        """[class, layers]: the fewest replicas of a stage at this depth whose ranks fit into memory."""
        found = self._replicas.get((depth, first))
        if found is None:
            place, sharded = position(first, depth == 1), self.problem.usual_zero > 0
            found = self._replicas[depth, first] = np.array(
                [
                    self.problem.coefficients(
                        unit.kind, unit.tp, self._micro_batch(unit), self.setting.recompute
                    ).least_replicas(self.num_layers, depth, place, self.problem.capacity(unit.kind), sharded)
                    for unit in self.examples
                ]
            )
        return found

    def _trace(self, choices: list[np.ndarray], reach: dict[tuple[bool, bool], "_Reach"], deadline: float) -> Partition:
        """The partition that led to all layers; units left over join the first stage."""
        depth, layers = len(choices), self.num_layers
        held = []
        while depth:
            held.append(int(choices[depth - 1][layers]))
            layers -= held[-1]
            depth -= 1
        sizes, position = [], 0
        for depth, x in enumerate(reversed(held), start=1):
            first = depth == len(held)
            end = self._advance(np.array([position]), np.array([x]), reach[depth == 1, first], depth, first)
            sizes.append(int(end[0]) - position)
            position = int(end[0])
        sizes[-1] += len(self.line) - position
        return Partition(tuple(zip(held, reversed(sizes), strict=True)), deadline)


class _Reach(NamedTuple):
    """[x, u]: samples that the first u units of the walked line process under a deadline, with x layers each; the same row
    behind row so far apart that one ascending array holds all, and [x] what is added to look for a stage's end in it."""

    samples: np.ndarray
    flat: np.ndarray
    wanted: np.ndarray


_ENDS = ((False, False), (True, False), (False, True), (True, True))  # whether a stage is the last, and the first
_NEVER = 1 << 40
_GIVE_UP = 1.2
# Multiples of the bound, finer where partitions are good.
_DEADLINES = tuple(
    1.0 + d for d in (0.002, 0.006, 0.012, 0.02, 0.03, 0.045, 0.065, 0.1, 0.15, 0.25, 0.4, 0.7, 1.2, 2.5, 6.0, 20.0)
)
