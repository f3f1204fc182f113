"""Links between ranks, and what collectives over them cost beside compute."""

from typing import Any

import pytest

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.node_links import through_host
from hethub.predictor.cost.profile import LinkTiming, ProfileSpec
from hethub.predictor.cost.resources import Resource
from hethub.predictor.cost.software import HETHUB, Software
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.state.costs import BUCKET_BYTES
from hethub.predictor.predict import predict
from hethub.spec.accelerator import find_accelerator
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import bind
from tests.predictor.plans import LLAMA_8B, TINY, cluster, under, uniform


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
    assert costs[1].state.tied.seconds == 0.0
    # Four ranks of a node each send half of a quarter of the fp32 gradients to the rank that steps it, over 40 Gbit/s
    # at best.
    wire = 0.5 * tied.vocab * tied.hidden * 4 / (40e9 / 8)
    assert costs[0].state.tied.seconds > wire
    assert costs[0].state.reduction(0).tail_seconds == pytest.approx(costs[0].state.tied.seconds)
    assert PlanCosts(uniform(tied, on, pp=1, **shape), HETHUB, packaged()).state.tied.seconds == 0.0  # type: ignore[arg-type]


def test_spread_sends_use_every_interface() -> None:
    on = cluster(("A100-SXM4-80GB", 2, 8), gbps=25)
    on = on.replace(nodes=(on.nodes[0].replace(nics=2),))
    layout = uniform(LLAMA_8B, on, tp=8, pp=2, micro_batch=4, batch=8, seq=4096)
    costs = PlanCosts(layout, Software(spread_boundaries=True), packaged())
    num_bytes, network = 4 * 4096 * LLAMA_8B.hidden * 2, costs.network
    gathered = network.all_gather(network.group(range(8, 16)), num_bytes)
    wire = network.link(0, 8).latency_seconds + num_bytes / network.rate(Resource("cards", 0))
    assert costs.boundary(0, 0, 0, 4) == pytest.approx(wire + gathered)


def test_gathers_beside_compute_cost_a_part_of_themselves() -> None:
    on = cluster(("A100-SXM4-80GB", 2, 8), gbps=25)
    layout = uniform(LLAMA_8B, on, tp=1, pp=1, micro_batch=1, batch=16, seq=8192, zero=3)
    costs = PlanCosts(layout, HETHUB, packaged())
    portion = costs.state.whole[0]
    forward, *_ = costs.state.round_seconds(0, (1e9, 1e9, 0.0), portion)
    gathers = costs.state.gather_seconds(0, portion)[1:]  # the first layer's come before the step's only forward
    assert forward == pytest.approx(packaged().links["overlap_cost"] * sum(gathers))


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("gbps", "hides"), [(10, False), (400, True)])
def test_new_weights_come_beside_the_next_forward(gbps: int, hides: bool, zero: int) -> None:
    """All that its layers but the first do not hide is added to a step, at least the first bucket's, or under ZeRO-2 the first
    layer's and the embedding's; and what the hidden rest slows them."""
    on = cluster(("A100-SXM4-80GB", 2, 1), gbps=gbps)
    layout = uniform(LLAMA_8B, on, tp=1, pp=1, micro_batch=2, batch=16, seq=8192, zero=zero)
    beside, behind = (
        PlanCosts(layout, HETHUB if overlaps else Software(overlapped_gather=False), packaged())
        for overlaps in (True, False)
    )
    norms = behind.state.norms_seconds(0, behind.state.whole[0])
    gather, forward = behind.state.reduction(0).gather_seconds - norms, behind.microbatch(0, 0, 1).forward.total
    hidden = forward * (LLAMA_8B.layers - 1) / LLAMA_8B.layers
    first = gather * BUCKET_BYTES / (4 * LLAMA_8B.parameters)
    if zero == 2:
        first = behind.state.rings.seconds(0, 2 * (LLAMA_8B.layer_parameters + LLAMA_8B.vocab * LLAMA_8B.hidden))
    assert (first > gather - hidden) is hides
    shown = max(first, gather - hidden)
    slowed = packaged().links["overlap_cost"] * (gather - shown)
    assert beside.state.reduction(0).gather_seconds == pytest.approx(shown + slowed + norms)


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


