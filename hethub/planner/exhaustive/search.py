"""A small space searched to its end: every plan of a handful of accelerators that a bound does not exclude is timed.

The space: ordered partitions of the units into stages, TP degrees inside machines, cuts of the layers, samples in steps
of one, micro-batch per replica, recompute and ZeRO level per stage, 1F1B or zero_bubble, the default number of
microbatches in flight. A point is left out where a bound of its step is no shorter than the best plan known: a rough
one over what its stages take at least, then that of its chains of microbatches. All others are replayed with the
predictor's own costs, those of one microbatching at once, and evaluated in order of these times. The best are then
tried with more microbatches in flight.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from hethub.planner.candidate.candidate import Candidate, CandidateStage, Pattern, ReplicaGroup, merged
from hethub.planner.candidate.materialize import materialize
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.exhaustive.points import Branch, Point, branches_below, promising
from hethub.planner.exhaustive.replay import Node, StageSeconds, ends_of, nodes_of
from hethub.planner.exhaustive.shapes import excess, schedules_of, shapes_of
from hethub.planner.exhaustive.stages import StageCosts, in_rounds
from hethub.planner.problem.problem import Problem
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Layout

AT_ONCE = 512  # points timed before the best of them are evaluated
MOST_TIMED = 65_536
FEW, GROWTH = 32, 4  # branches looked at first, and how many times as many each time after
MOST_EVALUATED = 1000  # where memory holds few of them
DEEPENED = 4096  # points tried with more microbatches in flight


def refuse_larger(problem: Problem) -> None:
    """Raises BadInput where the space is too large to be searched to its end."""
    if (beyond := excess(problem)) is not None:
        raise BadInput(
            f"strategy 'exhaustive' times every plan of a small space that may be the best; here it has {beyond}. "
            "Take strategy 'auto', or leave fewer plans: fewer accelerators or layers, a smaller global_batch, or "
            "constraints such as pp, tp, dp, micro_batch or recompute."
        )


def search_exhaustively(incumbent: Incumbent) -> None:
    """Evaluates the plans of a small space that may be better than those known, the most promising ones first. The
    incumbent knows then what no plan of the space is below: the best plan where it was searched to its end,
    else the smallest bound that was not looked at."""
    problem = incumbent.problem
    costs = [StageCosts(problem, schedule, incumbent.costs.times) for schedule in schedules_of(problem)]
    shapes = list(shapes_of(problem))
    bounded = [
        own
        for each in costs
        for shape in shapes
        if not incumbent.out_of_time
        for own in branches_below(incumbent.best_seconds, each, shape)
    ]
    sweep = _Sweep(incumbent)
    for part in _parts(sorted(bounded, key=itemgetter(0))):
        sweep.search(part)
    if incumbent.fitting and not incumbent.out_of_time:
        incumbent.space_bound_seconds = min(incumbent.best_seconds, sweep.unseen_seconds)
    deeper = [point for _, own in sweep.near for point in _deeper(problem, own)]
    sweep.enough += MOST_EVALUATED
    sweep.evaluate_timed(_timed(problem, deeper, sweep.orders))


def _parts(bounded: Sequence[tuple[float, Branch]]) -> Iterator[Sequence[tuple[float, Branch]]]:
    """Branches in their order, few of them first: these tell how fast a plan can be before most are looked at."""
    first, count = 0, FEW
    while first < len(bounded):
        yield bounded[first : first + count]
        first, count = first + count, GROWTH * count


class _Sweep:
    """Times points and evaluates the best, as many as may be, and knows how fast those may be that it left out."""

    def __init__(self, incumbent: Incumbent) -> None:
        self.incumbent = incumbent
        self.orders: dict[object, Mapping[int, Node]] = {}
        self.enough = len(incumbent.tried) + MOST_EVALUATED
        self.left = MOST_TIMED
        self.near: list[tuple[float, Point]] = []  # the fastest points with their seconds
        self.unseen_seconds = float("inf")

    @property
    def has_evaluated_enough(self) -> bool:
        return self.incumbent.out_of_time or len(self.incumbent.tried) > self.enough

    def leave(self, seconds: float) -> None:
        """Notes that points are left out of which none is faster."""
        self.unseen_seconds = min(self.unseen_seconds, seconds)

    def search(self, bounded: Sequence[tuple[float, Branch]]) -> None:
        """Times the points of branches that may be better than the best plan, in order of their bounds."""
        if self.left <= 0 or self.has_evaluated_enough:
            self.leave(bounded[0][0])
            return
        # More than may be timed, so that the first of those left out is among them.
        found = promising(self.incumbent.best_seconds, [branch for _, branch in bounded], self.left + AT_ONCE)
        for first in range(0, len(found.bounds), AT_ONCE):
            if found.bounds[first] >= self.incumbent.best_seconds:
                return
            if self.left <= 0 or self.has_evaluated_enough:
                self.leave(float(found.bounds[first]))
                return
            some = found.at(slice(first, first + AT_ONCE)).points()
            self.left -= len(some)
            timed = _timed(self.incumbent.problem, some, self.orders)
            self.evaluate_timed(timed)
            self.near = heapq.nsmallest(DEEPENED, [*self.near, *timed], key=itemgetter(0))

    def evaluate_timed(self, timed: Sequence[tuple[float, Point]]) -> None:
        """Evaluates points in order of their times until none can be better."""
        for seconds, point in sorted(timed, key=itemgetter(0)):
            if seconds >= self.incumbent.best_seconds:
                return
            if self.has_evaluated_enough:
                self.leave(seconds)
                return
            self.incumbent.consider(_candidate(point, self.incumbent))


def _deeper(problem: Problem, point: Point) -> list[Point]:
    """The point with more microbatches in flight than by default in all stages but the last."""
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
    """Whether the microbatches in flight are enough for those held further down."""
    try:
        return bool(Layout(point.plan, problem.model, problem.cluster).in_flight)
    except BadInput:
        return False


def _timed(
    problem: Problem, points: Sequence[Point], orders: dict[object, Mapping[int, Node]]
) -> list[tuple[float, Point]]:
    """The points with the seconds of their step, all of one microbatching at once."""
    alike: dict[object, list[Point]] = {}
    for point in points:
        alike.setdefault(point.microbatching, []).append(point)
    found: list[tuple[float, Point]] = []
    for microbatching, own in alike.items():
        if microbatching not in orders:
            orders[microbatching] = nodes_of(Layout(own[0].plan, problem.model, problem.cluster))
        found += zip(step_seconds(own, orders[microbatching]), own, strict=True)
    return found


def step_seconds(points: Sequence[Point], nodes: Mapping[int, Node]) -> list[float]:
    """The step of points that cut the samples alike."""
    stages = list(zip(*(point.modes for point in points), strict=True))
    p2p_costs = [np.stack([point.branch.p2p_seconds(above) for point in points]) for above in range(len(stages) - 1)]
    updates = [np.stack([mode.updates for mode in own]) for own in stages]
    first = np.minimum.reduce([own.min(axis=1) for own in updates])
    cuts = [own.microbatchings for own in points[0].branch.stages]
    ways = [option % len(cut) for option, cut in zip(points[0].options, cuts, strict=True)]
    spent = [
        StageSeconds(
            in_rounds(np.stack([mode.seconds for mode in own], axis=1), cut.rounds[way, 0]), update - first[:, None]
        )
        for own, update, cut, way in zip(stages, updates, cuts, ways, strict=True)
    ]
    left = [
        own.seconds[:, 3, np.arange(cut.sizes.shape[1]), cut.sizes[way]].min(axis=1)
        for own, cut, way in zip(spent, cuts, ways, strict=True)
    ]
    reduced = [
        np.maximum(
            ends.stop + [mode.reduction.tail_seconds for mode in own] + rest,
            ends.start + [mode.reduction.seconds for mode in own],
        )
        for ends, own, rest in zip(ends_of(nodes, spent, p2p_costs), stages, left, strict=True)
    ]
    return (np.maximum.reduce(reduced) + first).tolist()


def _candidate(point: Point, incumbent: Incumbent) -> Candidate:
    """The point's candidate, movable where candidates can express its plan: they list like units by their
    micro-batch."""
    problem, plan = incumbent.problem, point.plan
    stages = []
    for units, x, mode, spec in zip(point.branch.shape, point.branch.layers, point.modes, plan.stages, strict=True):
        each = zip(units, spec.replicas, strict=True)
        groups = merged([ReplicaGroup(unit.device_type, unit.tp, r.micro_batch, 1) for unit, r in each])
        stages.append(CandidateStage(x, groups, mode.recompute, mode.zero))
    candidate = Candidate(tuple(stages), pattern=Pattern(plan.schedule))
    if (usual := materialize(candidate, problem, incumbent.costs.unit_costs.worker, None)) is not None:
        for index, (stage, own, wanted) in enumerate(zip(stages, usual.stages, plan.stages, strict=True)):
            more = tuple(w.samples - r.samples for r, w in zip(own.replicas, wanted.replicas, strict=True))
            candidate = candidate.with_stages({index: replace(stage, nudges=more if any(more) else ())})
        if materialize(candidate, problem, incumbent.costs.unit_costs.worker, None) == plan:
            return candidate
    return replace(candidate, plan=plan)
