"""The oracle by itself: its bounds are bounds, its times are the predictor's, and nothing in it is the planner's."""

import ast
import random
from pathlib import Path

import numpy as np
import pytest

from hethub.predictor import predict
from hethub.spec.layout.bind import bind
from tests.oracle.grid import Point, bound_seconds, cuts, exhaustive, groupings, ordered_partitions, timed_points
from tests.oracle.paths import path_seconds
from tests.oracle.question import random_question
from tests.oracle.stage_grid import StageGrids, plan_of


def test_the_oracle_knows_nothing_of_the_planner() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith(("hethub.planner", "tests.planner")) for name in names), path


def test_without_a_start_the_grid_has_the_same_optimum() -> None:
    question = random_question(7, 2)
    whole = exhaustive(question)
    assert whole.plan is not None
    assert whole.predicted >= 1
    assert exhaustive(question, start=1.2 * whole.seconds).seconds == whole.seconds


@pytest.mark.parametrize("seed", range(4))
def test_no_prediction_is_below_its_bound_and_most_are_on_it(seed: int) -> None:
    question = random_question(seed, 4)
    draw, grids, exact = random.Random(seed), StageGrids(question), 0
    shapes = [shape for units in groupings(question) for shape in ordered_partitions(tuple(units))]
    for _ in range(20):
        shape = draw.choice(shapes)
        layers = draw.choice(list(cuts(question.model.layers, len(shape))))
        stages = [grids(shape, layers, stage) for stage in range(len(shape))]
        picked = [stage.only(np.array([draw.randrange(len(stage))])) for stage in stages]
        point = Point(shape, layers, tuple(stage.option(0) for stage in picked))
        ((timed, _),) = timed_points(question, grids, [point])
        rough = bound_seconds(
            [stage.seconds for stage in picked],
            [grids.nearest(shape, layers, stage) for stage in range(len(shape) - 1)],
        )
        seconds = predict(bind(plan_of(question, *point), question.model, question.cluster)).step_seconds
        between = [grids.between(shape, layers, stage) for stage in range(len(shape) - 1)]
        followed = path_seconds([stage.paths for stage in picked], between)
        assert float(rough.item()) <= seconds * (1 + 1e-9)
        assert float(followed.item()) <= timed * (1 + 1e-9)
        assert timed <= seconds * (1 + 1e-9)
        exact += timed == pytest.approx(seconds, rel=1e-9)
    assert exact >= 13  # flows that a full link paces, which its own times do not know, are above it
