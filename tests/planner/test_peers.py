"""The judge and the peers' searches of `benchmarks/peers.py` against arithmetic by hand."""

from itertools import pairwise

import pytest

from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, ReplicaSpec, StageSpec
from tests.oracle.peers.closed_form import UTILISATION, Rates, link_bytes_per_second, step
from tests.oracle.peers.metis import device_groups, layers_by_speed, metis
from tests.oracle.peers.questions import Draft, Question
from tests.oracle.peers.sailor import sailor

MODEL = ModelSpec(name="small", layers=6, hidden=128, heads=8, ffn=352, vocab=512, max_seq_len=128)
SEQ_LEN, GLOBAL_BATCH = 128, 8
FORWARD = SEQ_LEN * (2 * MODEL.layer_parameters + 2 * SEQ_LEN * MODEL.hidden)  # FLOPs of a sample in a layer
HEAD = SEQ_LEN * 2 * MODEL.vocab * MODEL.hidden
MESSAGE = SEQ_LEN * MODEL.hidden * 2  # bytes of a sample
CARD = 10e9 / 8


def cluster(*tflops: float, accelerators: int = 1, memory_gb: float = 40) -> ClusterSpec:
    """Machines of so fast accelerators, joined by 10 Gbit/s."""
    nodes = [
        {
            "name": f"n{index}", "accelerators": accelerators, "gbps_per_nic": 10, "accelerator": {
                "name": f"a{rate:g}", "vendor": "nvidia", "memory_gb": memory_gb, "memory_gbytes_per_second": 1000, "fp32_tflops": rate,
                "bf16_tflops": rate, "link_gbytes_per_second": 50, "pcie_generation": 4}}
        for index, rate in enumerate(tflops)
    ]  # fmt: skip
    return ClusterSpec.model_validate({"name": "test", "nodes": nodes})


def seconds(flops: float, tflops: float) -> float:
    return flops / (UTILISATION * tflops * 1e12)


def plan(stages: list[StageSpec], schedule: str = "1f1b", unused: tuple[int, ...] = ()) -> PlanSpec:
    return PlanSpec.model_validate({
        "model": "small", "cluster": "test", "global_batch": GLOBAL_BATCH, "seq_len": SEQ_LEN, "precision": "bf16",
        "schedule": schedule, "stages": stages, "unused": unused,
    })  # fmt: skip


def stage(start: int, stop: int, *ranks: int, micro_batch: int = 2, **more: object) -> StageSpec:
    """A stage of single ranks with equal samples."""
    samples = GLOBAL_BATCH // len(ranks)
    replicas = [ReplicaSpec(ranks=(rank,), micro_batch=micro_batch, samples=samples) for rank in ranks]
    return StageSpec.model_validate({"layers": [(start, stop)], "replicas": replicas, **more})


def test_one_accelerator_computes_at_a_part_of_its_peak() -> None:
    machine = cluster(10)
    found = step(bind(plan([stage(0, 6, 0)]), MODEL, machine))
    assert found.seconds == pytest.approx(seconds(GLOBAL_BATCH * 3 * (6 * FORWARD + HEAD), 10))
    again = step(bind(plan([stage(0, 6, 0, recompute="full")]), MODEL, machine))
    assert again.seconds == pytest.approx(seconds(GLOBAL_BATCH * (4 * 6 * FORWARD + 3 * HEAD), 10))


@pytest.mark.parametrize(("schedule", "left"), [("1f1b", 1.0), ("zero_bubble", 1 / 3)])
def test_two_stages_fill_the_pipeline_and_then_the_slower_one_counts(schedule: str, left: float) -> None:
    """Four micro-batches of two samples; the second stage, with the head, is the slower one."""
    found = step(bind(plan([stage(0, 3, 0), stage(3, 6, 1)], schedule), MODEL, cluster(20, 10)))
    fast, slow = seconds(2 * 3 * 3 * FORWARD, 20), seconds(2 * 3 * (3 * FORWARD + HEAD), 10)
    messages = 2 * 2 * MESSAGE / CARD
    assert found.pipeline == pytest.approx(4 * slow + left * fast + messages)
    assert found.links == pytest.approx(GLOBAL_BATCH * MESSAGE / CARD + fast + slow)
    assert found.seconds == max(found.pipeline, found.links)


def test_gradients_are_summed_beside_the_last_backward() -> None:
    """Over slow links what the backward does not hide stays; the first layer's has nothing beside it."""
    found = step(bind(plan([stage(0, 6, 0, 1, micro_batch=4)]), MODEL, cluster(10, 10)))
    summed = 2 * 1 / 2 * 2 * MODEL.parameters / CARD
    backward = seconds(4 * 2 * (6 * FORWARD + HEAD), 10)
    assert summed > backward
    assert found.behind == pytest.approx(summed / 6 + (summed - backward) * 5 / 6)


def test_weights_are_gathered_beside_the_compute_of_each_round() -> None:
    """ZeRO 3 under 1F1B: four rounds, in each a gather beside the forward, a gather and a sum beside the backward."""
    found = step(bind(plan([stage(0, 6, 0, 1, micro_batch=1, zero=3)]), MODEL, cluster(10, 10)))
    half = 1 / 2 * 2 * MODEL.parameters / CARD
    forward = seconds(6 * FORWARD + HEAD, 10)
    assert half > 2 * forward  # all of it is the link's
    assert found.pipeline == pytest.approx(4 * 3 * half)


