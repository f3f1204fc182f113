"""The whole plan grid of a small cluster, searched to its end: what `auto` is compared with.

Grid: ordered partitions of the ranks into stages, TP 1 and 2 inside machines, cuts of the layers, micro-batch 1, 2 or 4
per replica, ZeRO 0, 1 or 3 and recompute none or full per stage, samples in steps of one.

Every point is counted. A branch is left out where its bound is no shorter than a plan that is known, and the smallest
bound so left out is kept: with the best plan found it brackets the optimum. All others are predicted, and no prediction
may be shorter than its bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, pairwise, product
from math import prod
from typing import NamedTuple

import numpy as np

from hethub.predictor import predict
from hethub.predictor.memory.ranks import rank_memory
from hethub.spec.layout.bind import bind
from hethub.spec.plan import PlanSpec
from tests.oracle.paths import path_seconds
from tests.oracle.question import Question, Unit
from tests.oracle.retimed import Need, ends, nodes_of
from tests.oracle.stage_grid import (
    Option,
    Seconds,
    Shape,
    StageGrid,
    StageGrids,
    plan_of,
)

AT_ONCE = 8192  # points whose microbatches are followed


class Point(NamedTuple):
    """A plan of the grid that may be better than the best known: an option per stage."""

    shape: Shape
    layers: tuple[int, ...]
    options: tuple[Option, ...]

    @property
    def microbatching(self) -> object:
        """What the order of its actions depends on, and what passes between its stages."""
        rounds = (own.zero >= 2 and len(own.samples) > 1 for own in self.options)
        return self.shape, tuple(
            (own.samples, own.micro_batches, r) for own, r in zip(self.options, rounds, strict=True)
        )


@dataclass
class Outcome:
    """The best plan of the grid and its step; nothing in the grid is shorter than `lower_bound`."""

    seconds: float = float("inf")
    plan: PlanSpec | None = None
    lower_bound: float = float("inf")
    points: int = 0
    timed: int = 0  # left by the bounds, timed action by action
    predicted: int = 0
    too_large: int = 0  # of the points to be predicted, beyond memory

    def cut_off(self, bound: float) -> bool:
        """Whether a branch cannot hold a better plan; if so its bound is noted."""
        if bound < self.seconds:
            return False
        self.lower_bound = min(self.lower_bound, bound)
        return True

    def kept(self, bounds: np.ndarray) -> np.ndarray:
        """The places of those that may be better; the smallest of the other bounds is noted."""
        able = bounds < self.seconds
        self.lower_bound = min(self.lower_bound, float(bounds[~able].min(initial=np.inf)))
        return np.nonzero(able)[0]


def exhaustive(question: Question, start: float = float("inf")) -> Outcome:
    """The grid's optimum. `start` is a step already known to be reachable; nothing slower is looked at."""
    outcome, grids = Outcome(seconds=start), StageGrids(question)
    alike: dict[object, list[Point]] = {}
    for units in groupings(question):
        for shape in ordered_partitions(tuple(units)):
            if len(shape) <= question.model.layers and max(map(len, shape)) <= question.global_batch:
                for layers in _open_cuts(grids, shape, outcome):
                    for point in _within(grids, shape, layers, outcome):
                        alike.setdefault(point.microbatching, []).append(point)
    timed = [(bound, point) for points in alike.values() for bound, point in timed_points(question, grids, points)]
    outcome.timed = len(timed)
    for bound, point in sorted(timed, key=lambda entry: entry[0]):
        if not outcome.cut_off(bound):
            _predict(question, plan_of(question, *point), bound, outcome)
    outcome.lower_bound = min(outcome.lower_bound, outcome.seconds)
    return outcome


def groupings(question: Question) -> Iterator[list[Unit]]:
    """All ways to pair ranks of a machine (neighbours) or leave them single."""
    choices = []
    for machine in question.machines:
        options = [[Unit((rank,)) for rank in machine]]
        if len(machine) == 2 and question.pairs_fit:
            options.append([Unit(machine)])
        choices.append(options)
    for chosen in product(*choices):
        yield [unit for units in chosen for unit in units]


def ordered_partitions(units: tuple[Unit, ...]) -> Iterator[Shape]:
    if not units:
        yield ()
        return
    for size in range(1, len(units) + 1):
        for stage in combinations(units, size):
            rest = tuple(unit for unit in units if unit not in stage)
            for tail in ordered_partitions(rest):
                yield (stage, *tail)


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, layers)))


def _open_cuts(grids: StageGrids, shape: Shape, outcome: Outcome) -> list[tuple[int, ...]]:
    """The cuts of the layers with which a shape may be better than the best step known; all points are counted."""
    every, stages = list(cuts(grids.question.model.layers, len(shape))), range(len(shape))
    whole = [[grids(shape, layers, stage) for layers in every] for stage in stages]
    outcome.points += sum(prod(map(len, own)) for own in zip(*whole, strict=True))
    least = [Seconds(*map(np.concatenate, zip(*(grid.least for grid in own), strict=True))) for own in whole]
    nearest = [grids.nearest(shape, every[0], stage) for stage in stages[:-1]]
    return [every[place] for place in outcome.kept(bound_seconds(least, nearest)).tolist()]


