"""What the planner returns trains: on random small clusters one step equals one process in float64."""

import random

import pytest

from hethub.planner import plan
from hethub.planner.result import plan_dict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from tests.support.layouts import MODEL, Case, check_against_one_process

GLOBAL_BATCH, SEQ_LEN = 8, 16
LETTERS = {"vendor-n": "n", "vendor-a": "a"}

# Strategy and what is asked of it: between them every schedule and every way to divide that the planner may answer with.
QUESTIONS = [
    ("auto", {}),
    ("auto", {"pp": 2}),
    ("auto", {"dp": 2}),
    ("auto", {"tp": 2}),
    ("auto", {"pp": 2, "schedule": "zero_bubble"}),
    ("auto", {"pp": 4, "micro_batch": 1}),
    ("auto", {"recompute": "full", "pp": 2}),
    ("hethub", {}),
    ("poplar", {}),
    ("poplar", {"zero": 3}),
    ("cephalo", {}),
    ("zorse", {}),
    ("uniform", {"pp": 2}),
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


@pytest.mark.parametrize("seed", range(len(QUESTIONS)))
def test_one_step_of_the_answer_equals_one_process(seed):
    strategy, constraints = QUESTIONS[seed]
    cluster = random_cluster(seed)
    train = (GLOBAL_BATCH, SEQ_LEN, "fp32")
    try:
        found = plan(MODEL, cluster, train, ConstraintsSpec(**constraints), strategy, with_bounds=False).plan
    except BadInput as refused:
        pytest.skip(f"the strategy has no such plan here: {refused}")
    vendors = "".join(LETTERS[place.island] for place in cluster.places)
    stages = plan_dict(found)["stages"]
    case = Case(name=f"{strategy} {seed}", stages=stages, vendors=vendors, schedule=found.schedule, steps=1)
    check_against_one_process(case)
