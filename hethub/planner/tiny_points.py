"""Points of a small space: plans as choices per stage, and the bounds that leave most of them out."""

from collections.abc import Mapping, Sequence
from functools import cache, reduce
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from hethub.planner.tiny_chains import Chains
from hethub.planner.tiny_stages import Mode, Shape, StageBounds, StageChoice, StageCosts, StageOptions, plan_of
from hethub.spec.plan import PlanSpec

TOGETHER = 32_768  # points whose chains are bounded at once


class Branch(NamedTuple):
    """Stages with their layers under a schedule, and what each may do."""

    costs: StageCosts
    shape: Shape
    layers: tuple[int, ...]
    stages: tuple[StageOptions, ...]

    def crossing(self, above: int) -> np.ndarray:
        """Seconds over a boundary: [replica above, replica below, samples]."""
        return self.costs.crossing(self.shape, above)


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


def promising_points(limit: float, branches: Sequence[Branch], most: int, above: float = 0.0) -> Points:
    """The points whose bound is below the limit and not below `above`, by their bounds; the smallest `most` of them."""
    width = max((len(branch.shape) for branch in branches), default=0)
    found = Points(branches, np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros((0, width), dtype=np.int64))
    new, count = [found], 0
    for index, branch in enumerate(branches):
        bounds, options = _below(limit, branch)
        if len(bounds):
            padded = np.pad(options, ((0, 0), (0, width - options.shape[1])))
            new.append(Points(branches, bounds, np.full(len(bounds), index), padded))
            count += len(bounds)
        if count > TOGETHER or index == len(branches) - 1:
            chained = refined(together(new[1:]), limit) if count else new[0]
            found = _smallest([found, chained.at(np.nonzero(chained.bounds >= above)[0])], most)
            new, count = [new[0]], 0
            if len(found.bounds) == most:
                limit = float(found.bounds[-1])
    return found


def together(parts: Sequence[Points]) -> Points:
    """The points of all parts."""
    return Points(parts[0].branches, *(np.concatenate(own) for own in list(zip(*parts, strict=True))[1:]))


def _smallest(parts: Sequence[Points], most: int) -> Points:
    """The points with the smallest bounds, in order."""
    every = together(parts)
    return every.at(np.argsort(every.bounds, kind="stable")[:most])


def refined(points: Points, limit: float) -> Points:
    """The points that those of floors stand for, with their chains' bounds, where these are below the limit."""
    sorts: dict[tuple[int, ...], int] = {}
    owners, number_of = np.unique(points.owners, return_inverse=True)
    widths = (tuple(map(len, points.branches[owner].shape)) for owner in owners.tolist())
    sort_of = np.array([sorts.setdefault(own, len(sorts)) for own in widths])[number_of]
    return together([_refined(points.at(np.nonzero(sort_of == sort)[0]), limit) for sort in range(len(sorts))])


def _refined(points: Points, limit: float) -> Points:
    """The same for points with as many replicas in every stage."""
    owners, number_of = np.unique(points.owners, return_inverse=True)
    branches = [points.branches[owner] for owner in owners.tolist()]
    boundaries = range(len(branches[0].shape) - 1)
    chains = Chains(
        list(zip(*(branch.stages for branch in branches), strict=True)),
        [[branch.crossing(above) for branch in branches] for above in boundaries],
    )
    points, number_of = _below_chains(points, number_of, chains, limit)
    for stage, own in enumerate(chains.stages):
        rows, options = own.members(number_of, points.options[:, stage])
        points = points.at(rows)
        points.options[:, stage] = options
        points, number_of = _below_chains(points, number_of[rows], chains, limit)
    return points


def _below_chains(points: Points, number_of: np.ndarray, chains: Chains, limit: float) -> tuple[Points, np.ndarray]:
    """The points whose chains are below the limit, and the numbers of their branches."""
    bounds = np.maximum(points.bounds, chains.bounds(number_of, points.options))
    rows = np.nonzero(bounds < limit)[0]
    return points._replace(bounds=bounds).at(rows), number_of[rows]


