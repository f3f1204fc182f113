"""What is said where nothing fits."""

import pytest

from hethub.planner import plan
from hethub.planner.problem.problem import Batch
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from tests.predictor.plans import TINY


@pytest.mark.parametrize("card", [{}, {"gbps_per_nic": 100}], ids=["no card", "a card"])
def test_a_machine_alone_that_is_too_small_is_told_by_how_much(card: dict[str, float]) -> None:
    """More of such machines are a remedy only where it is known what would join them."""
    model = TINY.replace(name="wide", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
    node = {"name": "a", "accelerator": "RTX-4090", "accelerators": 2, **card}
    cluster = ClusterSpec.model_validate({"name": "alone", "nodes": [node]})
    with pytest.raises(BadInput, match=r"exceeds the memory .* of 2 RTX-4090 by up to [\d,]+ bytes"):
        plan(model, cluster, Batch(8, 64, "bf16"), with_bounds=False)


def test_more_of_nodes_with_host_names_are_a_remedy_too() -> None:
    """Three nodes have no two host names: a traceback took the place of the answer."""
    model = TINY.replace(name="wide", layers=20, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
    node = {
        "name": "a",
        "accelerator": "RTX-4090",
        "accelerators": 2,
        "count": 2,
        "hosts": ["a1", "a2"],
        "gbps_per_nic": 100,
    }
    cluster = ClusterSpec.model_validate({"name": "named", "nodes": [node]})
    with pytest.raises(BadInput, match=r"\d more of node 'a'"):
        plan(model, cluster, Batch(64, 64, "bf16"), with_bounds=False)


def test_host_memory_that_is_too_small_is_told_without_the_accelerators_reserve() -> None:
    model = TINY.replace(name="wide", layers=16, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
    node = {"name": "a", "accelerator": "MI300X", "accelerators": 8, "host_memory_gb": 1, "gbps_per_nic": 100}
    cluster = ClusterSpec.model_validate({"name": "few hosts", "nodes": [node]})
    with pytest.raises(
        BadInput, match=r"comes closest exceeds the hosts' memory, which holds [^%]* raise host_memory_gb"
    ):
        plan(model, cluster, Batch(8, 64, "bf16"), with_bounds=False)


def test_the_usual_reserve_is_named_where_it_helps() -> None:
    """It was 0.02, whatever was needed."""
    node = {"name": "a", "accelerator": "RTX-4090", "accelerators": 2}
    cluster = ClusterSpec.model_validate({"name": "alone", "nodes": [node]})
    with pytest.raises(BadInput, match=r"A plan fits with constraints\.reserve: 0\.06"):
        plan(TINY, cluster, Batch(8, 64, "bf16"), ConstraintsSpec(reserve=0.99), with_bounds=False)