@pytest.mark.parametrize(("gbps", "hides"), [(0.2, True), (400, False)])
def test_cpus_compute_while_a_slow_link_carries(gbps: float, hides: bool) -> None:
    """What the same bytes take on one machine is their cores' own copying, which nothing hides."""
    layouts = [
        uniform(TINY, on, tp=1, pp=1, micro_batch=4, batch=32, seq=64, precision="fp32", zero=3)
        for on in (cluster(("CPU-core", 1, 2)), cluster(("CPU-core", 2, 1), gbps=gbps))
    ]
    inside, over = (PlanCosts(layout, HETHUB, packaged()).state for layout in layouts)
    portion = over.whole[0]
    own, seconds = (sum(state.gather_seconds(0, portion)[1:]) for state in (inside, over))  # the first's stay
    assert inside.round_seconds(0, (1e9, 1e9, 0.0), portion)[0] == pytest.approx(own)
    shown, *_ = over.round_seconds(0, (1e9, 1e9, 0.0), portion)
    assert shown == pytest.approx(own, rel=0.1) if hides else shown == pytest.approx(seconds)
    assert seconds > 3 * own if hides else seconds < own


def test_absurd_rates_are_bad_input_not_infinite_seconds() -> None:
    """Below any bound of a file: what a scaled accelerator could come to."""
    slow = find_accelerator("T4").model_copy(update={"name": "slow", "memory_gbytes_per_second": 1e-320})
    layout = uniform(LLAMA_8B, cluster(("T4", 1, 8)), tp=1, pp=1, micro_batch=1, batch=8, seq=128, precision="fp16")
    node = layout.cluster.nodes[0].replace(accelerator=slow)
    layout = type(layout)(layout.plan, layout.model, layout.cluster.replace(nodes=(node,)))
    with pytest.raises(BadInput, match="absurdly small"):
        predict(layout)


TWO_MAKERS = [
    {"name": "nv", "accelerator": "A100-SXM4-80GB", "accelerators": 8, "nics": 8, "gbps_per_nic": 200},
    {"name": "amd", "accelerator": "MI250X-GCD", "accelerators": 8, "nics": 4, "gbps_per_nic": 200},
]


def network(*nodes: dict[str, object], profile: ProfileSpec | None = None, **links: object) -> Network:
    return Network(ClusterSpec.model_validate({"name": "test", "nodes": nodes, "links": links}), profile=profile)


def test_bridged_sums_share_the_bridge_as_messages_do() -> None:
    """Eight groups over a bridge of 10 Gbit/s a node; they were priced as if each had it for itself."""
    found = network(*TWO_MAKERS, between_islands={"gbps_per_node": 10}, staging={"gbytes_per_second": 50})
    one, eight = (found.reduce_scatter(found.group([0, 8]), 1e9, sharing) for sharing in (1, 8))
    assert eight == pytest.approx(8 * one, rel=0.01)
    wire = 0.5e9 / (10e9 / 8 * packaged().links["between_nodes_fraction"])
    assert one == pytest.approx(wire, rel=0.01)


def test_of_a_bridged_sum_only_what_islands_exchange_leaves_a_machine() -> None:
    """An island's own ring stays inside it; all of the bytes were priced over the card, twice what a shaped link carried."""
    nodes = [{**node, "nics": 1, "gbps_per_nic": 10} for node in TWO_MAKERS]
    found = network(*nodes, staging={"gbytes_per_second": 50})
    wire = 0.5e9 / (10e9 / 8 * packaged().links["between_nodes_fraction"])
    assert found.reduce_scatter(found.group([0, 8]), 1e9) == pytest.approx(wire, rel=0.01)


@pytest.mark.parametrize("measured", [False, True])
def test_who_shares_does_not_depend_on_a_profile(measured: bool) -> None:
    """Cards are shared, what two accelerators have between them is not."""
    nodes = [{**TWO_MAKERS[0], "count": 2}]
    alone = network(*nodes)
    per_byte = {
        level: alone.path(0, end).alone.seconds_per_byte for level, end in (("in_node", 1), ("between_nodes", 8))
    }
    links = [
        LinkTiming(level=level, operation=operation, latency_seconds=1e-5, gbytes_per_second=1e-9 / own)  # type: ignore[arg-type]
        for level, own in per_byte.items()
        for operation in ("send", "all_reduce")
    ]
    found = network(*nodes, profile=profile(links)) if measured else alone
    inside, between = ([found.link(0, end, sharing).seconds_per_byte for sharing in (1, 16)] for end in (1, 8))
    assert inside[0] == inside[1]
    assert between[1] == pytest.approx(2 * between[0])  # 16 messages on 8 cards
    groups = [found.reduce_scatter(found.group([0, 8]), 1e10, sharing) for sharing in (8, 16)]
    assert groups[0] == pytest.approx(groups[1], rel=0.01)  # no more groups than accelerators


