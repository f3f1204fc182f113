"""What needs no measurement: a constraint that the answer keeps to changes nothing, none makes the answer faster, and no cut
is beyond its own modes."""

from functools import cache
from itertools import combinations, product

import pytest

from hethub.planner import plan
from hethub.planner.generate.modes import Rung, propose, rungs
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.planner.problems import answer, incumbent_of, mixed

LLAMA_70B = ModelSpec(
    name="70b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, max_seq_len=8192
)


def on_eight_h100(**constraints: object) -> Problem:
    """A model that fits on eight accelerators with its state in host memory alone."""
    node = {
        "name": "n",
        "accelerator": "H100-SXM5-80GB",
        "accelerators": 8,
        "nics": 8,
        "gbps_per_nic": 400,
        "host_memory_gb": 2048,
    }
    cluster = ClusterSpec.model_validate({"name": "eight", "nodes": [node]})
    return pose(LLAMA_70B, cluster, Batch(64, 8192, "bf16"), ConstraintsSpec.model_validate(constraints))


Question = tuple[ModelSpec, ClusterSpec, Batch]


def drawn(heads: int, layers: int, vocab: int, nodes: list[tuple[str, int, float, int, int]], batch: Batch) -> Question:
    """What a random question was: nodes of (vendor, accelerators, TFLOP/s, memory, Gbit/s)."""
    made = [
        {"name": f"n{number}", "accelerators": count, "gbps_per_nic": gbps, "accelerator": {
            "name": f"{vendor}-{tflops}", "vendor": vendor, "memory_gb": memory, "memory_gbytes_per_second": 12 * tflops,
            "fp32_tflops": tflops / 2, "fp16_tflops": tflops, "bf16_tflops": tflops, "link_gbytes_per_second": 200,
        }}
        for number, (vendor, count, tflops, memory, gbps) in enumerate(nodes)
    ]  # fmt: skip
    model = ModelSpec(
        name="drawn", layers=layers, hidden=2048, heads=16, kv_heads=heads, ffn=5632, vocab=vocab, max_seq_len=1024
    )
    return model, ClusterSpec.model_validate({"name": "drawn", "nodes": made}), batch


ALIKE = drawn(8, 8, 512, [("amd", 1, 13.5, 16, 400), ("amd", 3, 13.5, 16, 25)], Batch(2, 128, "bf16"))
UNLIKE = drawn(2, 4, 32000, [("amd", 3, 8.565, 8, 10), ("nvidia", 1, 53.195, 40, 100)], Batch(16, 128, "fp32"))


@pytest.mark.parametrize(("question", "key"), [(ALIKE, "micro_batch"), (UNLIKE, "schedule")])
def test_a_constraint_that_the_answer_keeps_to_does_not_lose_it(question: Question, key: str) -> None:
    """The search under it ended elsewhere: 12 and 1.4 % slower in the mean."""
    free = plan(*question, with_bounds=False)
    replicas = [replica for stage in free.plan.stages for replica in stage.replicas]
    value = free.plan.schedule if key == "schedule" else max(replica.micro_batch for replica in replicas)
    given = plan(*question, ConstraintsSpec.model_validate({key: value}), with_bounds=False)
    assert given.outlook.objective_seconds == pytest.approx(free.outlook.objective_seconds, rel=1e-3)


@cache
def free_seconds() -> float:
    """The step where nothing is asked for."""
    return answer(on_eight_h100()).seconds


def by_hand(micro_batch: int, recompute: str, offload: tuple[str, ...], schedule: str) -> PlanSpec:
    """What someone draws in five minutes: ZeRO-3 over eight replicas."""
    replicas = [{"ranks": [rank], "micro_batch": micro_batch, "samples": 8} for rank in range(8)]
    stage = {"layers": [[0, 80]], "replicas": replicas, "zero": 3, "recompute": recompute, "offload": offload}
    return PlanSpec.model_validate(
        {
            "model": "70b", "cluster": "eight", "global_batch": 64, "seq_len": 8192, "precision": "bf16",
            "schedule": schedule, "stages": [stage],
        }
    )  # fmt: skip


