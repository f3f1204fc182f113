"""Small spaces searched to their end: bounds, replayed times and the answer, beside the predictor and the whole
grid."""

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hethub.planner import plan
from hethub.planner.exhaustive.chains import Chains
from hethub.planner.exhaustive.points import Branch, Point, branches_below, promising, step_bound
from hethub.planner.exhaustive.replay import nodes_of
from hethub.planner.exhaustive.search import search_exhaustively, step_seconds
from hethub.planner.exhaustive.shapes import excess, shapes_of
from hethub.planner.exhaustive.stages import (
    Cuts,
    StageBounds,
    StageCosts,
    bounds_of,
    count_microbatchings,
    microbatchings,
)
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.predictor import predict
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.step import step_times
from hethub.predictor.pipeline.traffic.link_loads import Paces
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from hethub.spec.plan import PlanSpec, ReplicaSpec, ScheduleName, StageSpec
from tests.oracle.grid import exhaustive
from tests.oracle.question import MODEL, random_cluster, random_question
from tests.planner.problems import incumbent_of
from tests.planner.search.restricted import grid_incumbent, grid_problem


def random_point(costs: StageCosts, draw: random.Random) -> Point:
    problem = costs.problem
    shape = draw.choice(list(shapes_of(problem)))
    cut = sorted(draw.sample(range(1, problem.model.layers), len(shape) - 1))
    layers = tuple(b - a for a, b in pairwise((0, *cut, problem.model.layers)))
    stages = tuple(costs.options(shape, layers, stage) for stage in range(len(shape)))
    options = (draw.randrange(len(own.bounds.busy)) for own in stages)
    return Point(Branch(costs, shape, layers, stages), tuple(options))


def bounds_at(point: Point) -> list[StageBounds]:
    """By stage, the bounds of the point's mode with its microbatching."""
    return [
        bounds_of(stage.mode(option), stage.microbatchings).at(np.array([option % len(stage.microbatchings)]))
        for stage, option in zip(point.branch.stages, point.options, strict=True)
    ]


def chain_bound(point: Point) -> float:
    branch = point.branch
    p2p_costs = [[branch.p2p_seconds(above)] for above in range(len(branch.shape) - 1)]
    chains = Chains([[stage] for stage in branch.stages], p2p_costs)
    return float(chains.bounds(np.zeros(1, dtype=np.int64), np.array([point.options])).item())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_point_takes_what_is_predicted_and_no_less_than_its_bound(
    seed: int, tied: bool, schedule: ScheduleName
) -> None:
    problem = _problem(ConstraintsSpec(), seed, tied)
    costs = StageCosts(problem, schedule, None)
    draw, exact = random.Random(seed), 0
    for _ in range(20):
        point = random_point(costs, draw)
        layout = bind(point.plan, problem.model, problem.cluster)
        seconds = predict(layout).step_seconds
        nodes = nodes_of(layout)
        (timed,) = step_seconds([point], nodes)
        bound = step_bound(bounds_at(point), costs.nearest(point.branch.shape)).item()
        assert bound <= timed * (1 + 1e-9)
        least = [stage.least for stage in point.branch.stages]
        assert step_bound(least, costs.nearest(point.branch.shape)).item() <= bound
        assert chain_bound(point) <= timed * (1 + 1e-9)
        assert timed <= seconds * (1 + 1e-9)
        # Where messages come faster than a link takes them, or it has more bytes than time, that comes on top.
        unpaced = PlanCosts(layout, HETHUB, packaged())
        unpaced.paces = lambda *flow: (Paces(0.0, 0.0), Paces(0.0, 0.0))  # type: ignore[method-assign]
        unpaced.loads.__dict__["longest"] = (0.0, 0.0, None)
        exact += timed == pytest.approx(step_times(layout, unpaced).seconds, rel=1e-9)
    assert exact == 20


@pytest.mark.parametrize("seed", range(2))
def test_points_have_their_bound_whatever_schedule_stands_beside(seed: int) -> None:
    """Reductions longer than a bucket's hide behind the last pass, which is another one under zero_bubble."""
    problem = _problem(ConstraintsSpec(), seed)
    costs = [StageCosts(problem, name, None) for name in ("zero_bubble", "1f1b")]
    for shape in (own for own in shapes_of(problem) if len(own) <= 2):
        branches = [branches_below(np.inf, own, shape)[0][1] for own in costs]
        together = promising(np.inf, branches, 10**6)
        for owner, branch in enumerate(branches):
            alone = promising(np.inf, [branch], 10**6)
            assert np.array_equal(together.bounds[together.owners == owner], alone.bounds)


@pytest.mark.parametrize("seed", range(3))
def test_with_nothing_known_the_best_plan_of_the_grid_is_found(seed: int) -> None:
    problem = grid_problem(seed, 3)
    incumbent = grid_incumbent(problem)
    search_exhaustively(incumbent)
    assert (
        incumbent.best_seconds
        == exhaustive(random_question(seed, 3), start=incumbent.best_seconds * (1 + 1e-9)).seconds
    )
    assert incumbent.space_bound_seconds == incumbent.best_seconds


