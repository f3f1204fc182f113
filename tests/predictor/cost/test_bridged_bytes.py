"""What islands exchange is priced as the runtime's routes send it, whatever their sizes, their number and the state shares."""

from collections.abc import Iterable, Sequence

import pytest

from hethub.communicator.bridge.routes import all_reduce_route, gather_route, island_parts, reduce_scatter_route
from hethub.predictor.cost.groups import Exchanged, Group, Operation
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.resources import IN, OUT, Resource
from hethub.spec.cluster import ClusterSpec
from hethub.spec.ranges import Range, from_sizes, split

SIZES = [(8, 8), (24, 8), (8, 2), (40, 8), (8, 8, 8), (8, 8, 8, 8)]
MAKERS = ("A100-SXM4-80GB", "MI250X-GCD", "Ascend-910B(A2)", "Gaudi2")


def islands_of(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(range(part.start, part.stop)) for part in from_sizes(list(sizes))]


def exchanged(islands: list[tuple[int, ...]], ranges: list[Range], operation: Operation) -> list[Exchanged]:
    """By rank, elements over the bridge that the runtime's routes name; of an all-reduce both halves."""
    whole, found = Range(0, ranges[-1].stop), []
    for rank, island in [(rank, own) for own in islands for rank in own]:
        sent = received = 0
        if operation == "all_gather":
            gather = gather_route(islands, ranges, rank)
            sent += sum(piece.size for reader, piece in gather.sent if reader not in island)
            received += sum(piece.size for owner, piece in gather.expected if owner not in island)
        else:
            if operation == "all_reduce":
                route = all_reduce_route(islands, island_parts(islands, whole), rank)
                sent += sum(total.piece.size * len(total.readers) for total in route.totals)
                received += sum(piece.size for _, piece in route.returned)
            else:
                route = reduce_scatter_route(islands, ranges, rank)
            sent += sum(piece.size for own in route.partials for reader, piece in own.readers if reader not in island)
            received += sum(piece.size for _, piece in route.expected)
        found.append(Exchanged(sent / whole.size, received / whole.size))
    return found


def together(ranks: Iterable[Exchanged]) -> Exchanged:
    return Exchanged(*map(sum, zip(*ranks, strict=True)))


