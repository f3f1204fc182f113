"""All-reduces of a replica's ranks, counted as the runtime's layers, embedding and head make them."""

import pytest

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB, Software
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.spec.layout.bind import Layout
from tests.predictor.plans import LLAMA_8B, TINY, cluster, uniform

ON = cluster(("H100-SXM5-80GB", 1, 4))


def costs_of(schedule: str = "1f1b", emulated: bool = False) -> PlanCosts:
    on = ON.replace(emulated=emulated)
    layout = uniform(LLAMA_8B, on, tp=4, pp=1, micro_batch=1, batch=4, seq=4096)
    return PlanCosts(Layout(layout.plan.replace(schedule=schedule), LLAMA_8B, on), HETHUB, packaged())


def once(costs: PlanCosts) -> float:
    network = costs.network
    return network.all_reduce(network.group(range(4)), 4096 * LLAMA_8B.hidden * 2)


def loss_sums(costs: PlanCosts) -> float:
    """Largest logits, then two sums, of 1,024 tokens at a time: both were free, and a rehearsal of small microbatches took
    10 % longer."""
    network = costs.network
    return 4 * sum(network.all_reduce(network.group(range(4)), 4 * 1024 * each) for each in (1, 2))


def test_embedding_and_head_sum_once_a_microbatch_in_its_forward() -> None:
    """Both were priced once more in the backward: the embedding's gradient is summed by nobody, the head's with the loss
    (hethub/runtime/model/tensor_parallel.py, loss.py)."""
    costs = costs_of("zero_bubble")
    found = costs.microbatch(0, 0, 1)
    assert found.forward.tp == pytest.approx((2 * 32 + 2) * once(costs) + loss_sums(costs))
    assert found.backward.tp == pytest.approx(2 * 32 * once(costs))


def test_sums_of_a_backward_run_beside_its_weights_gradients() -> None:
    """Both were priced as if compute waited for them; the runtime waits behind the weights' products."""
    costs = costs_of()
    sums, cost = once(costs), costs.network.fit["overlap_cost"]
    layer = costs.layer_cost(0)
    found = costs.microbatch(0, 0, 1).backward.tp
    assert 32 * 2 * cost * sums < found < 0.6 * 32 * 2 * sums  # hidden by one product, and most of it by the other
    fast = layer.sums_beside_weights(1, 4, 0.25, 1e-5, cost)
    assert fast == pytest.approx(2 * cost * 1e-5)
    slow = layer.sums_beside_weights(1, 4, 0.25, 1.0, cost)
    assert 2.0 - 2 * layer.layer(1, 4).backward < slow < 2.0  # far longer than what is beside it


def test_a_faster_rank_that_waits_for_the_others_slows_no_sum() -> None:
    """Once a sum was shown for as long as on the rank that had least beside it, which waits for the slowest anyway."""
    on = cluster(("A100-SXM4-80GB", 1, 1), ("A100-SXM4-80GB", 1, 1))
    slow, other = on.nodes
    steps = []
    for factor in (1.0, 3.0, 20.0):
        device = slow.device
        faster = device.replace(
            name="faster", bf16_tflops=factor * device.bf16_tflops,
            memory_gbytes_per_second=factor * device.memory_gbytes_per_second,
        )  # fmt: skip
        both = on.replace(nodes=(slow, other.replace(accelerator=faster)))
        layout = uniform(LLAMA_8B, both, tp=2, pp=1, micro_batch=1, batch=4, seq=4096)
        steps.append(PlanCosts(layout, HETHUB, packaged()).microbatch(0, 0, 1).backward.total)
    assert steps[0] >= steps[1] >= steps[2]


def test_rehearsals_and_other_programs_sum_behind() -> None:
    rehearsed = costs_of(emulated=True)
    assert rehearsed.microbatch(0, 0, 1).backward.tp == pytest.approx(2 * 32 * once(rehearsed))
    layout = uniform(LLAMA_8B, ON, tp=4, pp=1, micro_batch=1, batch=4, seq=4096)
    theirs = PlanCosts(layout, Software(sums_beside_weights=False), packaged())
    assert theirs.microbatch(0, 0, 1).backward.tp == pytest.approx(2 * 32 * once(theirs))


def test_cpus_sum_behind() -> None:
    """With the cores that would compute beside it."""
    on = cluster(("CPU-core", 1, 2))
    layout = uniform(TINY, on, tp=2, pp=1, micro_batch=1, batch=2, seq=64, precision="fp32")
    costs = PlanCosts(layout, HETHUB, packaged())
    each = costs.network.all_reduce(costs.network.group(range(2)), 64 * TINY.hidden * 4)
    assert costs.microbatch(0, 0, 1).backward.tp == pytest.approx(TINY.layers * 2 * each)


