"""Points of a small space: plans as choices per stage, and the bounds that leave most of them out."""

from collections.abc import Iterator, Sequence
from functools import cache, reduce
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.materialize import Replica, StageChoice, plan_of
from hethub.planner.exhaustive.chains import Chains
from hethub.planner.exhaustive.stages import Mode, Shape, StageBounds, StageCosts, StageOptions
from hethub.spec.plan import PlanSpec

AT_ONCE = 131_072  # points whose chains are bounded at once


class Branch(NamedTuple):
    """Stages with their layers under a schedule, and what each may do."""

    costs: StageCosts
    shape: Shape
    layers: tuple[int, ...]
    stages: tuple[StageOptions, ...]

    def p2p_seconds(self, above: int) -> np.ndarray:
        """Seconds over a boundary: [replica above, replica below, samples]."""
        return self.costs.p2p_seconds(*self.shape[above : above + 2])


class Point(NamedTuple):
    """A plan: an option for every stage of a branch."""

    branch: Branch
    options: tuple[int, ...]
    held: tuple[tuple[int, ...], ...] | None = None  # microbatches in flight by stage and replica; None: the default

    @property
    def modes(self) -> list[Mode]:
        return [stage.mode(option) for stage, option in zip(self.branch.stages, self.options, strict=True)]

    @property
    def microbatching(self) -> object:
        """What the order of its actions depends on."""
        return (
            self.branch.costs.schedule,
            self.held,
            *(
                (len(units), option % len(stage.microbatchings), mode.zero >= 2)
                for units, stage, option, mode in zip(
                    self.branch.shape, self.branch.stages, self.options, self.modes, strict=True
                )
            ),
        )

    @property
    def plan(self) -> PlanSpec:
        costs = self.branch.costs
        choices: list[StageChoice] = []
        default = [(None,) * len(units) for units in self.branch.shape]
        every = zip(self.branch.shape, self.branch.stages, self.options, self.modes, self.held or default, strict=True)
        for units, stage, option, mode, held in every:
            way = option % len(stage.microbatchings)
            samples, sizes = (own[way].tolist() for own in stage.microbatchings[:2])
            choices.append(StageChoice(list(map(Replica, units, sizes, samples, held)), mode.zero, mode.recompute))
        return plan_of(costs.problem, costs.schedule, self.branch.layers, choices)


class Points(NamedTuple):
    """Points as arrays: their bounds, the index of their branch, their options [point, stage] with zeros behind."""

    branches: Sequence[Branch]
    bounds: np.ndarray
    owners: np.ndarray
    options: np.ndarray

    def at(self, rows: np.ndarray | slice) -> "Points":
        return self._replace(bounds=self.bounds[rows], owners=self.owners[rows], options=self.options[rows])

    def points(self) -> list[Point]:
        own = [self.branches[owner] for owner in self.owners]
        chosen = zip(own, self.options.tolist(), strict=True)
        return [Point(branch, tuple(options[: len(branch.shape)])) for branch, options in chosen]


def promising(limit: float, branches: Sequence[Branch], most: int) -> Points:
    """The points whose bound is below the limit, by their bounds; the smallest `most` of them."""
    width = max((len(branch.shape) for branch in branches), default=0)
    none = Points(branches, np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros((0, width), dtype=np.int64))
    found, new, count = none, [none], 0
    for index, branch in enumerate(branches):
        bounds, options = _below(limit, branch)
        if len(bounds):
            padded = np.pad(options, ((0, 0), (0, width - options.shape[1])))
            new.append(Points(branches, bounds, np.full(len(bounds), index), padded))
            count += len(bounds)
        if count > AT_ONCE or index == len(branches) - 1:
            found = _joined([found, *_chained(_joined(new), limit)])
            found = found.at(np.argsort(found.bounds, kind="stable")[:most])
            new, count = [none], 0
            if len(found.bounds) == most:
                limit = float(found.bounds[-1])
    return found


def _joined(parts: Sequence[Points]) -> Points:
    """The points of all parts."""
    return Points(parts[0].branches, *(np.concatenate(own) for own in list(zip(*parts, strict=True))[1:]))


def _chained(points: Points, limit: float) -> Iterator[Points]:
    """The points whose chains are below the limit, with these bounds, by schedule and how many replicas their stages
    have."""
    alike: dict[object, list[int]] = {}
    for owner in np.unique(points.owners).tolist():
        branch = points.branches[owner]
        alike.setdefault((branch.costs.schedule, tuple(map(len, branch.shape))), []).append(owner)
    for owners in alike.values():
        own, branches = points.at(np.isin(points.owners, owners)), [points.branches[owner] for owner in owners]
        p2p_costs = [[branch.p2p_seconds(above) for branch in branches] for above in range(len(branches[0].shape) - 1)]
        chains = Chains(list(zip(*(branch.stages for branch in branches), strict=True)), p2p_costs)
        bounds = np.maximum(own.bounds, chains.bounds(np.searchsorted(owners, own.owners), own.options))
        yield own._replace(bounds=bounds).at(bounds < limit)


def branches_below(limit: float, costs: StageCosts, shape: Shape) -> list[tuple[float, Branch]]:
    """The cuts of the layers for a shape of which some point may take less than the limit, each with its bound."""
    cuts = _cuts(costs.problem.model.layers, len(shape))
    stages: list[dict[int, StageOptions]] = []
    least: list[StageBounds] = []
    for stage, own in enumerate(cuts.T):
        counts, rows, number_of = np.unique(own, return_index=True, return_inverse=True)
        examples = zip(counts.tolist(), cuts[rows].tolist(), strict=True)
        stages.append({layers: costs.options(shape, cut, stage) for layers, cut in examples})
        parts = zip(*(options.least for options in stages[-1].values()), strict=True)
        least.append(StageBounds(*(np.concatenate(part)[number_of] for part in parts)))
    bounds = step_bound(least, costs.nearest(shape))
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


def _below(limit: float, branch: Branch) -> tuple[np.ndarray, np.ndarray]:
    """The bounds below the limit of a branch, and the options [point, stage] that have them."""
    nearest, depth = branch.costs.nearest(branch.shape), len(branch.stages)
    stages, least = [own.bounds for own in branch.stages], [own.least for own in branch.stages]
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


def step_bound(stages: Sequence[StageBounds], p2p_costs: Sequence[float]) -> np.ndarray:
    """Seconds that no plan with these stages, in arrays that broadcast, is shorter than.

    A stage begins when a microbatch has come down to it, works on all its microbatches, and one goes back up from it;
    the stages that it reaches reduce their gradients then. Weights' gradients that are put off hold nobody above up.
    Who has a longer update than the others begins as much later (predictor/step.py). No smaller figure of a stage
    makes the bound larger.
    """
    first = reduce(np.minimum, (stage.update for stage in stages))
    fill: np.ndarray | float = 0.0
    end: np.ndarray | float = 0.0
    for s, stage in enumerate(stages):
        fill = np.maximum(fill, stage.update - first)
        back = fill + stage.passed
        end = np.maximum(end, fill + stage.busy + stage.reduced)
        for above in range(s - 1, -1, -1):
            back = back + stages[above].backward + p2p_costs[above]
            end = np.maximum(end, back + stages[above].weight + stages[above].reduced)
        if s < len(stages) - 1:
            fill = fill + stage.forward + p2p_costs[s]
    return np.asarray(end + first)