@pytest.mark.parametrize(("level", "ranks"), [("in_node", range(4)), ("between_nodes", range(0, 32, 8))])
def test_a_measured_sum_takes_what_it_was_measured_to(level: str, ranks: range) -> None:
    """The profiler times an all-reduce of few bytes, its latency, and one of many, which carries 2 (n - 1) / n of them."""
    for rate in (2.0, 2000.0):  # slower and faster than what a data sheet has
        own = LinkTiming(level=level, operation="all_reduce", latency_seconds=1e-3, gbytes_per_second=rate)  # type: ignore[arg-type]
        found = network({**TWO_MAKERS[0], "count": 4, "gbps_per_nic": 1}, profile=profile([own]))
        seconds = 1e-3 + 2 * 3 / 4 * 1e9 / (rate * 1e9)
        assert found.all_reduce(found.group(ranks), 1e9) == pytest.approx(seconds)


def profile(links: list[LinkTiming]) -> ProfileSpec:
    layer = {"micro_batch": 1, "seq_len": 16, "forward_seconds": 1.0, "backward_seconds": 2.0}
    devices = [{"accelerator": "A100-SXM4-80GB", "precision": "bf16", "layers": [layer]}]
    about = {"date": "2026-01-01", "hethub": "0", "software": "none", "model": TINY, "devices": devices}
    return ProfileSpec.model_validate({**about, "links": links})


@pytest.mark.parametrize(
    ("operation", "num_bytes", "ranks", "measured"),
    [
        ("all_gather", 2e9, 16, 338.8),
        ("all_gather", 2e9, 64, 319.7),
        ("all_gather", 2e9, 128, 285.8),
        ("all_gather", 2e9, 512, 225.3),
        ("all_reduce", 2e9, 512, 223.8),  # by a ring; NVLS and trees 244.3
        ("all_reduce", 2**20, 32, 5.37),
        ("all_reduce", 2**24, 32, 64.43),
    ],
)
def test_a_ring_of_many_ranks_is_as_slow_as_it_was_measured(
    operation: str, num_bytes: float, ranks: int, measured: float
) -> None:
    """B200s with eight cards of 400 Gbit/s a node: GB/s of bus bandwidth (Together AI, dgxc-benchmarking; 32 ranks:
    ml-engineering book). With steps counted up to 134 ranks only, 512 ranks kept what 64 had; with a tree's steps, an
    all-reduce of 1 MiB over 32 ranks took a third of what it was measured to."""
    found = network(
        {"name": "b", "count": 64, "accelerator": "B200-SXM", "accelerators": 8, "nics": 8, "gbps_per_nic": 400}
    )
    seconds, passes = getattr(found, operation)(found.group(range(ranks)), num_bytes), {"all_reduce": 2}
    bus = passes.get(operation, 1) * num_bytes * (ranks - 1) / ranks / seconds / 1e9
    assert bus == pytest.approx(measured, rel=0.2)


def test_a_racks_uplink_is_shared_by_all_that_leaves_it() -> None:
    nodes = [
        {"name": name, "count": 4, "accelerator": "A100-SXM4-80GB", "accelerators": 8, "nics": 8, "gbps_per_nic": 200}
        for name in "ab"
    ]
    racks = [{"name": name, "nodes": [name], "gbps": 400, "latency_seconds": 1e-5} for name in "ab"]
    free, uplinks = network(*nodes), network(*nodes, racks=racks)
    across = [0, 32]
    assert uplinks.path(*across).alone.latency_seconds == pytest.approx(free.path(*across).alone.latency_seconds + 2e-5)
    assert uplinks.path(0, 8) == free.path(0, 8)
    rate = 400e9 / 8 * packaged().links["between_nodes_fraction"]
    assert uplinks.link(*across, sharing=32).seconds(1e9) == pytest.approx(32e9 / rate, rel=0.01)
    # A group of one accelerator of every node, eight of them on each: all eight pass the uplink.
    group = uplinks.group(range(0, 64, 8))
    assert uplinks.reduce_scatter(group, 1e9, sharing=8) == pytest.approx(8e9 * 7 / 8 / rate, rel=0.01)
    # Of one accelerator of a node in each rack: the other nodes have as many groups, which pass it too.
    one_each = uplinks.group([0, 32])
    assert uplinks.reduce_scatter(one_each, 1e9, sharing=8) == pytest.approx(32e9 / 2 / rate, rel=0.01)
    assert free.reduce_scatter(group, 1e9, sharing=8) < uplinks.reduce_scatter(group, 1e9, sharing=8) / 3


