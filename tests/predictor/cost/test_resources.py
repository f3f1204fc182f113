"""What lies on the way between two ranks: each resource by its own rate, each way by all that it passes."""

import pytest

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.profile import LinkTiming, ProfileSpec
from hethub.predictor.cost.resources import IN, OUT, Resource
from hethub.spec.cluster import ClusterSpec
from tests.predictor.plans import TINY

FIT = packaged().links
A100 = {"accelerator": "A100-SXM4-80GB", "accelerators": 8, "nics": 8, "gbps_per_nic": 200}
MI250X = {**A100, "accelerator": "MI250X-GCD"}
IN_PAIRS = {**A100, "accelerator": "RTX-A6000"}  # NVLink between two neighbours, PCIe beyond them


def network(*nodes: dict[str, object], profile: ProfileSpec | None = None, **links: object) -> Network:
    named = [{"name": f"n{i}", **node} for i, node in enumerate(nodes)]
    return Network(ClusterSpec.model_validate({"name": "test", "nodes": named, "links": links}), profile=profile)


def measured(level: str, operation: str, gbytes_per_second: float) -> ProfileSpec:
    layer = {"micro_batch": 1, "seq_len": 16, "forward_seconds": 1.0, "backward_seconds": 2.0}
    devices = [{"accelerator": "A100-SXM4-80GB", "precision": "bf16", "layers": [layer]}]
    link = LinkTiming(level=level, operation=operation, latency_seconds=1e-3, gbytes_per_second=gbytes_per_second)  # type: ignore[arg-type]
    about = {"date": "2026-01-01", "hethub": "0", "software": "none", "model": TINY, "devices": devices}
    return ProfileSpec.model_validate({**about, "links": [link]})


def test_where_ranks_are_joined_all_of_a_group_must_be() -> None:
    """One pair on its bridge does not make up for another that is apart, nor a node with a switch for one without."""
    found = network({**IN_PAIRS, "count": 2}, A100)
    assert found.joined([0, 1, 8, 9, 16, 23])
    assert not found.joined([0, 1, 8, 10])
    assert not found.joined([1, 2])


def test_a_bridge_joins_places_of_a_node_whatever_their_ranks() -> None:
    """Behind a node of one accelerator the first two of the next are ranks 1 and 2; each pair has a way of its own."""
    found = network({**A100, "accelerators": 1}, IN_PAIRS)
    assert found.joined([1, 2])
    assert not found.joined([2, 3])
    assert found.link(1, 2).seconds_per_byte < found.link(2, 3).seconds_per_byte


def test_a_given_link_joins_all_of_its_node() -> None:
    """What a cluster file says of the links inside nodes stands for the data sheet's bridges of two."""
    assert network(IN_PAIRS, in_node={"gbytes_per_second": 100}).joined([0, 7])
    assert not network(IN_PAIRS).joined([0, 7])


def test_the_machine_with_most_of_a_group_says_how_many_share_it() -> None:
    """Two of its ranks on one machine of eight, one on another: four such groups fit on the first."""
    found = network({**A100, "count": 2})
    assert found.sharing(found.group([0, 1, 8])) == 4


def test_a_message_alone_is_as_slow_as_the_slowest_on_its_way() -> None:
    """An uplink of 10 Gbit/s behind cards of 200; latencies inside the node and between nodes add up."""
    racks = [{"name": "west", "nodes": ["n0"], "gbps": 10}]
    found = network(A100, A100, racks=racks, between_nodes={"latency_seconds": 0.25})
    alone = found.path(0, 8).alone
    assert alone.seconds_per_byte == pytest.approx(8 / (10e9 * FIT["between_nodes_fraction"]))
    assert alone.latency_seconds == pytest.approx(0.25 + FIT["in_node_latency_seconds"])


def test_a_message_between_islands_leaves_one_end_and_enters_the_other() -> None:
    links = {"staging": {"per_host_gbytes_per_second": 24}, "between_islands": {"gbps_per_node": 100}}
    resources = network(A100, MI250X, **links).path(0, 8).resources
    ends = {"staging": (0, 8), "host": (0, 1), "bridge": (0, 1)}
    assert set(resources) == {
        Resource(kind, end, way) for kind, own in ends.items() for end, way in zip(own, (OUT, IN), strict=True)
    }


