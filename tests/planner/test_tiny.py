"""Small spaces searched to their end: bounds, replayed times and the answer, beside the predictor and the whole grid."""

import random
from itertools import pairwise

import pytest

from hethub.planner import plan
from hethub.planner.capabilities import RUNTIME
from hethub.planner.costs import UnitCosts
from hethub.planner.judge import Judge
from hethub.planner.problem import Batch, Problem, pose
from hethub.planner.tiny import search_tiny, step_seconds
from hethub.planner.tiny_points import Branch, Point, step_bound
from hethub.planner.tiny_replay import nodes_of
from hethub.planner.tiny_shapes import is_tiny, shapes_of
from hethub.planner.tiny_stages import Cuts, StageCosts, count_tilings, tilings
from hethub.predictor import predict
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout import bind
from hethub.spec.plan import ScheduleName
from tests.planner.exhaustive import GridJudge, exhaustive
from tests.planner.test_exhaustive import MODEL, grid_problem, random_cluster


def random_point(costs: StageCosts, draw: random.Random) -> Point:
    problem = costs.problem
    shape = draw.choice(list(shapes_of(problem)))
    cut = sorted(draw.sample(range(1, problem.model.layers), len(shape) - 1))
    layers = tuple(b - a for a, b in pairwise((0, *cut, problem.model.layers)))
    stages = tuple(costs.options(shape, layers, stage) for stage in range(len(shape)))
    return Point(
        Branch(costs, shape, layers, stages), tuple(draw.randrange(len(stage.bounds.busy)) for stage in stages)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_point_takes_what_is_predicted_and_no_less_than_its_bound(
    seed: int, tied: bool, schedule: ScheduleName
) -> None:
    problem = _problem(ConstraintsSpec(), seed, tied)
    costs = StageCosts(Judge(problem, UnitCosts(problem), ignore_memory=True), schedule)
    draw, exact = random.Random(seed), 0
    for _ in range(20):
        point = random_point(costs, draw)
        layout = bind(point.plan, problem.model, problem.cluster)
        seconds = predict(layout).step_seconds
        (timed,) = step_seconds([point], nodes_of(layout))
        own = [stage.bounds.at([option]) for stage, option in zip(point.branch.stages, point.options, strict=True)]
        bound = step_bound(own, costs.nearest(point.branch.shape)).item()
        assert bound <= timed * (1 + 1e-9)
        least = [stage.least for stage in point.branch.stages]
        assert step_bound(least, costs.nearest(point.branch.shape)).item() <= bound
        assert timed <= seconds * (1 + 1e-9)
        exact += timed == pytest.approx(seconds, rel=1e-9)
    assert exact == 20


@pytest.mark.parametrize("seed", range(3))
def test_with_nothing_known_the_best_plan_of_the_grid_is_found(seed: int) -> None:
    problem = grid_problem(seed, 3)
    judge = GridJudge(problem, UnitCosts(problem))
    search_tiny(problem, judge)
    assert judge.best_seconds == exhaustive(problem, start=judge.best_seconds * (1 + 1e-9)).seconds
    assert judge.space_bound_seconds == judge.best_seconds


def test_a_space_that_was_not_searched_to_its_end_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem(ConstraintsSpec())
    judge = Judge(problem, UnitCosts(problem))
    monkeypatch.setattr("hethub.planner.tiny.MOST_TIMED", 1)
    search_tiny(problem, judge)
    assert judge.fitting
    assert judge.space_bound_seconds is None


def test_an_answer_says_what_no_plan_of_a_small_space_is_below() -> None:
    found = plan(MODEL, random_cluster(0, 3), Batch(6, 512, "bf16"), with_bounds=False)
    assert found.space_bound_seconds is not None
    assert found.lower_bound_seconds <= found.prediction.step_seconds <= found.space_bound_seconds
    assert found.to_dict()["space_bound_seconds"] == found.space_bound_seconds
    assert plan(MODEL, random_cluster(0, 3), Batch(96, 512, "bf16"), with_bounds=False).space_bound_seconds is None


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_tilings_are_counted_as_they_are_made(replicas: int, even: bool) -> None:
    made = tilings(7, replicas, Cuts((1, 2, 4), even))
    assert len(made) == count_tilings(7, replicas, Cuts((1, 2, 4), even))
    assert (made.samples.sum(axis=1) == 7).all()
    assert (made.sizes <= made.samples).all()


@pytest.mark.parametrize(
    "constraints",
    [
        ConstraintsSpec(tp=1),
        ConstraintsSpec(pp=2),
        ConstraintsSpec(dp=1),
        ConstraintsSpec(zero=1, recompute="full"),
        ConstraintsSpec(micro_batch=2),
        ConstraintsSpec(forbid=(("nvidia", "amd"),)),
    ],
)
def test_constraints_leave_a_part_of_the_space(constraints: ConstraintsSpec) -> None:
    problem = _problem(constraints)
    judge = Judge(problem, UnitCosts(problem))
    search_tiny(problem, judge)
    assert judge.fitting


def test_a_real_job_is_not_tiny() -> None:
    assert is_tiny(_problem(ConstraintsSpec()))
    assert not is_tiny(pose(MODEL.replace(layers=32), random_cluster(1, 4), Batch(512, 512, "bf16")))


def _problem(constraints: ConstraintsSpec, seed: int = 1, tied: bool = False) -> Problem:
    return pose(MODEL.replace(tied_head=tied), random_cluster(seed, 4), Batch(6, 512, "bf16"), constraints, RUNTIME)
