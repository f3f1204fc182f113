"""The same plan on the same cluster costs the same, however files describe both."""

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch, which the random layouts' module imports: pip install hethub[train]")

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.memory.ranks import rank_memory
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.step import step_times
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.plan import SCHEDULES, PlanSpec, ReplicaSpec, ScheduleName
from tests.predictor.pipeline.test_laws import Draw, of_all_draws, seconds
from tests.predictor.plans import LLAMA_8B, TINY


@of_all_draws
def test_shares_of_any_sum_and_replicas_in_any_order_are_the_same_plan(drawn: Draw) -> None:
    """Equal shares are as none. Order counts over several stages, and in rounds: who is listed first is dealt first."""

    def said(replica: ReplicaSpec) -> ReplicaSpec:
        given = replica.tensor_shares
        if given is None and drawn.random.random() < 0.5:
            return replica.replace(tensor_shares=(2.5,) * replica.tp)
        return replica if given is None else replica.replace(tensor_shares=tuple([2 * share for share in given]))

    layout = drawn.layout
    others = []
    if any(replica.tp > 1 for stage in layout.stages for replica in stage.replicas):
        others.append(replaced(layout, lambda replicas: tuple(map(said, replicas))))
    if layout.num_stages == 1 < len(layout.stages[0].replicas) and not layout.plan.runs_in_rounds(0):
        others.append(replaced(layout, lambda replicas: replicas[::-1]))
    check_same(layout, *others)


