"""Annealing by itself: what it finds is a plan, and it finds what a grid holds and the planner's answers are."""

import random

from hethub.planner import plan
from hethub.predictor import predict
from hethub.spec.layout.bind import bind
from tests.oracle.annealing import Sort, Stage, State, Walk, dealt
from tests.oracle.grid import exhaustive
from tests.oracle.question import random_question


def test_parts_by_weight_make_up_the_total() -> None:
    assert dealt(8, [1.0, 1.0], 1) == [4, 4]
    assert dealt(10, [3.0, 1.0], 2) == [8, 2]
    assert dealt(7, [100.0, 1.0], 1) == [6, 1]
    assert dealt(7, [2.0, 1.0], 2) == [4, 3]


def test_what_is_found_is_a_plan_that_fits_and_not_behind_a_grid_that_its_moves_reach() -> None:
    question = random_question(0, 3)
    walk = Walk(question)
    walk.anneal(walk.simple(pipeline=True), random.Random(0), 1500)
    assert walk.plan is not None
    found = predict(bind(walk.plan, question.model, question.cluster), reserve=question.reserve)
    assert found.fits
    assert found.step_seconds == walk.seconds
    assert walk.seconds <= exhaustive(question).seconds


def test_auto_finds_what_annealing_found_where_one_of_two_accelerators_is_nearly_full() -> None:
    """Zero bubble with all microbatches in flight on the first stage, and what the second one keeps in host memory."""
    question = random_question(100, 2, global_batch=8)
    found = plan(question.model, question.cluster, (8, question.seq_len, "bf16"), with_bounds=False)
    walk = Walk(question)
    assert walk.cost(walk.near(found.plan)) == found.prediction.step_seconds
    first = Stage(2, frozenset({0}), {walk.sort(0): Sort(micro_batch=2)}, recompute="none", in_flight=4)
    second = Stage(4, frozenset({1}), {walk.sort(1): Sort(micro_batch=2)}, 1, "none", ("activations",), in_flight=1)
    known = walk.cost(State((first, second), "zero_bubble"))
    assert (found.best_on_point or found.prediction).step_seconds <= known * (1 + 1e-9)