def _within(grids: StageGrids, shape: Shape, layers: tuple[int, ...], outcome: Outcome) -> Iterator[Point]:
    """The points of a shape with its layers whose bounds are below the best step known."""
    whole = [grids(shape, layers, stage) for stage in range(len(shape))]
    nearest = [grids.nearest(shape, layers, stage) for stage in range(len(shape) - 1)]
    least = [grid.least for grid in whole]
    kept: list[StageGrid] = []
    for stage, grid in enumerate(whole):  # beside the others at their fastest
        bounds = bound_seconds([*least[:stage], grid.seconds, *least[stage + 1 :]], nearest)
        kept.append(grid.only(outcome.kept(bounds)))
        if not len(kept[-1]):
            return
        least[stage] = kept[-1].least
    bounds = bound_seconds([own.seconds.along(stage, len(kept)) for stage, own in enumerate(kept)], nearest)
    places = np.stack(np.unravel_index(outcome.kept(bounds.ravel()), bounds.shape), axis=1)
    between = [grids.between(shape, layers, stage) for stage in range(len(shape) - 1)]
    for first in range(0, len(places), AT_ONCE):
        some = places[first : first + AT_ONCE]
        stages = [grid.only(own) for grid, own in zip(kept, some.T, strict=True)]
        for row in outcome.kept(path_seconds([grid.paths for grid in stages], between)).tolist():
            yield Point(shape, layers, tuple(grid.option(row) for grid in stages))


def bound_seconds(stages: Sequence[Seconds], crossings: list[float]) -> np.ndarray:
    """Seconds that no plan is shorter than, with these stages, in arrays that broadcast.

    A stage starts when a microbatch has come down to it, works on all its microbatches, and a microbatch goes back up
    from it; then the gradients of all stages are reduced, and the next step begins where the update is shortest. Who
    has a longer update than that begins later by the difference (predictor/step.py).
    """
    first = reduce(np.minimum, (own.update for own in stages))
    reduced: np.ndarray | float = 0.0
    filled: np.ndarray | float = 0.0
    for s, own in enumerate(stages):
        filled = np.maximum(filled, own.update - first)
        end = filled + own.busy
        reduced = np.maximum(reduced, end + own.reduced)
        for above in range(s - 1, -1, -1):
            end = end + crossings[above] + stages[above].backward
            reduced = np.maximum(reduced, end + stages[above].reduced)
        if s < len(crossings):
            filled = filled + own.forward + crossings[s]
    return np.asarray(reduced + first)


def timed_points(question: Question, grids: StageGrids, points: list[Point]) -> Iterator[tuple[float, Point]]:
    """Points of one microbatching with the seconds of all their microbatches in order: as the predictor replays them,
    all at once."""
    shape, layers, _ = points[0]
    nodes = nodes_of(bind(plan_of(question, *points[0]), question.model, question.cluster))
    modes = [
        [grids(shape, p.layers, s).modes[own.mode] for p in points for own in (p.options[s],)]
        for s in range(len(shape))
    ]
    works = {work for node in nodes for work in node.works}
    seconds = {
        work: np.array([mode.seconds(work.place[1], work.kind, work.samples) for mode in modes[work.place[0]]])
        for work in works
    }
    updates = [np.array([mode.update for mode in own]) for own in modes]
    first = np.minimum.reduce(updates)

    def crossing(need: Need) -> float:
        above, below = sorted((need.source, need.target))
        return grids.crossing(shape, layers, above[0], (above[1], below[1]), need.samples)

    found = ends(nodes, seconds, crossing, [update - first for update in updates])
    reduced = [
        np.maximum(
            stage.stop + [mode.tail(option.micro_batches) for mode in own],
            stage.start + [mode.reduction.seconds for mode in own],
        )
        for stage, own, option in zip(found, modes, points[0].options, strict=True)
    ]
    yield from zip((np.maximum.reduce(reduced) + first).tolist(), points, strict=True)


def _predict(question: Question, plan: PlanSpec, bound: float, outcome: Outcome) -> None:
    layout = bind(plan, question.model, question.cluster)
    reserve = question.reserve
    if not all(entry.fits(reserve) for entry in rank_memory(layout)):
        outcome.too_large += 1
        return
    outcome.predicted += 1
    prediction = predict(layout, reserve=reserve)
    assert prediction.step_seconds >= bound * (1 - 1e-9), (
        f"{plan} takes {prediction.step_seconds} s, below its bound {bound}"
    )
    if prediction.fits and prediction.step_seconds < outcome.seconds:
        outcome.seconds, outcome.plan = prediction.step_seconds, plan
