"""Links between ranks, and what collectives over them cost beside compute."""

import pytest

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.links import through_host
from hethub.predictor.cost.software import HETHUB, Software
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.predict import predict
from hethub.spec.accelerator import find_accelerator
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import bind
from tests.predictor.plans import LLAMA_8B, TINY, cluster, uniform


@pytest.mark.parametrize(
    ("name", "gbytes_per_second", "hosted"),
    [("T4", 16, True), ("A100-SXM4-80GB", 300, False), ("V100-SXM2-16GB", 21.25, False), ("H100-PCIe-80GB", 64, True)],
)
def test_pcie_is_told_from_dedicated_links_by_its_generation(name: str, gbytes_per_second: float, hosted: bool) -> None:
    assert through_host(find_accelerator(name), gbytes_per_second) is hosted


def test_a_tied_head_on_other_ranks_is_summed_between_the_ends() -> None:
    tied = LLAMA_8B.replace(tied_head=True)
    on = cluster(("A100-SXM4-80GB", 2, 4), gbps=10)
    shape = {"tp": 4, "micro_batch": 1, "batch": 8, "seq": 1024}
    costs = [
        PlanCosts(uniform(model, on, pp=2, **shape), HETHUB, packaged())  # type: ignore[arg-type]
        for model in (tied, LLAMA_8B)
    ]
    assert costs[1].state.tied_seconds == 0.0
    # Four ranks of a node each send half of a quarter of the fp32 gradients to the rank that steps it, over 40 Gbit/s
    # at best.
    wire = 0.5 * tied.vocab * tied.hidden * 4 / (40e9 / 8)
    assert costs[0].state.tied_seconds > wire
    assert costs[0].state.reduction(0).tail_seconds == pytest.approx(costs[0].state.tied_seconds)
    assert PlanCosts(uniform(tied, on, pp=1, **shape), HETHUB, packaged()).state.tied_seconds == 0.0  # type: ignore[arg-type]


def test_spread_sends_use_every_interface() -> None:
    on = cluster(("A100-SXM4-80GB", 2, 8), gbps=25)
    layout = uniform(LLAMA_8B, on, tp=8, pp=2, micro_batch=4, batch=8, seq=4096)
    alone, spread = (
        PlanCosts(layout, Software(spread_boundaries=given), packaged()).boundary(0, 0, 0, 4) for given in (False, True)
    )
    assert spread < alone / 4


def test_gathers_beside_compute_cost_a_part_of_themselves() -> None:
    on = cluster(("A100-SXM4-80GB", 2, 8), gbps=25)
    layout = uniform(LLAMA_8B, on, tp=1, pp=1, micro_batch=1, batch=16, seq=8192, zero=3)
    costs = PlanCosts(layout, HETHUB, packaged())
    portion = costs.state.whole(0)
    forward, _ = costs.state.round_seconds(0, (1e9, 1e9), portion)
    assert forward == pytest.approx(packaged().links["overlap_cost"] * sum(costs.state.gather_seconds(0, portion)))


@pytest.mark.parametrize("emulated", [False, True])
def test_cpus_that_are_not_emulated_compute_and_communicate_by_turns(emulated: bool) -> None:
    """A gather before every pass through a layer, a sum behind its backward, and nothing of either beside compute."""
    on = cluster(("CPU-core", 1, 2)).replace(emulated=emulated)
    on = on.replace(links=on.links.replace(in_node=on.links.in_node.replace(gbytes_per_second=0.05)))
    layout = uniform(TINY, on, tp=1, pp=1, micro_batch=4, batch=32, seq=64, precision="fp32", zero=3, recompute="full")
    layout = bind(layout.plan.replace(schedule="layered"), TINY, on)
    costs = PlanCosts(layout, HETHUB, packaged())
    state, portions = costs.state, costs.state.portions[0]
    microbatches = [costs.microbatch(0, 0, 4, portion) for portion in portions]
    compute = 4 * sum(
        microbatch.forward.total + microbatch.backward.total for microbatch in microbatches
    ) + costs.optimizer(0, 0, None)
    gathers = 2 * sum(sum(state.gather_seconds(0, portion)) for portion in portions)
    sums = sum(sum(state.reduce_seconds(0, portion)) for portion in portions)
    step = predict(layout).step_seconds
    assert step < 0.999 * (compute + gathers + sums) if emulated else step == pytest.approx(compute + gathers + sums)


def test_absurd_rates_are_bad_input_not_infinite_seconds() -> None:
    """Below any bound of a file: what a scaled accelerator could come to."""
    slow = find_accelerator("T4").model_copy(update={"name": "slow", "memory_gbytes_per_second": 1e-320})
    layout = uniform(LLAMA_8B, cluster(("T4", 1, 8)), tp=1, pp=1, micro_batch=1, batch=8, seq=128, precision="fp16")
    node = layout.cluster.nodes[0].replace(accelerator=slow)
    layout = type(layout)(layout.plan, layout.model, layout.cluster.replace(nodes=(node,)))
    with pytest.raises(BadInput, match="absurdly small"):
        predict(layout)