def test_links_are_the_slowest_of_a_ring() -> None:
    machines = cluster(10, 10, accelerators=2)
    assert link_bytes_per_second(machines, [0, 1]) == 50e9
    assert link_bytes_per_second(machines, [0, 1, 2]) == CARD


def test_other_parts_of_data_sheets_count_where_they_are_given() -> None:
    machines = cluster(10, 10, accelerators=2)
    nodes = [node.name for node in machines.nodes]
    rates = Rates({machines.nodes[0].device.name: UTILISATION / 2}, {nodes[0]: 0.25}, 0.8)
    assert link_bytes_per_second(machines, [0, 1], rates) == 0.25 * 50e9
    assert link_bytes_per_second(machines, [0, 2], rates) == 0.8 * CARD
    layout = bind(plan([stage(0, 3, 0), stage(3, 6, 1)]), MODEL, cluster(20, 10))
    slower = Rates({node.device.name: UTILISATION / 2 for node in layout.cluster.nodes})
    before, found = step(layout), step(layout, slower)
    messages = 2 * 2 * MESSAGE / CARD
    assert found.pipeline == pytest.approx(2 * (before.pipeline - messages) + messages)


def test_metis_groups_are_powers_of_two_and_none_too_small() -> None:
    assert device_groups(4, 2) == [(2, 2)]
    assert device_groups(8, 3) == [(2, 2, 4), (2, 4, 2), (4, 2, 2)]


def test_layers_follow_speed_and_memory() -> None:
    assert layers_by_speed(6, [2.0, 1.0], 0.0, [6, 6])[0] == [4, 2]
    assert layers_by_speed(6, [1.0, 1.0], 2.0, [6, 6])[0] == [4, 2]  # the head is two layers of the last stage
    assert layers_by_speed(6, [2.0, 1.0], 0.0, [3, 6])[0] == [3, 3]
    assert layers_by_speed(6, [2.0, 1.0], 0.0, [3, 2])[0] == []


def test_metis_on_two_equal_accelerators_is_the_cheapest_of_all_its_plans_by_hand() -> None:
    """One stage of two replicas, one of TP 2 where asked for, or two stages, at every number of micro-batches: data
    parallelism is enumerated here by its formula, and so are two stages with every split of the layers."""
    question = Question(MODEL, cluster(10, accelerators=2), GLOBAL_BATCH, SEQ_LEN, "bf16")
    cost = question.layer_costs[0]
    link, width = 50e9, 2
    by_hand = []
    for microbatches in (1, 2, 4, 8):
        samples = GLOBAL_BATCH // microbatches
        if samples >= 2:
            own = 6 * cost.layer(samples // 2).total + cost.head(samples // 2).total
            summed = MODEL.parameters * width / link
            by_hand.append((microbatches * own + summed + float(cost.optimizer(MODEL.parameters)), (6,)))
        layer, head = cost.layer(samples).total, cost.head(samples).total
        for first in range(1, 6):
            times = [first * layer, (6 - first) * layer + head]
            ends = [MODEL.embedding_parameters, MODEL.head_parameters]
            held = [own * MODEL.layer_parameters + end for own, end in zip((first, 6 - first), ends, strict=True)]
            update = max(float(cost.optimizer(own)) for own in held)
            message = samples * MESSAGE / link
            total = (microbatches - 1) * max(times) + sum(times) + message + update
            by_hand.append((total, (first, 6 - first)))
    found, draft = next(metis(question))
    assert found == pytest.approx(min(by_hand)[0])
    assert draft.layers == min(by_hand)[1]


@pytest.mark.parametrize("search", [metis, sailor])
def test_drafts_come_by_cost_and_are_plans(search: object) -> None:
    machines = cluster(20, 10, accelerators=2)
    question = Question(MODEL, machines, GLOBAL_BATCH, SEQ_LEN, "bf16")
    drafts: list[tuple[float, Draft]] = list(search(question))  # type: ignore[operator]
    assert all(one <= other for (one, _), (other, _) in pairwise(drafts))
    for _, draft in drafts:
        layout = bind(question.plan_of(draft), MODEL, machines)
        assert step(layout).seconds > 0


def test_sailor_deals_unlike_accelerators_to_one_stage_where_that_is_faster() -> None:
    """Two fast and two slow ones: as one stage a micro-batch lasts as long as the slow ones take."""
    question = Question(MODEL, cluster(20, 10, accelerators=2), GLOBAL_BATCH, SEQ_LEN, "bf16")
    wide = next(cost for cost, draft in sailor(question) if len(draft.layers) == 1 and len(draft.replicas[0]) == 4)
    slow = question.layer_costs[1]
    micro_batches = (1, 2)
    times = [8 // (4 * own) * (6 * slow.layer(own).total + slow.head(own).total) for own in micro_batches]
    summed = 2 * 3 / 4 * MODEL.parameters * 2 / CARD
    assert wide == pytest.approx(min(times) + summed)
