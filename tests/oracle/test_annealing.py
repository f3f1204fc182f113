"""Annealing by itself: what it finds is a plan, and it finds what a grid holds."""

import random

from hethub.predictor import predict
from hethub.spec.layout.bind import bind
from tests.oracle.annealing import Walk, dealt
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