def branches_below(limit: float, costs: StageCosts, shape: Shape) -> list[tuple[float, Branch]]:
    """The cuts of the layers for a shape of which some point may take less than the limit, each with its bound; none when
    time is up."""
    cuts = _cuts(costs.problem.model.layers, len(shape))
    if costs.judge.out_of_time:
        return []
    stages: list[dict[int, StageOptions]] = []
    for stage, own in enumerate(cuts.T):
        counts, rows = np.unique(own, return_index=True)
        examples = zip(counts.tolist(), cuts[rows].tolist(), strict=True)
        stages.append({layers: costs.options(shape, cut, stage) for layers, cut in examples})
    bounds = step_bound(
        [_by_cut(own, options) for own, options in zip(cuts.T, stages, strict=True)], costs.nearest(shape)
    )
    found = []
    for row in np.nonzero(bounds < limit)[0].tolist():
        layers = tuple(cuts[row].tolist())
        chosen = tuple(options[x] for x, options in zip(layers, stages, strict=True))
        found.append((float(bounds[row]), Branch(costs, shape, layers, chosen)))
    return found


@cache
def _cuts(total: int, stages: int) -> np.ndarray:
    """[cut, stage]: all ways to give every stage some of the layers."""
    edges = combinations(range(1, total), stages - 1)
    return np.array([[b - a for a, b in pairwise((0, *cut, total))] for cut in edges])


def _by_cut(layers: np.ndarray, options: Mapping[int, StageOptions]) -> StageBounds:
    """What no option of a stage is below, by cut."""
    own = [options[x].least for x in layers.tolist()]
    return StageBounds(*(np.concatenate(part) for part in zip(*own, strict=True)))


def _below(limit: float, branch: Branch) -> tuple[np.ndarray, np.ndarray]:
    """The bounds below the limit of a branch, and the options [point, stage] that have them."""
    nearest, depth = branch.costs.nearest(branch.shape), len(branch.stages)
    stages, least = [own.floors for own in branch.stages], [own.least for own in branch.stages]
    rows = [np.arange(len(own.busy)) for own in stages]
    for stage in range(depth):  # what is too slow wherever the others are fastest
        able = np.nonzero(step_bound([*least[:stage], stages[stage], *least[stage + 1 :]], nearest) < limit)[0]
        if not len(able):
            return np.zeros(0), np.zeros((0, depth), dtype=np.int64)
        if len(able) < len(rows[stage]):
            stages[stage], rows[stage] = stages[stage].at(able), rows[stage][able]
            least[stage] = stages[stage].least
    apart = [own.shaped([-1 if axis == stage else 1 for axis in range(depth)]) for stage, own in enumerate(stages)]
    bounds = step_bound(apart, nearest)
    below = np.nonzero(bounds < limit)
    return bounds[below], np.stack([own[at] for own, at in zip(rows, below, strict=True)], axis=1)


def step_bound(stages: Sequence[StageBounds], crossings: Sequence[float]) -> np.ndarray:
    """Seconds that no plan with these stages, in arrays that broadcast, is shorter than.

    A stage begins when a tile has come down to it, works on all its tiles, and one goes back up from it; the stages that it
    reaches reduce their gradients then. Weights' gradients that are put off hold nobody above up. Who has a longer update
    than the others begins as much later (predictor/step.py). No smaller figure of a stage makes the bound larger.
    """
    first = reduce(np.minimum, (stage.update for stage in stages))
    fill: np.ndarray | float = 0.0
    end: np.ndarray | float = 0.0
    for s, stage in enumerate(stages):
        fill = np.maximum(fill, stage.update - first)
        back = fill + stage.passed
        end = np.maximum(end, fill + stage.busy + stage.reduced)
        for above in range(s - 1, -1, -1):
            back = back + stages[above].backward + crossings[above]
            end = np.maximum(end, back + stages[above].weight + stages[above].reduced)
        if s < len(stages) - 1:
            fill = fill + stage.forward + crossings[s]
    return np.asarray(end + first)
