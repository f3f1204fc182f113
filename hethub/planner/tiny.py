"""A small space searched to its end: every plan of a handful of accelerators that a bound does not exclude is timed.

The space: ordered partitions of the units into stages, TP degrees inside machines, cuts of the layers, samples in steps of
one, micro-batch per replica, recompute and ZeRO level per stage, 1F1B or zero_bubble, the default number of tiles in
flight. A point is left out where a bound of its step is no shorter than the best plan known. All others are replayed with
the predictor's own costs, those of one tiling at once, and judged in order of these times. The best are then tried with
more tiles in flight.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from hethub.planner.complete import complete
from hethub.planner.draft import Draft, DraftStage, Seats, merged
from hethub.planner.judge import Judge
from hethub.planner.problem import Problem
from hethub.planner.tiny_points import Point, Points, branches_below, promising_points
from hethub.planner.tiny_replay import Node, Passed, ends_of, nodes_of
from hethub.planner.tiny_shapes import schedules_of, shapes_of
from hethub.planner.tiny_stages import StageCosts, Units
from hethub.spec.errors import BadInput
from hethub.spec.layout import Layout

AT_ONCE = 4096  # points timed before the best of them are judged
MOST_TIMED = 16 * AT_ONCE
FEW = 256  # branches
MOST_JUDGED = 1000  # where memory holds few of them
MOST_DEEPENED = 128  # points tried with more tiles in flight


def search_tiny(problem: Problem, judge: Judge) -> None:
    """Judges what may be better than the best plan known, most promising first. Where the space was searched to its end, the
    judge knows then that no plan of it is faster."""
    costs = [StageCosts(judge, schedule) for schedule in schedules_of(problem)]
    shapes = list(shapes_of(problem))
    bounded = [own for each in costs for shape in shapes for own in branches_below(judge.best_seconds, each, shape)]
    branches = [branch for _, branch in sorted(bounded, key=itemgetter(0))]
    orders: dict[object, list[Node]] = {}
    enough = judge.candidates + MOST_JUDGED
    few = promising_points(judge.best_seconds, branches[:FEW], AT_ONCE)
    _judge_points(judge, few, orders, enough)  # tells how fast a plan can be before all are bounded
    found = promising_points(judge.best_seconds, branches, MOST_TIMED)
    near = _judge_points(judge, found, orders, enough)
    listed = len(found.bounds) < MOST_TIMED or float(found.bounds[-1]) >= judge.best_seconds
    if listed and judge.candidates <= enough and not judge.out_of_time and judge.fitting:
        judge.space_bound_seconds = judge.best_seconds
    if problem.capabilities.chooses_in_flight:
        deeper = [point for own in near for point in _deeper(problem, own)]
        _judge_timed(judge, _timed(problem, deeper, orders), enough + MOST_JUDGED)


def _judge_points(judge: Judge, found: Points, orders: dict[object, list[Node]], enough: int) -> list[Point]:
    """Times points in order of their bounds, and judges them in order of these times; the fastest of them."""
    near: list[tuple[float, Point]] = []
    for first in range(0, len(found.bounds), AT_ONCE):
        some = found.at(np.arange(first, min(first + AT_ONCE, len(found.bounds))))
        some = some.at(np.nonzero(some.bounds < judge.best_seconds)[0])
        if not len(some.bounds) or judge.out_of_time or judge.candidates > enough:
            break
        timed = _timed(judge.problem, some.points(), orders)
        _judge_timed(judge, timed, enough)
        near = heapq.nsmallest(MOST_DEEPENED, [*near, *timed], key=_seconds_of)
    return [point for _, point in near]


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


def _timed(problem: Problem, points: Sequence[Point], orders: dict[object, list[Node]]) -> list[tuple[float, Point]]:
    """The points with the seconds of their step, all of one tiling at once."""
    alike: dict[object, list[Point]] = {}
    for point in points:
        alike.setdefault(point.tiling, []).append(point)
    found: list[tuple[float, Point]] = []
    for tiling, own in alike.items():
        if tiling not in orders:
            orders[tiling] = nodes_of(Layout(own[0].plan, problem.model, problem.cluster))
        found += zip(step_seconds(own, orders[tiling]), own, strict=True)
    return found


def step_seconds(points: Sequence[Point], nodes: Sequence[Node]) -> list[float]:
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