def test_where_the_search_stops_early_no_plan_is_below_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = grid_problem(1, 3)
    whole, part = (grid_incumbent(problem) for _ in range(2))
    search_exhaustively(whole)
    for name, size in (("AT_ONCE", 8), ("MOST_TIMED", 32)):
        monkeypatch.setattr(f"hethub.planner.exhaustive.search.{name}", size)
    search_exhaustively(part)
    assert part.fitting
    assert part.space_bound_seconds is not None
    assert part.space_bound_seconds <= whole.best_seconds < part.best_seconds


def test_a_search_in_small_parts_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = grid_problem(1, 3)
    whole, part = (grid_incumbent(problem) for _ in range(2))
    search_exhaustively(whole)
    for name, size in (("AT_ONCE", 8), ("FEW", 1)):
        monkeypatch.setattr(f"hethub.planner.exhaustive.search.{name}", size)
    search_exhaustively(part)
    assert part.best_seconds == whole.best_seconds == part.space_bound_seconds


def test_an_answer_says_what_no_plan_of_a_small_space_is_below() -> None:
    found = plan(MODEL, random_cluster(0, 3), Batch(6, 512, "bf16"), strategy="exhaustive", with_bounds=False)
    assert found.space_bound_seconds is not None
    assert found.lower_bound_seconds <= found.prediction.step_seconds <= found.space_bound_seconds
    assert found.to_dict()["space_bound_seconds"] == found.space_bound_seconds
    assert plan(MODEL, random_cluster(0, 3), Batch(6, 512, "bf16"), with_bounds=False).space_bound_seconds is None


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_microbatchings_are_counted_as_they_are_made(replicas: int, even: bool) -> None:
    made = microbatchings(7, replicas, Cuts((1, 2, 4), even))
    assert len(made) == count_microbatchings(7, replicas, Cuts((1, 2, 4), even))
    assert (made.samples.sum(axis=1) == 7).all()
    assert (made.sizes <= made.samples).all()


def replicas_of(plan: PlanSpec) -> list[ReplicaSpec]:
    return [replica for stage in plan.stages for replica in stage.replicas]


# What is asked for, what every plan found must then keep to, and whether it costs something.
ASKED: list[Any] = [
    pytest.param(
        {"tp": 1}, lambda plan: all(replica.tp == 1 for replica in replicas_of(plan)), False, marks=pytest.mark.slow
    ),
    pytest.param({"pp": 2}, lambda plan: len(plan.stages) == 2, True, marks=pytest.mark.slow),
    ({"dp": 1}, lambda plan: all(len(stage.replicas) == 1 for stage in plan.stages), False),
    ({"dp": 2}, lambda plan: all(len(stage.replicas) == 2 for stage in plan.stages), True),
    ({"recompute": "full"}, lambda plan: all(stage.recompute == "full" for stage in plan.stages), True),
    ({"pp": 1, "zero": 1}, lambda plan: plan.stages[0].zero == 1, True),
    ({"micro_batch": 2}, lambda plan: {replica.micro_batch for replica in replicas_of(plan)} == {2}, True),
    ({"forbid": [("nvidia", "amd")], "pp": 3}, lambda plan: not any(map(mixes_vendors, plan.stages)), True),
]


def mixes_vendors(stage: StageSpec) -> bool:
    return len({random_cluster(1, 4).places[rank].accelerator.vendor for rank in stage.ranks}) > 1


@cache
def free_seconds() -> float:
    problem = _problem(ConstraintsSpec())
    incumbent = incumbent_of(problem)
    search_exhaustively(incumbent)
    return incumbent.best_seconds


@pytest.mark.parametrize(("given", "keeps", "costs"), ASKED)
def test_constraints_leave_a_part_of_the_space(
    given: dict[str, Any], keeps: Callable[[PlanSpec], bool], costs: bool
) -> None:
    problem = _problem(ConstraintsSpec.model_validate(given))
    incumbent = incumbent_of(problem)
    search_exhaustively(incumbent)
    assert incumbent.best is not None
    assert all(keeps(own.plan) for own in incumbent.fitting.values())
    assert (incumbent.best_seconds > free_seconds()) == costs
    assert incumbent.best_seconds >= free_seconds()


def test_a_real_job_is_not_tiny() -> None:
    assert excess(_problem(ConstraintsSpec())) is None
    assert excess(pose(MODEL.replace(layers=32), random_cluster(1, 4), Batch(512, 512, "bf16"))) is not None


def _problem(constraints: ConstraintsSpec, seed: int = 1, tied: bool = False) -> Problem:
    return pose(MODEL.replace(tied_head=tied), random_cluster(seed, 4), Batch(6, 512, "bf16"), constraints)
