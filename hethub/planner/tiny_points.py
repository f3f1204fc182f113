"""Points of a small space: plans as choices per stage, and the bounds that leave most of them out."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from hethub.planner.small import MOST_UNITS
from hethub.planner.tiny_stages import Mode, Shape, StageChoice, StageCosts, StageOptions, plan_of
from hethub.spec.plan import PlanSpec


class Branch(NamedTuple):
    """Stages with their layers under a schedule, and what each may do."""

    costs: StageCosts
    shape: Shape
    layers: tuple[int, ...]
    stages: tuple[StageOptions, ...]

    def crossing(self, above: int) -> np.ndarray:
        """Seconds over a boundary: [replica above, replica below, samples]."""
        return self.costs.crossing(self.shape, self.layers, above)


class Point(NamedTuple):
    """A plan: an option for every stage of a branch."""

    branch: Branch
    options: tuple[int, ...]
    held: tuple[tuple[int, ...], ...] | None = None  # tiles in flight by stage and replica; None: the default

    @property
    def modes(self) -> list[Mode]:
        return [stage.mode(option) for stage, option in zip(self.branch.stages, self.options, strict=True)]

    @property
    def tiling(self) -> object:
        """What the order of its actions depends on."""
        return (
            self.branch.costs.schedule,
            self.held,
            *(
                (len(units), option % len(stage.tilings), mode.zero >= 2)
                for units, stage, option, mode in zip(
                    self.branch.shape, self.branch.stages, self.options, self.modes, strict=True
                )
            ),
        )

    @property
    def plan(self) -> PlanSpec:
        costs = self.branch.costs
        choices: list[StageChoice] = []
        held = self.held or [None] * len(self.options)
        for stage, option, mode, most in zip(self.branch.stages, self.options, self.modes, held, strict=True):
            way = option % len(stage.tilings)
            samples, sizes = stage.tilings.samples[way], stage.tilings.sizes[way]
            choices.append(StageChoice(samples, sizes, mode.recompute, mode.zero, most))
        return plan_of(costs.problem, costs.schedule, self.branch.shape, self.branch.layers, choices)


class Points(NamedTuple):
    """Points as arrays: their bounds, the index of their branch, their options [point, stage] with zeros behind."""

    branches: Sequence[Branch]
    bounds: np.ndarray
    owners: np.ndarray
    options: np.ndarray

    def at(self, rows: np.ndarray) -> "Points":
        return self._replace(bounds=self.bounds[rows], owners=self.owners[rows], options=self.options[rows])

    def points(self) -> list[Point]:
        own = [self.branches[owner] for owner in self.owners]
        chosen = zip(own, self.options.tolist(), strict=True)
        return [Point(branch, tuple(options[: len(branch.shape)])) for branch, options in chosen]


def promising_points(limit: float, branches: Sequence[Branch], most: int) -> Points:
    """The points whose bound is below the limit, by their bounds; the smallest `most` of them."""
    found = Points(branches, np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros((0, MOST_UNITS), dtype=np.int64))
    new, count = [found], 0
    for index, branch in enumerate(branches):
        bounds, options = _below(limit, branch)
        if len(bounds):
            padded = np.pad(options, ((0, 0), (0, MOST_UNITS - options.shape[1])))
            new.append(Points(branches, bounds, np.full(len(bounds), index), padded))
            count += len(bounds)
        if count > most or index == len(branches) - 1:
            found = _smallest(new, most)
            new, count = [found], 0
            if len(found.bounds) == most:
                limit = float(found.bounds[-1])
    return found


def _smallest(parts: Sequence[Points], most: int) -> Points:
    """The points with the smallest bounds, in order."""
    together = Points(parts[0].branches, *(np.concatenate(own) for own in list(zip(*parts, strict=True))[1:]))
    return together.at(np.argsort(together.bounds, kind="stable")[:most])


def branches_of(costs: StageCosts, shape: Shape) -> Iterator[Branch]:
    """A shape with all cuts of the layers; none more when time is up."""
    layers = costs.problem.model.layers
    for cut in combinations(range(1, layers), len(shape) - 1):
        if costs.judge.out_of_time:
            return
        own = tuple(b - a for a, b in pairwise((0, *cut, layers)))
        yield Branch(costs, shape, own, tuple(costs.options(shape, own, stage) for stage in range(len(shape))))


def _below(limit: float, branch: Branch) -> tuple[np.ndarray, np.ndarray]:
    """The bounds below the limit of a branch, and the options [point, stage] that have them."""
    alone = [stage.busy + stage.reduced for stage in branch.stages]
    rows = [np.nonzero(own < limit)[0] for own in alone]
    if not all(map(len, rows)):
        return np.zeros(0), np.zeros((0, len(alone)), dtype=np.int64)
    stages = [stage.at(own) for stage, own in zip(branch.stages, rows, strict=True)]
    nearest = [float(branch.crossing(above)[..., 1].min()) for above in range(len(stages) - 1)]
    bounds = bounds_of(stages, nearest)
    able = np.nonzero(bounds < limit)
    return bounds[able], np.stack([own[at] for own, at in zip(rows, able, strict=True)], axis=1)


def bounds_of(stages: Sequence[StageOptions], crossings: Sequence[float]) -> np.ndarray:
    """Seconds that no plan is shorter than: [option of the first stage, of the second, …].

    A stage begins when a tile has come down to it, works on all its tiles, and one goes back up from it; the stages that it
    reaches reduce their gradients then. Weights' gradients that are put off hold nobody above up. Who has a longer update
    than the others begins as much later (predictor/step.py).
    """
    depth = len(stages)

    def along(stage: int, values: np.ndarray) -> np.ndarray:
        return values.reshape([-1 if axis == stage else 1 for axis in range(depth)])

    first = along(0, stages[0].update)
    for s in range(1, depth):
        first = np.minimum(first, along(s, stages[s].update))
    fill: np.ndarray | float = 0.0
    end: np.ndarray | float = 0.0
    for s, stage in enumerate(stages):
        fill = np.maximum(fill, along(s, stage.update) - first)
        back = fill + along(s, stage.passed)
        end = np.maximum(end, fill + along(s, stage.busy) + along(s, stage.reduced))
        for above in range(s - 1, -1, -1):
            back = back + along(above, stages[above].backward) + crossings[above]
            end = np.maximum(end, back + along(above, stages[above].weight) + along(above, stages[above].reduced))
        if s < depth - 1:
            fill = fill + along(s, stage.forward) + crossings[s]
    return np.asarray(end + first)