def test_each_way_between_regions_has_its_own_rate() -> None:
    regions = {"names": ["a", "b"], "of_node": {"n0": "a", "n1": "b"}, "gbps": [[100, 10], [1, 100]]}
    found = network(A100, A100, regions=regions)
    assert found.path(0, 8).alone.seconds_per_byte == pytest.approx(8 / 10e9)
    assert found.path(8, 0).alone.seconds_per_byte == pytest.approx(8 / 1e9)


def test_no_resource_of_the_bridge_is_slower_than_a_message_over_it_was() -> None:
    """Measured 40 GB/s, while the cluster file promises 12 of staging, 24 of a host and 100 Gbit/s of the bridge."""
    links = {
        "staging": {"gbytes_per_second": 12, "per_host_gbytes_per_second": 24},
        "between_islands": {"gbps_per_node": 100},
    }
    found = network(A100, MI250X, profile=measured("between_islands", "send", 40), **links)
    assert {kind: found.rate(Resource(kind, 0, OUT)) for kind in ("staging", "host", "bridge")} == {
        "staging": 40e9, "host": 40e9, "bridge": 40e9,
    }  # fmt: skip
    assert found.link(0, 8).seconds_per_byte == pytest.approx(1 / 40e9)


def test_a_sum_between_islands_takes_what_one_was_measured_to() -> None:
    """Half of 1e-3 s, and of two ranks half of the bytes at 0.5 GB/s, or at 2, whatever was promised; what was measured between
    nodes of one island says nothing of it."""
    links = {"staging": {"gbytes_per_second": 1}}
    for rate in (0.5, 2.0):
        found = network(A100, MI250X, profile=measured("between_islands", "all_reduce", rate), **links)
        assert found.reduce_scatter(found.group([0, 8]), 1e9) == pytest.approx(0.5e-3 + 0.5 * 1e9 / (rate * 1e9))
    other = network(A100, MI250X, profile=measured("between_nodes", "all_reduce", 1e-3), **links)
    assert other.reduce_scatter(other.group([0, 8]), 1e9) == network(A100, MI250X, **links).reduce_scatter(
        other.group([0, 8]), 1e9
    )


def test_a_sum_between_islands_of_one_machine_each_has_their_cards_to_itself() -> None:
    """Four ranks of each on 8 GB/s of cards: half of the bytes go either way; the rings inside take NVLink."""
    one = {**A100, "nics": 1, "gbps_per_nic": 64}
    for count, times in ((1, 0.5), (2, 0.5 / 2 + 7 / 8)):  # over two machines rings take the cards too
        nodes = [{**own, "accelerators": 4, "count": count} for own in (one, {**one, "accelerator": "MI250X-GCD"})]
        found = network(*nodes, staging={"gbytes_per_second": 1e3})
        group, rate = found.group(range(8 * count)), 8e9 * FIT["between_nodes_fraction"]
        assert found.reduce_scatter(group, 1e12) == pytest.approx(times * 1e12 / rate, rel=1e-3)


def test_a_sum_between_islands_crosses_regions_once_and_shares_them_with_like_ones() -> None:
    """Two machines and four, apart by 0.5 s, with 8 Gbit/s one way: what the four own goes there. A group on one of the
    two has the other's beside it, and so half of the rate."""
    regions = {"names": ["a", "b"], "of_node": {"n0": "a", "n1": "b"}, "gbps": [[1e5, 8], [1e5, 1e5]],
               "latency_seconds": [[0.0, 0.5], [0.5, 0.0]]}  # fmt: skip
    nodes = {**A100, "accelerators": 1, "count": 2}, {**MI250X, "accelerators": 1, "count": 4}
    found, plain = network(*nodes, regions=regions), network(*nodes)
    for ranks, part in ((range(6), 4 / 6), ((0, 2), 2 * 0.5)):
        group = found.group(ranks)
        empty = found.reduce_scatter(group, 1e-6)
        assert empty == pytest.approx(0.5 + plain.reduce_scatter(group, 1e-6))
        assert found.reduce_scatter(group, 1e12) - empty == pytest.approx(part * 1e12 / 1e9)