def test_staging_is_the_clusters_to_say() -> None:
    guessed = network(*TWO_MAKERS)
    given = network(*TWO_MAKERS, staging={"gbytes_per_second": 12, "per_host_gbytes_per_second": 24})
    assert guessed.path(0, 8).alone.seconds_per_byte == pytest.approx(
        1e-9 / packaged().links["host_staged_gbytes_per_second"]
    )
    assert given.link(0, 8).seconds_per_byte == pytest.approx(1e-9 / 12)
    assert given.link(0, 8, sharing=8).seconds_per_byte == pytest.approx(8e-9 / 24)


def test_receivers_share_their_cards_too() -> None:
    """Eight machines send to eight replicas on one: its cards carry all of it."""
    spread = {"accelerator": "A100-SXM4-80GB", "count": 8, "accelerators": 1, "nics": 1, "gbps_per_nic": 200}
    dense = {"accelerator": "A100-SXM4-80GB", "accelerators": 8, "nics": 1, "gbps_per_nic": 200}
    on = ClusterSpec.model_validate({"name": "test", "nodes": [{"name": "s", **spread}, {"name": "d", **dense}]})
    costs = PlanCosts(uniform(LLAMA_8B, on, tp=1, pp=2, micro_batch=1, batch=8, seq=4096), HETHUB, packaged())
    num_bytes = 4096 * LLAMA_8B.hidden * 2
    rate = 200e9 / 8 * packaged().links["between_nodes_fraction"]
    assert costs.boundary(0, 0, 0, 1) == pytest.approx(8 * num_bytes / rate, rel=0.01)


@pytest.mark.parametrize("gbps", [0.1, 1.0])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_messages_queue_on_the_wire(schedule: str, gbps: float) -> None:
    """64 microbatches over a slow bridge: forwards and backwards one way after the other under GPipe, both at once under
    1F1B. Once each message was priced as if it were alone: 3.8 s, where the wire needs 46."""
    on = cluster(("H100-SXM5-80GB", 1, 1), ("MI300X", 1, 1), gbps=gbps)
    layout = uniform(LLAMA_8B.replace(layers=4), on, tp=1, pp=2, micro_batch=1, batch=64, seq=2048)
    layout = bind(layout.plan.replace(schedule=schedule), layout.model, on)
    wire = 64 * 2048 * LLAMA_8B.hidden * 2 / (gbps / 8 * 1e9 * packaged().links["between_nodes_fraction"])
    found = predict(layout)
    times = 2 if schedule == "gpipe" else 1
    assert times * wire <= found.step_seconds < 1.1 * times * wire + 2.0 * found.breakdown["compute"]
    assert found.breakdown["pp"] > 0.4 * found.step_seconds
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds)
    assert predict(layout, with_timeline=True).step_seconds == pytest.approx(found.step_seconds, rel=1e-3)


def test_chunks_that_take_turns_share_one_wire() -> None:
    """64 microbatches of two stages of four chunks each: either way the wire carries every one seven times, one message after
    the other. Once the messages of each boundary had a seventh of it for themselves, however idle the others' were."""
    on = cluster(("H100-SXM5-80GB", 1, 1), ("MI300X", 1, 1), gbps=1.0)
    layout = uniform(LLAMA_8B.replace(layers=8), on, tp=1, pp=2, micro_batch=1, batch=64, seq=2048)
    layout = bind(under("interleaved", layout.plan, 4), layout.model, on)
    wire = 7 * 64 * 2048 * LLAMA_8B.hidden * 2 / (1e9 / 8 * packaged().links["between_nodes_fraction"])
    found = predict(layout)
    assert wire <= found.step_seconds < 1.1 * wire + 2.0 * found.breakdown["compute"]
    assert predict(layout, with_timeline=True).step_seconds == pytest.approx(found.step_seconds, rel=1e-3)