def network(sizes: Sequence[int]) -> Network:
    nodes = [
        {"name": maker, "accelerator": maker, "count": -(-size // 8), "accelerators": min(size, 8), "nics": 8, "gbps_per_nic": 200}
        for maker, size in zip(MAKERS, sizes, strict=False)
    ]  # fmt: skip
    return Network(ClusterSpec.model_validate({"name": "bridged", "nodes": nodes}))


def of_island(found: Network, group: Group, operation: Operation, island: str) -> Exchanged:
    """As priced, of all its machines."""
    machines = [machine for machine, _ in group.machines if found.machines[machine].island == island]
    return together(group.exchanged(operation, island, machine) for machine in machines)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_reduce"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_islands_exchange_what_the_routes_send(sizes: tuple[int, ...], operation: Operation) -> None:
    """Half of an all-reduce of two islands was taken for each: 24 + 8 ranks were 1.5 times too cheap, 8 + 8 + 8 cost
    1.5 times what they send."""
    islands, found = islands_of(sizes), network(sizes)
    group = found.group(range(sum(sizes)))
    routed = exchanged(islands, split(840 * group.size, group.size), operation)
    for (island, _), ranks in zip(group.islands, islands, strict=True):
        halves = 2 if operation == "all_reduce" else 1
        own, priced = together(routed[rank] for rank in ranks), of_island(found, group, operation, island)
        assert halves * priced.sent == pytest.approx(own.sent, rel=1e-2)
        assert halves * priced.received == pytest.approx(own.received, rel=1e-2)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_reduce"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_leaves_an_islands_places_is_what_it_sends(sizes: tuple[int, ...], operation: Operation) -> None:
    """Every machine a place of its own: what they send each other is in sum what their islands exchange."""
    found = network(sizes)
    group = found.group(range(sum(sizes)))
    place_of = {machine: (found.machines[machine].island, str(machine)) for machine, _ in group.machines}
    between = group.exchanged_between(operation, place_of)
    for island, _ in group.islands:
        own = {place for vendor, place in place_of.values() if vendor == island}
        sent = sum(part for (here, _), part in between.items() if here in own)
        received = sum(part for (_, there), part in between.items() if there in own)
        assert (sent, received) == pytest.approx(of_island(found, group, operation, island))


def test_named_state_shares_move_what_islands_exchange() -> None:
    """Two ranks of a slow island that own little: it sends nearly all, and receives little."""
    found = network((8, 2))
    group = found.group(range(10), {**dict.fromkeys(range(8), 0.98 / 8), 8: 0.01, 9: 0.01})
    ranges = from_sizes([12250] * 8 + [1000] * 2)
    islands = islands_of((8, 2))
    routed = exchanged(islands, ranges, "reduce_scatter")
    for (island, _), ranks in zip(group.islands, islands, strict=True):
        own = together(routed[rank] for rank in ranks)
        assert of_island(found, group, "reduce_scatter", island) == pytest.approx(own, rel=1e-3)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("sizes", [(16, 8), (16, 8, 8)], ids=str)
def test_ranks_that_own_more_than_their_islands_others_exchange_more(
    sizes: tuple[int, ...], operation: Operation
) -> None:
    """Every rank of an island was taken to exchange as much: of a machine that owns 7.5 times as much as the other 0.57."""
    elements = [600] * 6 + [1800, 600] + [100] * 8 + [300] * sum(sizes[1:])
    ranges, found = from_sizes(elements), network(sizes)
    group = found.group(range(len(elements)), dict(enumerate(elements)))
    routed = exchanged(islands_of(sizes), ranges, operation)
    place_of = {machine: (found.machines[machine].island, str(machine)) for machine, _ in group.machines}
    between = group.exchanged_between(operation, place_of)
    for machine, (island, place) in place_of.items():
        of_ranks = [own for own, at in zip(routed, found.places, strict=True) if at.machine == machine]
        every = together(of_ranks)
        assert group.exchanged(operation, island, machine) == pytest.approx(every, rel=1e-2)
        most = [max(own[way] for own in of_ranks) for way in (0, 1)]
        assert group.exchanged_at_most(operation, island, machine) == pytest.approx(most, rel=1e-2)
        left = sum(part for (here, _), part in between.items() if here == place)
        entered = sum(part for (_, there), part in between.items() if there == place)
        assert (left, entered) == pytest.approx(every, rel=1e-2)
    staged = max(map(max, routed)) * 8e9 / found.staging_rate
    assert found.reduce_scatter(group, 8e9, operation=operation) == pytest.approx(staged, rel=1e-2)


def test_a_bridged_sum_takes_as_long_as_its_busiest_direction() -> None:
    """Of 24 + 8 ranks the eight send three quarters, each an eighth of them, and receive one."""
    found = network((24, 8))
    group = found.group(range(32))
    assert found.reduce_scatter(group, 8e9) == pytest.approx(0.75 * 8e9 / 8 / found.staging_rate, rel=0.01)
    assert found.all_reduce(group, 8e9) == pytest.approx(2 * 0.5 * 8e9 / 8 / found.staging_rate, rel=0.01)


def test_rings_inside_islands_go_round_their_own_ranks() -> None:
    """Of eight ranks each link carries seven eighths, whatever the other islands have."""
    links = {"in_node": {"gbytes_per_second": 1.0}, "staging": {"gbytes_per_second": 1e4}}
    found = Network(ClusterSpec.model_validate({**network((8, 8)).cluster.to_dict(), "links": links}))
    ring = 7 / 8 * 8e9 / (1e9 * found.fit["pcie_fraction"])
    assert found.reduce_scatter(found.group(range(16)), 8e9) == pytest.approx(ring, rel=0.01)


def test_links_carry_either_way_what_the_routes_send() -> None:
    found = network((24, 8))
    group, slow = found.group(range(32)), 3  # the machine of the eight
    reduced, gathered = (found.ring_bytes(group, 1.0, operation) for operation in ("reduce_scatter", "all_gather"))
    for out, into in ((reduced, gathered), (gathered, reduced)):
        assert out[Resource("cards", slow, OUT)] == into[Resource("cards", slow, IN)]
    assert reduced[Resource("cards", slow, OUT)] == pytest.approx(0.75)
    assert reduced[Resource("cards", slow, IN)] == pytest.approx(0.25)
    assert found.rank_bytes(group, 31, Resource("staging", 31, OUT), 8.0, "reduce_scatter") == pytest.approx(0.75)


def test_what_islands_exchange_passes_the_racks_and_regions_between_them() -> None:
    """A sum over two makers took no longer over 1 Gbit/s between their racks or regions than over 1,000."""
    fast = network((24, 8))
    group = fast.group(range(32))
    moved: dict[Operation, float] = {"reduce_scatter": 0.75, "all_gather": 0.75, "all_reduce": 0.5}
    names = [node.name for node in fast.cluster.nodes]
    racks = [{"name": name, "nodes": [name], "gbps": 1.0} for name in names]
    regions = {"names": names, "of_node": dict(zip(names, names, strict=True)), "gbps": [[1.0] * 2] * 2}
    for kind, links in (("rack", {"racks": racks}), ("rack", {"racks": racks[:1]}), ("regions", {"regions": regions})):
        slow = Network(ClusterSpec.model_validate({**fast.cluster.to_dict(), "links": links}))
        for operation, part in moved.items():
            carried = {on: own for on, own in slow.ring_bytes(group, 8e9, operation).items() if on.kind == kind}
            assert max(carried.values()) == pytest.approx(part * 8e9)
            seconds = max(num_bytes / slow.rate(on) for on, num_bytes in carried.items())
            for sharing in (1, 8):
                found = slow.reduce_scatter(group, 8e9, sharing, operation)
                assert found == pytest.approx(sharing * seconds, rel=0.01)


def test_a_host_limits_what_its_ranks_stage_of_a_sum() -> None:
    """Of 8 + 8 ranks each island tells and hears half, all of it through one host of 4 GB/s; of 16 groups only as many share
    it as there are accelerators."""
    links = {"staging": {"gbytes_per_second": 1e3, "per_host_gbytes_per_second": 4}}
    found = Network(ClusterSpec.model_validate({**network((8, 8)).cluster.to_dict(), "links": links}))
    every, pair = found.group(range(16)), found.group([0, 8])
    assert found.reduce_scatter(every, 8e10) == pytest.approx(0.5 * 8e10 / 4e9, rel=1e-3)
    assert found.reduce_scatter(pair, 8e10, 8) == pytest.approx(8 * 0.5 * 8e10 / 4e9, rel=1e-3)
    assert found.reduce_scatter(pair, 8e10, 16) == found.reduce_scatter(pair, 8e10, 8)
    carried = found.ring_bytes(every, 8e10, "reduce_scatter")
    assert {on.kind for on in carried} == {"cards", "host"}
    assert set(carried.values()) == {0.5 * 8e10}


def test_an_islands_ring_goes_as_its_group_is_linked() -> None:
    """Two neighbours of an A6000's bridge have NVLink, two others PCIe alone, whoever is on the other island."""
    nodes = [
        {"name": name, "accelerator": name, "accelerators": 4, "nics": 8, "gbps_per_nic": 1e5}
        for name in ("RTX-A6000", "MI250X-GCD")
    ]
    links = {"staging": {"gbytes_per_second": 1e4}}
    found = Network(ClusterSpec.model_validate({"name": "pairs", "nodes": nodes, "links": links}))
    on_bridge, over_host = (found.reduce_scatter(found.group(ranks), 1e11) for ranks in ([0, 1, 4], [0, 2, 4]))
    pcie = 0.5 * 1e11 / (32e9 * found.fit["pcie_fraction"])  # fourth generation
    assert over_host == pytest.approx(pcie, rel=1e-3)
    assert on_bridge < 0.3 * over_host


def test_rings_inside_islands_share_the_cards_with_what_islands_exchange() -> None:
    """Two ranks of each of two makers, every one on a machine of its own: of a sum half of the bytes go round the island's ring, and a
    quarter to the other island, both over the machine's card. The longer of the two was what a sum took."""
    nodes = [
        {"name": name, "accelerator": name, "count": 2, "accelerators": 1, "gbps_per_nic": 10} for name in MAKERS[:2]
    ]
    links = {"staging": {"gbytes_per_second": 1e3}}
    found = Network(ClusterSpec.model_validate({"name": "cards", "nodes": nodes, "links": links}))
    group = found.group(range(4))
    for way in (OUT, IN):
        assert found.ring_bytes(group, 8e9, "reduce_scatter")[Resource("cards", 0, way)] == 0.75 * 8e9
    assert found.reduce_scatter(group, 8e9) == pytest.approx(0.75 * 8e9 / found.rate(Resource("cards", 0)), rel=1e-3)
    apart = {**links, "between_islands": {"gbps_per_node": 10}}
    found = Network(ClusterSpec.model_validate({"name": "bridge", "nodes": nodes, "links": apart}))
    assert found.reduce_scatter(group, 8e9) == pytest.approx(0.5 * 8e9 / found.rate(Resource("cards", 0)), rel=1e-3)
