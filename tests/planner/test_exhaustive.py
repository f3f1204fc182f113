"""`auto` against the whole grid of small random clusters. benchmarks/planner.py runs more of them."""

import random

import pytest

from hethub.planner.capabilities import RUNTIME
from hethub.planner.planning import answer
from hethub.planner.problem import Batch, pose
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec
from hethub.spec.model import ModelSpec
from tests.planner.exhaustive import exhaustive

MODEL = ModelSpec(name="grid", layers=6, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=8192, max_seq_len=1024)
VENDORS = ("nvidia", "amd")


def random_cluster(seed: int, size: int) -> ClusterSpec:
    """`size` accelerators of unlike speed, memory and vendor; some share a machine."""
    draw = random.Random(seed)
    nodes, left = [], size
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


def compare(seed: int, size: int, global_batch: int, model: ModelSpec = MODEL) -> tuple[float, float, int, int]:
    """Auto's step restricted to the grid, the grid's optimum, its points and how many were predicted."""
    capabilities = RUNTIME.limited(chooses_in_flight=False)
    problem = pose(
        model,
        random_cluster(seed, size),
        Batch(global_batch, 512, "bf16"),
        ConstraintsSpec(max_micro_batch=4),
        capabilities,
    )
    found = answer(problem)
    outcome = exhaustive(problem, start=found.seconds)
    return found.seconds, outcome.seconds, outcome.points, outcome.predicted


@pytest.mark.parametrize("seed", range(20))
def test_auto_is_within_a_hundredth_of_the_grids_optimum(seed):
    auto, best, _, _ = compare(seed, 3, 4, MODEL.replace(layers=4))
    assert auto <= 1.01 * best
