"""What needs no measurement: a constraint never makes the answer faster, and no cut is beyond its own modes."""

from functools import cache
from itertools import combinations, product

import pytest

from hethub.planner.generate.modes import Rung, propose, rungs
from hethub.planner.plan import answer
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec
from tests.planner.problems import incumbent_of, mixed

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
