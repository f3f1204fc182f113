"""Collectives over a stage's replicas are priced by where these are, not by the order in which a plan names them."""

from typing import Any

import pytest

from hethub.predictor import predict
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.state_costs import Portion, StateCosts
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.plan import PlanSpec
from tests.predictor.plans import LLAMA_8B, cluster, uniform


def one_stage(on: ClusterSpec, *replicas: list[int], **stage: Any) -> Layout:
    given = [{"ranks": ranks, "micro_batch": 1, "samples": 8} for ranks in replicas]
    plan = {
        "model": LLAMA_8B.name, "cluster": on.name, "global_batch": 8 * len(replicas), "seq_len": 2048, "precision": "bf16",
        "stages": [{"layers": [[0, LLAMA_8B.layers]], "replicas": given, "zero": 1, **stage}],
    }  # fmt: skip
    return bind(PlanSpec.model_validate(plan), LLAMA_8B, on)


@pytest.mark.parametrize("smaller", [2, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_order_of_equal_replicas_changes_nothing(smaller: int, tp: int) -> None:
    """Machines of 8 and of fewer accelerators: those of the first replica told how many groups share a card."""
    on = cluster(("A100-SXM4-80GB", 1, 8), ("A100-SXM4-80GB", 2, smaller), gbps=25.0)
    replicas = [list(range(first, first + tp)) for first in range(0, on.size, tp)]
    one, other = (predict(one_stage(on, *own)) for own in (replicas, replicas[::-1]))
    assert other.step_seconds == pytest.approx(one.step_seconds, rel=1e-6)


def test_state_shares_of_all_ranks_tell_what_each_position_exchanges() -> None:
    """They were taken for fractions of what the ranks at one position step, of which there are two here."""
    on = cluster(("A100-SXM4-80GB", 1, 2), ("MI250X-GCD", 1, 4))
    layout = one_stage(on, [0, 1], [2, 3], [4, 5], state_shares={0: 0.05, 1: 0.05})
    costs = StateCosts(layout, HETHUB, Network(on), lambda stage, portion: (1.0, 2.0))
    for position in (0, 1):
        assert costs.replica_group(0, position).owned == pytest.approx((0.1, 0.9))


def test_both_ends_of_a_tied_head_send_its_new_weights() -> None:
    """In bf16, of each of the ranks that step a part: half the bytes that summing its gradients took."""
    on, model = cluster(("A100-SXM4-80GB", 2, 1)), LLAMA_8B.replace(tied_head=True)
    layout = uniform(model, on, tp=1, pp=2, micro_batch=1, batch=2, seq=1024)
    network, table = Network(on), model.vocab * model.hidden
    costs = StateCosts(layout, HETHUB, network, lambda stage, portion: (1.0, 2.0))
    for stage in (0, 1):
        found = costs.reduction(stage)
        assert found.tail_seconds == found.seconds  # it waits for the last backward of the first stage
        assert found.seconds == pytest.approx(network.reduce_scatter(network.group([0, 1]), 4 * table), rel=0.01)
        assert found.gather_seconds == pytest.approx(network.reduce_scatter(network.group([0, 1]), 2 * table), rel=0.01)


def test_uneven_shares_cost_what_cephalo_found() -> None:
    """A quarter for one of two ranks leaves half of the buckets even; the others take 1.25 times as long."""
    layout = one_stage(cluster(("A100-SXM4-80GB", 2, 1)), [0], [1], zero=2, state_shares={0: 0.25})
    costs = StateCosts(layout, HETHUB, Network(layout.cluster), lambda stage, portion: (1.0, 2.0))
    layer = Portion(1, False, False)
    even = costs.ring_seconds(0, 4 * LLAMA_8B.layer_parameters)
    assert costs.reduce_seconds(0, layer) == pytest.approx([1.125 * even])
