"""What the planner returns trains: on random small clusters five steps equal one process in float64."""

import os
import random
from typing import Any

import pytest

from hethub.planner import Batch, plan
from hethub.planner.problem.scaled import Scale, scaled
from hethub.planner.result import PlanResult, plan_dict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.support.layouts import MODEL, Case, check_against_one_process

# More of them, and others: RANDOM_PLANS=40 RANDOM_SEED=7 pytest tests/planner/test_plans_train.py -m slow
COUNT, SEED = int(os.environ.get("RANDOM_PLANS", "2")), int(os.environ.get("RANDOM_SEED", "0"))
GLOBAL_BATCH, SEQ_LEN = 8, 16
SLOWED = (1, 10, 100)  # times: what the tiny model is for accelerators, from next to nothing to much work
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
    ("zorse", {"zero": 2, "schedule": "ministages"}, 4, "ministages"),
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


def tight(cluster: ClusterSpec, found: PlanResult, part: float) -> ClusterSpec:
    """The cluster with so much memory that of what a plan takes beside the process itself a part is left."""
    fullest = max(found.prediction.memory, key=lambda entry: entry.bytes / entry.limit)
    own = fullest.parts["framework"]
    return scaled(cluster, Scale(memory=(own + part * (fullest.bytes - own)) / fullest.limit))


def random_answer(seed: int, model: ModelSpec = MODEL, seq_len: int = SEQ_LEN) -> tuple[PlanResult, ClusterSpec, int]:
    """The answer to a random question over the whole space, and where its memory is drawn anew: from half of what the
    first answer takes beside the process itself up to more than that."""
    draw = random.Random(f"answer {seed}")
    slowed = Scale(compute=dict.fromkeys(("cpu-0", "cpu-1"), 1 / draw.choice(SLOWED)))
    cluster, batch = scaled(random_cluster(seed), slowed), Batch(draw.choice((6, 8, 12)), seq_len, "fp32")
    found = plan(model, cluster, batch, with_bounds=False)
    for part in sorted((draw.uniform(0.5, 1.3), 1.3)):
        less = tight(cluster, found, part)
        try:
            return plan(model, less, batch, with_bounds=False), less, batch.global_batch
        except BadInput:
            continue
    return found, cluster, batch.global_batch


def described(found: PlanSpec) -> str:
    """What a plan does, in a line."""
    modes = ["/".join((f"ZeRO {own.zero}", own.recompute, *own.offload)) for own in found.stages]
    replicas = ["+".join(f"{len(r.ranks)}x{r.samples}({r.micro_batch})" for r in own.replicas) for own in found.stages]
    parts = zip(map(str, (len(own.layers) for own in found.stages)), replicas, modes, strict=True)
    return f"{found.schedule}, unused {list(found.unused)}: " + "; ".join(" ".join(own) for own in parts)


def random_case(seed: int, model: ModelSpec = MODEL, seq_len: int = SEQ_LEN, **more: Any) -> Case:
    """Training under the answer to a random question."""
    answer, cluster, batch = random_answer(seed, model, seq_len)
    found, vendors = answer.plan, "".join(LETTERS[place.island] for place in cluster.places)
    return Case(
        name=described(found), stages=plan_dict(found)["stages"], vendors=vendors, schedule=found.schedule,
        unused=found.unused, global_batch=batch, model=model, seq_len=seq_len, **more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100 + SEED, 100 + SEED + COUNT))
def test_random_answers_equal_one_process(seed: int) -> None:
    case = random_case(seed)
    print(f"{seed}: {case.name}")
    check_against_one_process(case)