def test_a_network_that_carries_half_of_what_nodes_send_takes_twice_as_long() -> None:
    """docs/links.md: a card's rate is over `oversubscription`, whether a message or a sum takes it; links inside nodes are
    not."""
    nodes = [{**TWO_MAKERS[0], "count": 2}]
    full, half = (network(*nodes, between_nodes={"oversubscription": of}) for of in (1, 2))
    for first, second in ((0, 8), (0, 1)):
        times = 2 if second == 8 else 1
        alone, shared = (found.link(first, second).seconds_per_byte for found in (full, half))
        assert shared == pytest.approx(times * alone)
        alone, shared = (found.reduce_scatter(found.group([first, second]), 1e11) for found in (full, half))
        assert shared == pytest.approx(times * alone, rel=1e-3)


@pytest.mark.parametrize("other", ["A100-SXM4-80GB", "MI250X-GCD"])
@pytest.mark.parametrize("ends", [(0, 4), (4, 0)])
def test_a_message_takes_one_card_at_either_end(other: str, ends: tuple[int, int]) -> None:
    """Four of 10 Gbit/s beside one of 40: as much in all, but the message has one of the four."""
    node = {"accelerator": "A100-SXM4-80GB", "accelerators": 4, "nics": 4, "gbps_per_nic": 10}
    alone = {**node, "accelerator": other, "nics": 1, "gbps_per_nic": 40}
    found = network({"name": "four", **node}, {"name": "one", **alone}, staging={"gbytes_per_second": 50})
    rate = 10e9 / 8 * packaged().links["between_nodes_fraction"]
    assert found.link(*ends).seconds_per_byte == pytest.approx(1 / rate)


def test_a_boundary_between_regions_is_as_slow_as_its_slower_way() -> None:
    """Activations have 10 Gbit/s, gradients 1."""
    on = cluster(("A100-SXM4-80GB", 1, 1), ("A100-SXM4-80GB", 1, 1))
    regions = {"names": ["a", "b"], "of_node": {"n0": "a", "n1": "b"}, "gbps": [[100, 10], [1, 100]]}
    on = ClusterSpec.model_validate({**on.to_dict(), "links": {"regions": regions}})
    costs = PlanCosts(uniform(LLAMA_8B, on, tp=1, pp=2, micro_batch=1, batch=8, seq=4096), HETHUB, packaged())
    assert costs.boundary(0, 0, 0, 1) == pytest.approx(4096 * LLAMA_8B.hidden * 2 / (1e9 / 8), rel=0.01)


@pytest.mark.parametrize(("accelerator", "times"), [("T4", 2), ("A100-SXM4-80GB", 1)])
def test_rings_that_leave_a_node_share_its_host_alone(accelerator: str, times: int) -> None:
    """Over PCIe all of them pass it, and two take twice as long as one; NVLink is for each pair alone. A ring inside one node
    passes switches of its own."""
    node = {"name": "n", "accelerator": accelerator, "count": 2, "accelerators": 4, "nics": 4, "gbps_per_nic": 1e5}
    found = network(node)
    for ranks, more in (([0, 1, 4, 5], times), ([0, 1], 1)):
        one, two = (found.reduce_scatter(found.group(ranks), 1e11, sharing) for sharing in (1, 2))
        assert two == pytest.approx(more * one, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_takes_a_step_less_than_it_has_ranks(ranks: int) -> None:
    """docs/links.md: of `between_nodes.latency_seconds` each; an all-reduce is two rings."""
    found = network({**TWO_MAKERS[0], "count": 8, "accelerators": 1}, between_nodes={"latency_seconds": 0.5})
    assert found.all_reduce(found.group(range(ranks)), 1.0) == pytest.approx(2 * (ranks - 1) * 0.5, rel=1e-3)
    assert found.all_reduce(found.group(range(ranks)), 0.0) == 0.0


@pytest.mark.parametrize(
    "links",
    [
        {"in_node": {"latency_seconds": 0.5}},
        {"between_nodes": {"latency_seconds": 0.5}},
        {"racks": [{"name": "west", "nodes": ["n0"], "gbps": 1e6, "latency_seconds": 0.5}]},
        {"between_islands": {"latency_seconds": 0.5}},
    ],
    ids=lambda links: str(*links),
)
def test_no_sum_is_shorter_than_a_message_on_its_way(links: dict[str, Any]) -> None:
    """Latencies of racks and inside nodes counted for messages alone."""
    on = cluster(("A100-SXM4-80GB", 1, 2), ("MI250X-GCD" if "between_islands" in links else "A100-SXM4-80GB", 1, 2))
    slow = Network(ClusterSpec.model_validate({**on.to_dict(), "links": links}))
    assert slow.all_reduce(slow.group(range(4)), 1.0) >= 2 * 0.5