@pytest.mark.slow
def test_no_plan_drawn_by_hand_is_much_faster_where_a_model_hardly_fits() -> None:
    problem = on_eight_h100()
    parts = ("activations", "optimizer", "parameters")
    moved = [chosen for number in range(4) for chosen in combinations(parts, number)]
    drawn = [by_hand(*one) for one in product((1, 2, 4, 8), ("none", "full"), moved, ("1f1b", "layered"))]
    found = [predict(bind(one, problem.model, problem.cluster)) for one in drawn]
    fitting = [prediction.step_seconds for prediction in found if prediction.fits]
    assert fitting
    assert free_seconds() <= 1.01 * min(fitting)  # where a mode fits, one that offloads more is not looked at


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"zero": 3}, {"dp": 8}, {"recompute": "full"}, {"pp": 2}, {"tp": 2}])
def test_no_constraint_makes_a_model_that_hardly_fits_faster(given: dict[str, object]) -> None:
    try:
        constrained = answer(on_eight_h100(**given)).seconds
    except BadInput:  # no plan fits, which is no faster
        return
    assert constrained >= 0.995 * free_seconds()  # descents end in different places


def test_state_is_moved_no_further_than_it_must_be() -> None:
    """On accelerators with room for all nothing is sharded beyond the usual level, and nothing offloaded."""
    problem = mixed(schedule="1f1b")
    costs = incumbent_of(problem).costs
    cut = answer(problem).candidate
    found = list(propose(problem, costs, [cut]))
    assert found
    plain = [stage for own in found for stage in own.stages if stage.recompute == "none"]
    assert all(stage.zero <= 1 and not stage.offload for stage in plain)


def test_a_rung_is_beyond_those_that_move_less_of_everything() -> None:
    assert Rung(3, ("optimizer",)).is_beyond(Rung(1, ()))
    assert not Rung(1, ("optimizer",)).is_beyond(Rung(3, ()))
    assert not Rung(1, ()).is_beyond(Rung(1, ()))
    every = rungs(mixed())
    assert every[0] == Rung(1, ())
    assert all(every[-1] == rung or every[-1].is_beyond(rung) for rung in every)


@pytest.mark.parametrize("batch", [16, 48])
def test_the_order_of_nodes_in_the_file_changes_nothing(batch: int) -> None:
    """Like accelerators behind unlike interfaces follow each other along the pipeline; which comes first was the file's."""
    nodes = [
        {"name": "slow", "accelerator": "A100-SXM4-40GB", "accelerators": 1, "nics": 1, "gbps_per_nic": 10},
        {"name": "other", "accelerator": "L40S", "accelerators": 2, "nics": 1, "gbps_per_nic": 25},
        {"name": "fast", "accelerator": "A100-SXM4-40GB", "accelerators": 2, "nics": 2, "gbps_per_nic": 200},
    ]
    model = LLAMA_70B.replace(name="1b", layers=16, hidden=2048, heads=32, ffn=5632, vocab=32000)
    orders = [ClusterSpec.model_validate({"name": "nodes", "nodes": some}) for some in (nodes, nodes[::-1])]
    problems = [pose(model, cluster, Batch(batch, 2048, "bf16")) for cluster in orders]
    names = [
        [cluster.places[own.ranks[0]].node.name for own in problem.device_types]
        for problem, cluster in zip(problems, orders, strict=True)
    ]
    assert names[0] == names[1] == ["fast", "other", "slow"]
    assert answer(problems[0]).seconds == pytest.approx(answer(problems[1]).seconds, rel=1e-3)


def test_what_other_modes_are_looked_at_takes_no_place_from_plain_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of modes are off by something else, and their leaders had crowded out the plan that is best here."""
    nodes = [
        {
            "name": "h100",
            "accelerator": "H100-SXM5-80GB",
            "count": 8,
            "accelerators": 8,
            "nics": 8,
            "gbps_per_nic": 400,
        },
        {"name": "mi300x", "accelerator": "MI300X", "count": 8, "accelerators": 8, "nics": 8, "gbps_per_nic": 400},
    ]
    cluster = ClusterSpec.model_validate({"name": "two racks", "nodes": nodes})
    model = LLAMA_70B.replace(name="8b", layers=32, hidden=4096, heads=32, ffn=14336)
    problem = pose(model, cluster, Batch(512, 8192, "bf16"))
    found = answer(problem).seconds
    monkeypatch.setattr("hethub.planner.search.auto.in_modes", lambda *question, **more: [])
    assert found <= answer(problem).seconds * (1 + 1e-9)