@of_all_draws
def test_1f1b_that_may_hold_all_microbatches_is_gpipe(drawn: Draw) -> None:
    """It was up to 1.5 times as long where links bind: activations and gradients shared them, though they never meet."""
    stages = tuple(stage.replace(zero=min(stage.zero, 1)) for stage in drawn.layout.stages)
    if drawn.layout.plan.num_chunks > 1:
        return
    gpipe = drawn.layout.plan.replace(schedule="gpipe", stages=stages)

    def holding_all(replicas: Sequence[ReplicaSpec]) -> tuple[ReplicaSpec, ...]:
        return tuple(own.replace(in_flight=-(-own.samples // own.micro_batch)) for own in replicas)

    plain = bind(gpipe, drawn.layout.model, drawn.layout.cluster)
    check_same(plain, replaced(bind(gpipe.replace(schedule="1f1b"), plain.model, plain.cluster), holding_all))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_the_slowest_neighbour_counts_beside_rounds_whichever_replica_it_has(schedule: ScheduleName) -> None:
    """That of the first of equal replicas counted for all, whose own neighbour may have a faster link."""
    cluster = on(
        [{"accelerator": "L4", "count": 3}, {"accelerator": "L4", "count": 2}, {"accelerator": "L4", "gbps_per_nic": 1}]
    )
    above = {"replicas": [[0], [1], [2]], "zero": 3}
    ends = [[[3], [4], [5]], [[5], [4], [3]], [[3], [5], [4]]]
    check_same(*(planned(cluster, above, {"replicas": below}, schedule=schedule) for below in ends))


@pytest.mark.parametrize("zero", [2, 3])
def test_uplinks_that_nothing_waits_for_change_nothing(zero: int) -> None:
    """Rings over islands and messages inside one have nothing but racks in common: however fast these were, all of a message's
    seconds stood beside the rings, and a step was up to 1.8 times as long."""
    nodes = [{"accelerator": "L4", "vendor": vendor, "gbps_per_nic": 0.1} for vendor in ("one", "other", "one")]
    racks = [{"name": f"r{i}", "nodes": [f"n{i}"], "gbps": 1e9} for i in range(3)]
    stages = {"replicas": [[0], [1]], "zero": zero}, {"replicas": [[2]]}
    bridge = {"gbps_per_node": 5.0}
    plain, behind = (on(nodes, between_islands=bridge, racks=own) for own in ([], racks))
    check_same(planned(plain, *stages), planned(behind, *stages))


def replaced(layout: Layout, change: Any) -> Layout:
    stages = tuple(stage.replace(replicas=change(stage.replicas)) for stage in layout.stages)
    return bind(PlanSpec.model_validate(layout.plan.replace(stages=stages).model_dump()), layout.model, layout.cluster)


def check_same(layout: Layout, *others: Layout) -> None:
    step, memory = (seconds(layout), rank_memory(layout)) if others else (0.0, [])
    for other in others:
        assert seconds(other) == pytest.approx(step, rel=1e-9)
        for a, b in zip(memory, rank_memory(other), strict=True):
            assert a.bytes + a.host_bytes == pytest.approx(b.bytes + b.host_bytes, rel=1e-9, abs=8)


def on(nodes: list[dict[str, Any]], **links: Any) -> ClusterSpec:
    each = [{"name": f"n{i}", "accelerators": 1, "gbps_per_nic": 10, **node} for i, node in enumerate(nodes)]
    return ClusterSpec.model_validate({"name": "test", "nodes": each, "links": links})


def planned(
    cluster: ClusterSpec,
    *stages: dict[str, Any],
    schedule: ScheduleName = "1f1b",
    precision: str = "bf16",
    unused: Sequence[int] = (),
) -> Layout:
    """Of stages that share the tiny model's layers evenly, whose replicas are named by their ranks."""
    each, batch = TINY.layers // len(stages), 2 * len(stages[0]["replicas"])
    given = [
        {
            **stage,
            "layers": [[each * i, each * i + each]],
            "replicas": [
                {"ranks": ranks, "samples": batch // len(stage["replicas"]), "micro_batch": 1}
                for ranks in stage["replicas"]
            ],
        }
        for i, stage in enumerate(stages)
    ]
    plan = {
        "model": TINY.name, "cluster": "test", "seq_len": 128, "precision": precision, "schedule": schedule,
        "global_batch": batch, "stages": given, "unused": unused,
    }  # fmt: skip
    return bind(PlanSpec.model_validate(plan), TINY, cluster)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "interleaved"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_owner_of_more_state_counts_whoever_is_listed_first(schedule: ScheduleName, zero: int) -> None:
    """Alike but for it, one replica was replayed for all, and its update stood for theirs: steps were up to 30 % short."""
    stage = {"replicas": [[0], [1], [2], [3]], "zero": zero, "state_shares": {1: 0.9}, "offload": ["optimizer"]}
    layout = planned(on([{"accelerator": "L4", "accelerators": 4}]), stage, schedule=schedule)
    costs = PlanCosts(layout, HETHUB, packaged())
    once, full = (step_times(layout, costs, full=full).seconds for full in (False, True))
    assert once == pytest.approx(full, rel=1e-9)


@pytest.mark.parametrize(("name", "precision"), [("CPU-core", "fp32"), ("L4", "bf16"), ("MI210", "bf16")])
def test_the_island_that_ranks_count_to_does_not_change_how_they_compute(name: str, precision: str) -> None:
    """Ranks of a CPU under a name of its own were devices as soon as their node named an island, and those of NVIDIA's
    cards summed gradients as others' do."""
    device = {**find_accelerator(name).to_dict(), "name": f"own-{name}"}
    plain, first, last = (
        planned(
            on([{"accelerator": device, **island} for island in islands]),
            {"replicas": [[0], [1]], "zero": 1},
            precision=precision,
        )
        for islands in ([{}, {}], [{"vendor": "one"}, {}], [{}, {"vendor": "one"}])
    )
    costs = [PlanCosts(layout, HETHUB, packaged()) for layout in (plain, first, last)]
    assert len({own.microbatch(0, rank, 1).backward.compute for own in costs for rank in (0, 1)}) == 1
    assert len({entry.parts["framework"] for own in costs for entry in rank_memory(own.layout)}) == 1
    check_same(first, last)


def test_unused_ranks_take_no_part_of_a_link() -> None:
    """A plan that leaves half of a machine, or a machine of a rack, unused was priced as if all of it summed gradients."""
    racks = [{"name": name, "nodes": [node], "gbps": 0.1} for name, node in (("west", "n0"), ("east", "n1"))]
    node, stage = {"accelerator": "L4"}, {"replicas": [[0], [1]], "zero": 1}
    two = planned(on([node, node], racks=racks), stage)
    beside = planned(on([node, {**node, "count": 3}], racks=racks), stage, unused=[2, 3])
    within = on([{**node, "accelerators": 2}] * 2, racks=racks)
    halves = planned(within, {**stage, "replicas": [[0], [2]]}, unused=[1, 3])
    assert seconds(beside) == pytest.approx(seconds(two), rel=1e-9)
    assert seconds(halves) == pytest.approx(seconds(two), rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ("interleaved", [(2, 1)] * 3 + [(8, 1)]),  # samples and micro-batch of each replica
        ("interleaved", [(2, 1)] * 4 + [(20, 2)]),
        ("zero_bubble", [(1, 1)] * 4 + [(10, 2)] * 2 + [(2, 1)] * 2),
    ],
)
@pytest.mark.parametrize("zeros", [(1, 2), (2, 1), (2, 2)])
def test_replicas_of_unlike_samples_are_replayed_in_the_order_that_they_run(
    schedule: ScheduleName, sizes: list[tuple[int, int]], zeros: tuple[int, int]
) -> None:
    """In rounds both schedules list passes by all replicas; listed anew for one of each sort, steps were up to 9 % short or
    8 % long."""
    count, chunks = len(sizes), 2 if schedule == "interleaved" else 1
    size = 4 // chunks
    stages = [
        {
            "layers": [[size * (2 * chunk + stage), size * (2 * chunk + stage + 1)] for chunk in range(chunks)],
            "zero": zero,
            "replicas": [
                {"ranks": [stage * count + replica], "samples": samples, "micro_batch": micro_batch}
                for replica, (samples, micro_batch) in enumerate(sizes)
            ],
        }
        for stage, zero in enumerate(zeros)
    ]
    plan = {
        "model": LLAMA_8B.name, "cluster": "test", "seq_len": 1024, "precision": "bf16", "schedule": schedule,
        "global_batch": sum(samples for samples, _ in sizes), "stages": stages,
    }  # fmt: skip
    cluster = on([{"accelerator": "L4", "accelerators": count, "gbps_per_nic": 100}] * 2)
    model = LLAMA_8B.replace(layers=8, hidden=1024, heads=8, ffn=4096, vocab=32000)
    layout = bind(PlanSpec.model_validate(plan), model, cluster)
    costs = PlanCosts(layout, HETHUB, packaged())
    folded, full = (step_times(layout, costs, full=full).seconds for full in (False, True))
    assert folded == pytest.approx(full, rel=1e-9)


@pytest.mark.parametrize("asked_first", [(0, 1), (2, 3), (0, 2)])
def test_the_links_of_a_machine_in_parts_are_those_of_its_slowest_in_any_order(asked_first: tuple[int, int]) -> None:
    """Those of the part that the file names first counted for all, and of a pair whatever was asked first: an A100's
    links were 62 times as fast as the same links in a file that names the T4 first."""
    names = ("A100-SXM4-80GB", "T4")
    one, other = (
        Network(on([{"accelerator": own, "accelerators": 2, "part_of": "box"} for own in order]))
        for order in (names, names[::-1])
    )
    swapped = {0: 2, 1: 3, 2: 0, 3: 1}
    one.path(*asked_first)
    other.path(*asked_first)
    for ranks in [(0, 1), (2, 3), (0, 2), (0, 1, 2, 3)]:
        there = [swapped[rank] for rank in ranks]
        assert one.path(*ranks[:2]).alone == other.path(*there[:2]).alone
        assert one.all_reduce(one.group(ranks), 1e8) == other.all_reduce(other.group(there), 1e8)
        assert one.path(*ranks[:2]).alone == one.path(2, 3).alone
