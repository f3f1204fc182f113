"""What is said where nothing fits."""

import pytest

from hethub.planner import plan
from hethub.planner.problem.problem import Batch
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from tests.predictor.plans import TINY


@pytest.mark.parametrize("card", [{}, {"gbps_per_nic": 100}], ids=["no card", "a card"])
def test_a_machine_alone_that_is_too_small_is_told_by_how_much(card: dict[str, float]) -> None:
    """More of such machines are a remedy only where it is known what would join them."""
    model = TINY.replace(name="wide", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
    node = {"name": "a", "accelerator": "RTX-4090", "accelerators": 2, **card}
    cluster = ClusterSpec.model_validate({"name": "alone", "nodes": [node]})
    with pytest.raises(BadInput, match=r"exceeds the memory .* of 2 RTX-4090 by up to [\d,]+ bytes"):
        plan(model, cluster, Batch(8, 64, "bf16"), with_bounds=False)