def test_replicas_on_a_bridge_and_beside_it_are_priced_apart() -> None:
    """Of one machine and device, the first on a pair's bridge, the second over PCIe."""
    on = cluster(("H100-NVL-94GB", 1, 6))
    layout = uniform(LLAMA_8B, cluster(("H100-NVL-94GB", 1, 4)), tp=2, pp=1, micro_batch=1, batch=2, seq=4096)
    (stage,) = layout.plan.stages
    replicas = [r.replace(ranks=ranks) for r, ranks in zip(stage.replicas, ((0, 1), (3, 4)), strict=True)]
    plan = layout.plan.replace(stages=(stage.replace(replicas=tuple(replicas)),), unused=(2, 5))
    costs = PlanCosts(Layout(plan, LLAMA_8B, on), HETHUB, packaged())
    bridged, hosted = (costs.microbatch(0, replica, 1).forward.tp for replica in range(2))
    assert hosted > 3 * bridged


def test_a_forward_that_runs_again_sums_again() -> None:
    """Both of a layer's sums; attention alone has none."""
    layout = uniform(LLAMA_8B, ON.replace(emulated=True), tp=4, pp=1, micro_batch=1, batch=4, seq=4096)
    for recompute, times in (("none", 1), ("selective", 1), ("full", 2)):
        stages = tuple(stage.replace(recompute=recompute) for stage in layout.plan.stages)
        own = Layout(layout.plan.replace(stages=stages), LLAMA_8B, layout.cluster)
        costs = PlanCosts(own, HETHUB, packaged())
        assert costs.microbatch(0, 0, 1).backward.tp == pytest.approx(times * 2 * 32 * once(costs))


def test_the_search_counts_them_alike() -> None:
    rate = UnitCosts(pose(LLAMA_8B, ON, Batch(4, 4096, "bf16"))).rate(0, 4, 1, "none")
    found, estimated = costs_of().microbatch(0, 0, 1), rate.microbatch(32, True, True)
    assert estimated.forward == pytest.approx(found.forward.total)
    assert estimated.backward == pytest.approx(found.backward.total)


def test_sums_over_machines_take_what_their_own_cards_carry() -> None:
    """Replicas over two machines with unlike cards were priced as the first of them."""
    on = cluster(("L4", 2, 1), ("L4", 2, 1))
    slow, fast = on.nodes
    on = on.replace(nodes=(slow.replace(gbps_per_nic=1.0), fast.replace(gbps_per_nic=400.0)))
    layout = uniform(LLAMA_8B, on, tp=2, pp=1, micro_batch=1, batch=2, seq=4096)
    costs = PlanCosts(layout, HETHUB, packaged())
    over_slow, over_fast = (costs.microbatch(0, replica, 1).forward.tp for replica in range(2))
    assert over_slow > 50 * over_fast


@pytest.mark.parametrize("wide", [0, 1])
def test_a_boundary_tells_the_replica_above_gradients(wide: int) -> None:
    """As it tells the one below activations: that was all that was priced. Either way takes what the slower one does."""
    on = cluster(("L4", 1, 4 - 3 * wide), ("A10G", 1, 1 + 3 * wide))
    ranks = [(0, 1, 2, 3), (4,)] if wide == 0 else [(0,), (1, 2, 3, 4)]
    layout = uniform(LLAMA_8B, cluster(("L4", 1, 2)), tp=1, pp=2, micro_batch=1, batch=2, seq=4096)
    stages = [
        stage.replace(replicas=(stage.replicas[0].replace(ranks=own),))
        for stage, own in zip(layout.plan.stages, ranks, strict=True)
    ]
    costs = PlanCosts(Layout(layout.plan.replace(stages=stages), LLAMA_8B, on), HETHUB, packaged())
    num_bytes, network = 4096 * LLAMA_8B.hidden * 2, costs.network
    over, told = network.link(ranks[0][0], ranks[1][0]), network.broadcast(ranks[wide])
    assert costs.boundary(0, 0, 0, 1) == pytest.approx(over.seconds(num_bytes) + told.seconds(num_bytes))
    problem = pose(LLAMA_8B, on, Batch(2, 4096, "bf16"))
    type_of = {machine: index for index, each in enumerate(problem.device_types) for machine in each.machines}
    candidate = Candidate(tuple(CandidateStage(16, (ReplicaGroup(type_of[own], len(own), 1, 1),)) for own in ranks))
    assert UnitCosts(problem).p2p_seconds(candidate) == [pytest.approx(costs.boundary(0, 0, 0, 1))]


def test_rings_of_uneven_parts_share_their_cards_by_bytes() -> None:
    """Of three quarters and one quarter of a replica; both were priced as if the larger went twice: rehearsed steps were up to
    16 % shorter."""
    on, whole = cluster(("A100-SXM4-80GB", 2, 2), gbps=0.01), 1e9
    layout = uniform(LLAMA_8B, on, tp=2, pp=1, micro_batch=1, batch=2, seq=2048)
    (own,) = layout.plan.stages
    seconds = []
    for shares, fullest in ((None, 0.5), ((3.0, 1.0), 0.75)):
        cut = own.replace(replicas=tuple(replica.replace(tensor_shares=shares) for replica in own.replicas))
        costs = PlanCosts(Layout(layout.plan.replace(stages=(cut,)), LLAMA_8B, on), HETHUB, packaged())
        seconds.append(costs.state.rings.seconds(0, fullest * whole))
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-3)
