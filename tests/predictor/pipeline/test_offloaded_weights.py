"""What offloaded weights cost behind the update."""

from dataclasses import replace

import pytest

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.spec.layout.bind import Layout
from tests.predictor.plans import LLAMA_8B, TINY, cluster, uniform


@pytest.mark.parametrize(
    ("replicas", "zero", "sends"), [(1, 1, False), (2, 0, False), (2, 1, True), (2, 2, True), (2, 3, False)]
)
def test_new_weights_pass_the_accelerator_only_where_others_stepped_them(replicas: int, zero: int, sends: bool) -> None:
    on = cluster(("A100-SXM4-80GB", 1, replicas))
    plan = uniform(TINY, on, tp=1, pp=1, micro_batch=1, batch=8, seq=64, precision="fp32", zero=zero).plan

    def gather_seconds(*offload: str) -> float:
        own = plan.replace(stages=tuple(stage.replace(offload=offload) for stage in plan.stages))
        return PlanCosts(Layout(own, TINY, on), HETHUB, packaged()).state.reduction(0).gather_seconds

    assert (gather_seconds("parameters") > gather_seconds()) == sends


@pytest.mark.parametrize(("zero", "shares", "part"), [(1, {}, 1.0), (3, {}, 1 / 4), (3, {2: 0.7}, 0.7)])
def test_a_rank_fetches_what_its_host_has(zero: int, shares: dict[int, float], part: float) -> None:
    """All of a layer's weights; under ZeRO-3 its own part, which is gathered then: uneven shares were priced as even ones.
    Under `layered` once for all microbatches:
    beside a pass they only slow it."""
    on, model, samples = cluster(("A100-SXM4-80GB", 1, 4)), LLAMA_8B.replace(layers=4), 64
    plan = uniform(
        model, on, tp=1, pp=1, micro_batch=1, batch=4 * samples, seq=4096, zero=zero, state_shares=shares
    ).plan
    offloaded = plan.replace(stages=tuple(stage.replace(offload=("parameters",)) for stage in plan.stages))
    there, away = (
        PlanCosts(Layout(own.replace(schedule="layered"), model, on), HETHUB, packaged()) for own in (plan, offloaded)
    )
    layer = there.state.portions[0][1]
    gathered, brought = (sum(costs.state.gather_seconds(0, layer)) for costs in (there, away))
    copied = 2 * model.layer_parameters * part * there.state.host_copies.seconds_per_byte(on.places[0])
    assert brought - gathered == pytest.approx(copied)
    slowed = packaged().links["overlap_cost"] * brought / samples
    assert away.microbatch(0, 0, 1, layer).forward.dp == pytest.approx(slowed)


def test_new_weights_of_others_are_fetched_and_stored() -> None:
    """A rank's own come from its host before they are sent, and all of them go there, one after the other
    (hethub/runtime/state/zero_weights.py), beside a gather that no forward hides."""
    on, model = cluster(("A100-SXM4-80GB", 1, 2)), LLAMA_8B.replace(layers=4)
    plan = uniform(model, on, tp=1, pp=1, micro_batch=1, batch=8, seq=2048, zero=1).plan
    offloaded = plan.replace(stages=tuple(stage.replace(offload=("parameters",)) for stage in plan.stages))
    shown = replace(HETHUB, overlapped_gather=False)
    there = PlanCosts(Layout(plan, model, on), shown, packaged()).state
    away = PlanCosts(Layout(offloaded, model, on), HETHUB, packaged()).state
    copied = 2 * 2 * model.parameters * there.host_copies.seconds_per_byte(on.places[0])
    alone = there.rings.seconds(0, 2 * model.layer_parameters)
    latencies = 3 * (2 * alone - there.rings.seconds(0, 4 * model.layer_parameters))  # they come layer by layer
    assert 0 < latencies < 0.01 * copied
    expected = pytest.approx(copied + latencies, rel=1e-4)
    assert away.reduction(0).gather_seconds - there.reduction(0).gather_seconds == expected


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 1)])
def test_gradients_of_offloaded_weights_are_summed_layer_by_layer(zero: int, times: int) -> None:
    """As a run's buckets are where units come and go (hethub/spec/layout/state.py): of few parameters all were priced as one
    bucket behind the backward."""
    on = cluster(("A100-SXM4-80GB", 2, 1), gbps=1).replace(emulated=True)  # nothing is slowed
    plan = uniform(TINY, on, tp=1, pp=1, micro_batch=1, batch=8, seq=64, precision="fp32", zero=zero).plan
    offloaded = plan.replace(stages=tuple(stage.replace(offload=("parameters",)) for stage in plan.stages))
    state = PlanCosts(Layout(offloaded, TINY, on), HETHUB, packaged()).state
    (whole,), found = state.whole, state.reduction(0)
    norms, layers = state.norms_seconds(0, whole), state.reduce_seconds(0, whole)
    assert found.seconds == pytest.approx(times * (sum(layers) + norms))
    assert found.tail_seconds == pytest.approx(times * (layers[0] + norms))
