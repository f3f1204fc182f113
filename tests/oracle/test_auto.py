"""`auto` against the whole grid of small random clusters. benchmarks/planner.py runs more of them."""

import random
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from hethub.planner.problem.capabilities import RUNTIME
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from tests.oracle.grid import (
    Outcome,
    Point,
    bound_seconds,
    cuts,
    exhaustive,
    groupings,
    ordered_partitions,
    timed_points,
)
from tests.oracle.paths import path_seconds
from tests.oracle.restricted import restricted
from tests.oracle.stage_grid import StageGrids, plan_of

MODEL = ModelSpec(name="grid", layers=6, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=8192, max_seq_len=1024)
VENDORS = ("nvidia", "amd")


def random_cluster(seed: int, size: int) -> ClusterSpec:
    """`size` accelerators of unlike speed, memory and vendor; some share a machine."""
    draw = random.Random(seed)
    nodes: list[dict[str, object]] = []
    left = size
    while left:
        count = min(left, draw.choice((1, 1, 2)))
        left -= count
        tflops = draw.choice((8, 15, 30, 60, 120)) * draw.uniform(0.8, 1.2)
        nodes.append(
            {
                "name": f"n{len(nodes)}",
                "accelerators": count,
                "nics": 1,
                "gbps_per_nic": draw.choice((25, 100, 400)),
                "accelerator": {
                    "name": f"a{len(nodes)}",
                    "vendor": draw.choice(VENDORS),
                    "memory_gb": draw.choice((8, 16, 40)),
                    "memory_gbytes_per_second": 12 * tflops,
                    "fp32_tflops": tflops / 2,
                    "fp16_tflops": tflops,
                    "bf16_tflops": tflops,
                    "link_gbytes_per_second": draw.choice((16, 64, 200)),
                },
            }
        )
    return ClusterSpec.model_validate({"name": f"random {seed}", "nodes": nodes})


class Comparison(NamedTuple):
    """`auto`, restricted to the grid, beside the grid's optimum."""

    auto_seconds: float
    outcome: Outcome

    @property
    def slower(self) -> float:
        """Auto's step over the optimum's."""
        return self.auto_seconds / self.outcome.seconds


def grid_problem(seed: int, size: int, global_batch: int = 6, model: ModelSpec = MODEL) -> Problem:
    """A random cluster's question, its answers with the default number of microbatches in flight as the grid has
    them."""
    given = ConstraintsSpec(max_micro_batch=4)
    batch = Batch(global_batch, 512, "bf16")
    able = replace(RUNTIME.limited(chooses_in_flight=False, any_micro_batch=False), schedules=("1f1b",))
    return pose(model, random_cluster(seed, size), batch, given, able)


def compare(seed: int, size: int, global_batch: int = 6, model: ModelSpec = MODEL) -> Comparison:
    """Auto against the whole grid of a random cluster."""
    problem = grid_problem(seed, size, global_batch, model)
    auto = restricted(problem).seconds
    return Comparison(auto, exhaustive(problem, start=auto))


compared = cache(compare)
FEW = range(20)  # clusters of three accelerators; benchmarks/planner.py compares 200
LARGER = [pytest.param(seed, 4, marks=pytest.mark.slow) for seed in range(4)]


@pytest.mark.parametrize(("seed", "size"), [*((seed, 3) for seed in FEW), *LARGER])
def test_auto_is_within_a_hundredth_of_the_grids_optimum(seed: int, size: int) -> None:
    found = compared(seed, size)
    assert found.slower <= 1.01
    assert found.outcome.lower_bound == found.outcome.seconds  # nothing was left out unproved


def test_auto_equals_the_grids_optimum_in_nearly_all_clusters() -> None:
    equal = [compared(seed, 3).slower <= 1 + 1e-9 for seed in FEW]
    assert sum(equal) >= 0.95 * len(equal)


def test_without_a_start_the_grid_has_the_same_optimum() -> None:
    problem = grid_problem(7, 2)
    whole = exhaustive(problem)
    assert whole.plan is not None
    assert whole.predicted >= 1
    assert exhaustive(problem, start=1.2 * whole.seconds).seconds == whole.seconds


@pytest.mark.parametrize("seed", range(4))
def test_no_prediction_is_below_its_bound_and_most_are_on_it(seed: int) -> None:
    problem = grid_problem(seed, 4)
    draw, grids, exact = random.Random(seed), StageGrids(problem), 0
    shapes = [shape for units in groupings(problem) for shape in ordered_partitions(tuple(units))]
    for _ in range(20):
        shape = draw.choice(shapes)
        layers = draw.choice(list(cuts(problem.model.layers, len(shape))))
        stages = [grids(shape, layers, stage) for stage in range(len(shape))]
        picked = [stage.only(np.array([draw.randrange(len(stage))])) for stage in stages]
        point = Point(shape, layers, tuple(stage.option(0) for stage in picked))
        ((timed, _),) = timed_points(problem, grids, [point])
        rough = bound_seconds(
            [stage.seconds for stage in picked],
            [grids.nearest(shape, layers, stage) for stage in range(len(shape) - 1)],
        )
        seconds = predict(bind(plan_of(problem, *point), problem.model, problem.cluster)).step_seconds
        between = [grids.between(shape, layers, stage) for stage in range(len(shape) - 1)]
        followed = path_seconds([stage.paths for stage in picked], between)
        assert float(rough.item()) <= seconds * (1 + 1e-9)
        assert float(followed.item()) <= timed * (1 + 1e-9)
        assert timed <= seconds * (1 + 1e-9)
        exact += timed == pytest.approx(seconds, rel=1e-9)
    assert exact >= 15
