"""A small space searched to its end: every plan of a handful of accelerators that a bound does not exclude is timed.

The space: ordered partitions of the units into stages, TP degrees inside machines, cuts of the layers, samples in steps of
one, micro-batch per replica, recompute and ZeRO level per stage, the default number of tiles in flight. A branch is left
out where a bound of its step is no shorter than the best plan known. What is left is replayed with the predictor's own
costs, plans of one tiling at once, and judged in order of these times.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import comb, prod
from typing import NamedTuple

import numpy as np

from hethub.planner.complete import complete
from hethub.planner.draft import Draft, DraftStage, Seats, merged
from hethub.planner.judge import Judge
from hethub.planner.problem import Problem, Unit
from hethub.planner.small import MOST_UNITS, ordered_partitions
from hethub.planner.tiny_replay import Node, Passed, ends_of, nodes_of
from hethub.planner.tiny_stages import (
    Mode,
    Shape,
    StageChoice,
    StageCosts,
    StageOptions,
    Units,
    count_options,
    levels,
    plan_of,
    recomputes_under,
)
from hethub.spec.errors import BadInput
from hethub.spec.layout import Layout
from hethub.spec.plan import PlanSpec, ScheduleName

MOST_SAMPLES, MOST_BRANCHES, MOST_POINTS = 64, 4000, 3e7  # of a space that is searched to its end
AT_ONCE = 4096  # points timed before the best of them are judged
MOST_TIMED = 16 * AT_ONCE
MOST_JUDGED = 1000  # where memory holds few of them
MOST_DEEPENED = 128  # points tried with more tiles in flight


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


def is_tiny(problem: Problem) -> bool:
    """Whether the space is small enough to be searched to its end."""
    if problem.size > MOST_UNITS or problem.batch.global_batch > MOST_SAMPLES:
        return False
    shapes, schedules = list(_shapes(problem)), len(_schedules(problem))
    branches = [comb(problem.model.layers - 1, len(shape) - 1) for shape in shapes]
    points = [
        number * prod(count_options(problem, units) for units in shape)
        for number, shape in zip(branches, shapes, strict=True)
    ]
    return 0 < schedules * sum(points) <= MOST_POINTS and schedules * sum(branches) <= MOST_BRANCHES


def search_tiny(problem: Problem, judge: Judge) -> None:
    """Judges what may be better than the best plan known, most promising first."""
    costs = [StageCosts(judge, schedule) for schedule in _schedules(problem)]
    branches = [branch for own in costs for shape in _shapes(problem) for branch in _branches(own, shape)]
    found = _promising(judge.best_seconds, branches)
    orders: dict[object, list[Node]] = {}
    enough, near = judge.candidates + MOST_JUDGED, list[tuple[float, Point]]()
    for first in range(0, len(found.bounds), AT_ONCE):
        some = found.at(np.arange(first, min(first + AT_ONCE, len(found.bounds))))
        some = some.at(np.nonzero(some.bounds < judge.best_seconds)[0])
        if not len(some.bounds) or judge.out_of_time or judge.candidates > enough:
            break
        timed = _timed(problem, some.points(), orders)
        _judge_timed(judge, timed, enough)
        near = heapq.nsmallest(MOST_DEEPENED, [*near, *timed], key=_seconds_of)
    if problem.capabilities.chooses_in_flight:
        deeper = [point for _, own in near for point in _deeper(problem, own)]
        _judge_timed(judge, _timed(problem, deeper, orders), enough + MOST_JUDGED)


def _seconds_of(timed: tuple[float, Point]) -> float:
    return timed[0]


def _judge_timed(judge: Judge, timed: Sequence[tuple[float, Point]], enough: int) -> None:
    """Judges points in order of their times until none can be better; at most until `enough` were judged in all."""
    for seconds, point in sorted(timed, key=_seconds_of):
        if seconds >= judge.best_seconds or judge.candidates > enough:
            return
        judge.within_time(_draft(point, judge))


def _deeper(problem: Problem, point: Point) -> list[Point]:
    """The point with more tiles in flight than by default in all stages but the last."""
    plan = point.plan
    if plan.schedule == "gpipe":
        return []
    usual = tuple(map(tuple, Layout(plan, problem.model, problem.cluster).in_flight))
    found: dict[object, Point] = {}
    for more in (1, 2, problem.batch.global_batch):
        held = tuple(
            tuple(min(own + more, -(-r.samples // r.micro_batch)) for own, r in zip(stage, spec.replicas, strict=True))
            for stage, spec in zip(usual[:-1], plan.stages[:-1], strict=True)
        )
        found[held] = point._replace(held=(*held, usual[-1]))
    return [own for own in found.values() if own.held != usual and _runs(problem, own)]


def _runs(problem: Problem, point: Point) -> bool:
    """Whether the tiles in flight are enough for those held further down."""
    try:
        return bool(Layout(point.plan, problem.model, problem.cluster).in_flight)
    except BadInput:
        return False


def _schedules(problem: Problem) -> list[ScheduleName]:
    able = ("1f1b", "gpipe", "zero_bubble")
    wanted = [name for name in (problem.schedule, *problem.other_schedules) if name in able]
    return [name for name in wanted if recomputes_under(name, problem)]


def _shapes(problem: Problem) -> Iterator[Shape]:
    """All ordered partitions into stages of all ways to group the ranks; equal units are not told apart."""
    for grouping in _groupings(problem):
        sorts: dict[tuple[int, int], list[Unit]] = {}
        for unit in grouping:
            sorts.setdefault((unit.kind, unit.tp), []).append(unit)
        for composition in ordered_partitions(tuple(map(len, sorts.values()))):
            shape = _seated(list(sorts.values()), composition)
            if _is_allowed(problem, shape):
                yield shape


def _is_allowed(problem: Problem, shape: Shape) -> bool:
    """Whether there are layers and samples for all, and constraints have nothing against it."""
    given, widths = problem.constraints, set(map(len, shape))
    return (
        len(shape) <= problem.model.layers
        and max(widths) <= problem.batch.global_batch
        and given.pp in (None, len(shape))
        and (given.dp is None or widths == {given.dp})
        and all(levels(problem, units) for units in shape)
        and not problem.forbids_any((unit.kind for unit in units) for units in shape)
    )


def _groupings(problem: Problem) -> Iterator[list[Unit]]:
    """All ways to group the ranks of every machine, the widest groups first."""
    machines = [(index, machine) for index, kind in enumerate(problem.kinds) for machine in kind.machines]
    wanted = problem.constraints.tp
    for chosen in product(*(_sizes(len(machine), problem.degrees_of(kind)) for kind, machine in machines)):
        if wanted is None or {size for sizes in chosen for size in sizes} == {wanted}:
            yield [
                Unit(kind, machine[sum(sizes[:i]) : sum(sizes[: i + 1])])
                for (kind, machine), sizes in zip(machines, chosen, strict=True)
                for i in range(len(sizes))
            ]


def _sizes(count: int, degrees: Sequence[int]) -> list[tuple[int, ...]]:
    """All ways to make `count` of degrees, the largest first."""
    if not count:
        return [()]
    able = [degree for degree in degrees if degree <= count]
    return [(d, *rest) for d in able for rest in _sizes(count - d, [other for other in able if other <= d])]


def _seated(sorts: Sequence[Sequence[Unit]], composition: Sequence[Sequence[int]]) -> Shape:
    """The units of every stage in order of ranks."""
    used = [0] * len(sorts)
    shape = []
    for counts in composition:
        own = [unit for units, at, count in zip(sorts, used, counts, strict=True) for unit in units[at : at + count]]
        used = [at + count for at, count in zip(used, counts, strict=True)]
        shape.append(tuple(sorted(own, key=lambda unit: unit.ranks)))
    return tuple(shape)


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


def _promising(limit: float, branches: Sequence[Branch]) -> Points:
    """The points whose bound is below the limit, by their bounds; at most as many as may be timed."""
    found = Points(branches, np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros((0, MOST_UNITS), dtype=np.int64))
    new, count = [found], 0
    for index, branch in enumerate(branches):
        bounds, options = _below(limit, branch)
        if len(bounds):
            padded = np.pad(options, ((0, 0), (0, MOST_UNITS - options.shape[1])))
            new.append(Points(branches, bounds, np.full(len(bounds), index), padded))
            count += len(bounds)
        if count > MOST_TIMED or index == len(branches) - 1:
            found = _smallest(new)
            new, count = [found], 0
            if len(found.bounds) == MOST_TIMED:
                limit = float(found.bounds[-1])
    return found


def _smallest(parts: Sequence[Points]) -> Points:
    """The points with the smallest bounds, in order."""
    together = Points(parts[0].branches, *(np.concatenate(own) for own in list(zip(*parts, strict=True))[1:]))
    return together.at(np.argsort(together.bounds, kind="stable")[:MOST_TIMED])


def _branches(costs: StageCosts, shape: Shape) -> Iterator[Branch]:
    """A shape with all cuts of the layers."""
    layers = costs.problem.model.layers
    for cut in combinations(range(1, layers), len(shape) - 1):
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
    bounds = _bounds(stages, nearest)
    able = np.nonzero(bounds < limit)
    return bounds[able], np.stack([own[at] for own, at in zip(rows, able, strict=True)], axis=1)


def _bounds(stages: Sequence[StageOptions], crossings: Sequence[float]) -> np.ndarray:
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


def _timed(problem: Problem, points: Sequence[Point], orders: dict[object, list[Node]]) -> list[tuple[float, Point]]:
    """The points with the seconds of their step, all of one tiling at once."""
    alike: dict[object, list[Point]] = {}
    for point in points:
        alike.setdefault(point.tiling, []).append(point)
    found: list[tuple[float, Point]] = []
    for tiling, own in alike.items():
        if tiling not in orders:
            orders[tiling] = nodes_of(Layout(own[0].plan, problem.model, problem.cluster))
        found += zip(_seconds(own, orders[tiling]), own, strict=True)
    return found


def _seconds(points: Sequence[Point], nodes: Sequence[Node]) -> list[float]:
    """The step of points that tile alike."""
    stages = list(zip(*(point.modes for point in points), strict=True))
    crossings = [np.stack([point.branch.crossing(above) for point in points]) for above in range(len(stages) - 1)]
    updates = [np.stack([mode.updates for mode in own]) for own in stages]
    first = np.minimum.reduce([own.min(axis=1) for own in updates])
    passed = [
        Passed(np.stack([mode.seconds for mode in own]), update - first[:, None])
        for own, update in zip(stages, updates, strict=True)
    ]
    reduced = [
        np.maximum(
            ends.stop + [mode.reduction.tail_seconds for mode in own],
            ends.start + [mode.reduction.seconds for mode in own],
        )
        for ends, own in zip(ends_of(nodes, passed, crossings), stages, strict=True)
    ]
    seconds: list[float] = (np.maximum.reduce(reduced) + first).tolist()
    return seconds


def _draft(point: Point, judge: Judge) -> Draft:
    """The point's draft, movable where drafts can express its plan: they list like units by their micro-batch."""
    problem, plan = judge.problem, point.plan
    stages = [
        DraftStage(x, _seats(units, [r.micro_batch for r in spec.replicas]), mode.recompute, mode.zero)
        for units, x, mode, spec in zip(point.branch.shape, point.branch.layers, point.modes, plan.stages, strict=True)
    ]
    schedule = None if plan.schedule == problem.schedule else plan.schedule
    draft = Draft(tuple(stages), alike=False, schedule=schedule)
    if (usual := complete(draft, problem, judge.costs, None)) is not None:
        for index, (stage, own, wanted) in enumerate(zip(stages, usual.stages, plan.stages, strict=True)):
            more = tuple(w.samples - r.samples for r, w in zip(own.replicas, wanted.replicas, strict=True))
            draft = draft.with_stage(index, replace(stage, nudges=more if any(more) else ()))
        if complete(draft, problem, judge.costs, None) == plan:
            return draft
    return replace(draft, name=f"point {plan.stages}", plan=plan)


def _seats(units: Units, sizes: Sequence[int]) -> tuple[Seats, ...]:
    counts = Counter((unit.kind, unit.tp, size) for unit, size in zip(units, sizes, strict=True))
    return merged([Seats(*sort, number) for sort, number in counts.items()])
