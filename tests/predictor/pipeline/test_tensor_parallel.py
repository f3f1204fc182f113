"""All-reduces of a replica's ranks, counted as the runtime's layers, embedding and head make them."""

import pytest

from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from tests.predictor.plans import LLAMA_8B, cluster, uniform

ON = cluster(("H100-SXM5-80GB", 1, 4))


def test_embedding_and_head_sum_once_a_microbatch_in_its_forward() -> None:
    """Both were priced once more in the backward: the embedding's gradient is summed by nobody, the head's with the loss
    (hethub/runtime/model/tensor_parallel.py, loss.py)."""
    costs = PlanCosts(uniform(LLAMA_8B, ON, tp=4, pp=1, micro_batch=1, batch=4, seq=4096), HETHUB, packaged())
    network = costs.network
    once = network.all_reduce(network.group(range(4)), 4096 * LLAMA_8B.hidden * 2)
    found = costs.microbatch(0, 0, 1)
    assert found.forward.tp == pytest.approx((2 * 32 + 2) * once)
    assert found.backward.tp == pytest.approx(2 * 32 * once)


def test_the_search_counts_them_alike() -> None:
    rate = UnitCosts(pose(LLAMA_8B, ON, Batch(4, 4096, "bf16"))).rate(0, 4, 1, "none")
    costs = PlanCosts(uniform(LLAMA_8B, ON, tp=4, pp=1, micro_batch=1, batch=4, seq=4096), HETHUB, packaged())
    found, estimated = costs.microbatch(0, 0, 1), rate.microbatch(32, True, True)
    assert estimated.forward == pytest.approx(found.forward.total)
    assert estimated.backward == pytest.approx(found.backward.total)