def test_a_ring_over_one_node_without_own_links_waits_for_its_host() -> None:
    """T4s meet through their host, A100s beside them do not: each pays for the host's as well."""
    found = network({**A100, "accelerator": "T4"}, A100)
    group = found.group([0, 1, 8, 9])
    steps = 3 * max(FIT["collective_step_seconds"], found.cluster.links.between_nodes.latency_seconds)
    assert found.reduce_scatter(group, 1e-6) == pytest.approx(FIT["hosted_latency_seconds"] * 1 + steps)


def test_a_ring_pays_for_its_neighbours_that_are_furthest_apart() -> None:
    """West to east 0.5 s, either to the middle none: the way back from its end to its beginning counts, with its rate."""
    zeros, rates = [[0.0] * 3 for _ in range(3)], [[1000.0] * 3 for _ in range(3)]
    zeros[2][0], rates[2][0] = 0.5, 1.0
    of_node = {"n0": "a", "n1": "b", "n2": "c"}
    regions = {"names": ["a", "b", "c"], "of_node": of_node, "gbps": rates, "latency_seconds": zeros}
    one = {**A100, "accelerators": 1}
    found, plain = network(one, one, one, regions=regions), network(one, one, one)
    group = found.group([0, 1, 2])
    assert found.reduce_scatter(group, 1e-6) == pytest.approx(0.5 + plain.reduce_scatter(group, 1e-6))
    ring = 2 / 3 * 1e9 / (1e9 / 8)
    assert found.reduce_scatter(group, 1e9) - found.reduce_scatter(group, 1e-6) == pytest.approx(ring)


@pytest.mark.parametrize(
    ("ranks", "seconds"), [([0, 8], 0.75), ([0, 1, 8], 0.5 + 0.75), ([0, 8, 16], 0.5 + 0.875), ([0, 8, 16, 17], 0.5 + 0.125 + 0.875)]
)  # fmt: skip
def test_a_part_crosses_all_of_a_ring_but_one_step(ranks: list[int], seconds: float) -> None:
    """There 0.5 s, back 0.75, to or from a rack 0.125 more: with three ranks in two regions a part crosses both ways."""
    regions = {"names": ["a", "b"], "of_node": {"n0": "a", "n1": "b", "n2": "b"}, "gbps": [[1e4, 1e4]] * 2,
               "latency_seconds": [[0.0, 0.5], [0.75, 0.0]]}  # fmt: skip
    racks = [{"name": "far", "nodes": ["n2"], "gbps": 1e4, "latency_seconds": 0.125}]
    found, plain = network(A100, A100, A100, regions=regions, racks=racks), network(A100, A100, A100)
    both = [own.reduce_scatter(own.group(ranks), 1e-6) for own in (found, plain)]
    assert both[0] - both[1] == pytest.approx(seconds)


def test_a_ring_takes_uplinks_and_cards_and_no_port() -> None:
    """Of four ranks on two machines three quarters of the bytes, out of each machine and in, and over the one rack."""
    found = network(A100, A100, racks=[{"name": "west", "nodes": ["n0"], "gbps": 10}])
    group, ring = found.group([0, 1, 8, 9]), 0.75 * 8e9
    assert found.ring_bytes(group, 8e9, "reduce_scatter") == {
        **{Resource("cards", machine, way): ring for machine in (0, 1) for way in (OUT, IN)},
        Resource("rack", "west", OUT): ring,
    }
    assert found.rank_bytes(group, 0, Resource("port", 0, OUT), 8e9, "reduce_scatter") == 0.0
    inside = found.group([0, 1, 2, 3])
    assert found.ring_bytes(inside, 8e9, "reduce_scatter") == {}
    assert found.rank_bytes(inside, 0, Resource("port", 0, OUT), 8e9, "reduce_scatter") == ring
