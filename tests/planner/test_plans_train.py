"""What the planner returns trains: on random small clusters five steps equal one process in float64."""

import random
from typing import Any

import pytest

from hethub.planner import Batch, plan
from hethub.planner.result import plan_dict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec
from tests.support.layouts import MODEL, Case, check_against_one_process

GLOBAL_BATCH, SEQ_LEN = 8, 16
LETTERS = {"vendor-n": "n", "vendor-a": "a"}

# Strategy, what is asked of it, the random cluster, and the schedule of the answer where its system has one of its own:
# between them every schedule and every way to divide that the planner may answer with.
QUESTIONS = [
    ("auto", {}, 0, None),
    ("auto", {"pp": 2}, 1, None),
    ("auto", {"dp": 2}, 2, None),
    ("auto", {"tp": 2}, 3, None),
    ("auto", {"pp": 2, "schedule": "zero_bubble"}, 4, "zero_bubble"),
    ("auto", {"pp": 4, "micro_batch": 1}, 5, None),
    ("auto", {"recompute": "full", "pp": 2}, 6, None),
    ("auto", {"max_micro_batch": 3}, 14, None),  # microbatches of 1, 2 and 3 samples on two stages
    (
        "auto",
        {"pp": 2, "max_micro_batch": 3},
        18,
        None,
    ),  # microbatches of 3 above microbatches of 3 and 2 on unlike replicas
    ("hethub", {}, 7, None),
    ("poplar", {}, 8, None),
    ("poplar", {"zero": 2}, 9, None),
    ("poplar", {"zero": 3}, 10, None),
    ("cephalo", {}, 11, "layered"),
    ("zorse", {}, 11, None),
    ("zorse", {"zero": 2}, 4, "ministages"),
    ("uniform", {"pp": 2}, 12, None),
]


def random_cluster(seed: int) -> ClusterSpec:
    """4 to 8 ranks of unlike speed on machines of 2 and more, of one or two vendors."""
    draw = random.Random(seed)
    nodes = []
    for index in range(2):
        tflops = draw.choice((0.02, 0.05, 0.1))
        accelerator = {
            "name": f"cpu-{index}", "vendor": "cpu", "memory_gb": 16, "memory_gbytes_per_second": 200 * tflops,
            "fp32_tflops": tflops, "link_gbytes_per_second": draw.choice((0.5, 2, 8)),
        }  # fmt: skip
        vendor = draw.choice(("vendor-n", "vendor-a"))
        count = draw.choice((2, 2, 4))
        nodes.append(
            {"name": f"n{index}", "accelerator": accelerator, "accelerators": count, "vendor": vendor,
             "gbps_per_nic": draw.choice((1, 10))}
        )  # fmt: skip
    return ClusterSpec.model_validate({"name": f"random {seed}", "emulated": True, "nodes": nodes})


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: f"{question[0]} {question[1]}")
def test_the_answer_equals_one_process(question: tuple[str, dict[str, Any], int, str | None]) -> None:
    strategy, constraints, seed, schedule = question
    cluster = random_cluster(seed)
    train = Batch(GLOBAL_BATCH, SEQ_LEN, "fp32")
    found = plan(MODEL, cluster, train, ConstraintsSpec(**constraints), strategy, with_bounds=False).plan
    assert schedule in (None, found.schedule)
    vendors = "".join(LETTERS[place.island] for place in cluster.places)
    stages = plan_dict(found)["stages"]
    case = Case(name=f"{strategy} {seed}", stages=stages, vendors=vendors, schedule=found.schedule, unused=found.unused)
    check_against_one_process(case)
