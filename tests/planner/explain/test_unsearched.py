"""What an answer says it did not look at."""

from typing import get_args

import pytest

from hethub.planner import plan
from hethub.planner.explain.unsearched import not_searched
from hethub.planner.problem.problem import OFFLOADED, SEARCHED_SCHEDULES, ZEROS
from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import bind
from hethub.spec.plan import Offload, ScheduleName
from tests.planner.problems import TINY


@pytest.mark.parametrize("strategy", ["auto", "exhaustive"])
def test_every_entry_has_a_key_of_its_own_and_a_text(strategy: str) -> None:
    entries = not_searched(strategy)
    assert len({entry.key for entry in entries}) == len(entries)
    assert all(entry.text and " " not in entry.key for entry in entries)


def test_a_proof_excepts_what_its_space_has_not() -> None:
    """`exhaustive` said that no plan took less than 2.4 ms, but for a list by which plans without a device type were
    searched; one accelerator alone takes 2.0 ms, as `auto` finds."""
    model = TINY.replace(layers=4, hidden=256, heads=4, kv_heads=None, ffn=512, vocab=1000, max_seq_len=512)
    nodes = [
        {"name": name, "accelerator": name, "accelerators": 1, "gbps_per_nic": 100}
        for name in ("H100-SXM5-80GB", "MI300X")
    ]
    question = model, ClusterSpec.model_validate({"name": "two", "nodes": nodes}), (4, 128, "bf16"), None
    proved, found = (plan(*question, strategy, with_bounds=False) for strategy in ("exhaustive", "auto"))
    assert proved.space_bound_seconds is not None
    assert found.prediction.step_seconds < proved.space_bound_seconds
    assert found.plan.unused
    texts = {entry.key: entry.text for entry in proved.not_searched}
    assert texts["ranks.unused"] == "plans that leave accelerators unused"


def test_a_proof_excepts_groups_over_machines() -> None:
    """`exhaustive` said that no plan took less than 24 ms: a tensor-parallel group of both machines, which nobody looks at
    and no list had, takes 17 ms."""
    model = TINY.replace(layers=2, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=32000, max_seq_len=4096)
    node = {"name": "a", "count": 2, "accelerator": "RTX-4090", "accelerators": 1, "gbps_per_nic": 400}
    cluster = ClusterSpec.model_validate({"name": "two", "nodes": [node]})
    proved = plan(model, cluster, (1, 4096, "bf16"), None, "exhaustive", with_bounds=False)
    replica = {"ranks": [0, 1], "micro_batch": 1, "samples": 1}
    over_both = proved.plan.replace(schedule="1f1b", stages=({"layers": [[0, 2]], "replicas": [replica]},))
    assert proved.space_bound_seconds is not None
    assert predict(bind(over_both, model, cluster)).step_seconds < proved.space_bound_seconds
    for strategy in ("auto", "exhaustive"):
        assert "tp.machines" in {entry.key for entry in not_searched(strategy)}


def test_every_schedule_level_and_offload_is_searched() -> None:
    """What is not would have to be listed, and refused as a constraint."""
    assert {*SEARCHED_SCHEDULES} == {*get_args(ScheduleName)}
    assert {*ZEROS} == {0, 1, 2, 3}
    assert {*OFFLOADED} == {*get_args(Offload)}
