"""What crosses the bridge: no more than must, and nothing for a group inside one island."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hethub.communicator.bridge.chunks import chunked
from hethub.communicator.bridge.routes import (
    all_reduce_route,
    carried_pieces,
    gather_route,
    island_parts,
    reduce_scatter_route,
    split_pieces,
)
from hethub.communicator.joining.islands import (
    check_islands,
    islands_by_label,
    lower_bound_bridge_elements,
    parse_islands,
    restrict,
)
from hethub.communicator.measuring import bench
from hethub.communicator.measuring.bound import least_messages
from hethub.kernels.device import Device
from hethub.spec.errors import BadInput
from hethub.spec.ranges import Range, covers_exactly, from_sizes, merge
from tests.support.ranks import run_ranks

LAYOUTS = [
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0], [1, 2, 3]],
    [[3], [0, 2], [1]],
    [[0], [1], [2], [3]],
]


def all_reduce_bytes(world, sizes):
    sent = []
    for size in sizes:
        before = world._context.counters.bridge_bytes()
        dist.all_reduce(torch.ones(size))
        sent.append(world._context.counters.bridge_bytes() - before)
    return sent


@pytest.mark.parametrize("islands", LAYOUTS, ids=str)
@pytest.mark.parametrize("relay", ["gloo", "shm"])
def test_all_reduce_sends_the_least_possible(islands, relay):
    sizes = [65_537, 300_007, 2_000_003]
    sent = run_ranks(4, all_reduce_bytes, sizes, islands=islands, relay=relay)
    for index, size in enumerate(sizes):
        total = sum(of_rank[index] for of_rank in sent)
        assert total == 4 * lower_bound_bridge_elements(islands, size)
    if islands == LAYOUTS[0]:
        # Every rank relays its own part.
        assert max(of_rank[2] for of_rank in sent) <= 4 * (sizes[2] // 2 + 8)


def one_island_groups(world):
    for ranks in world.islands:
        group = world.group(ranks)
        if group is not None:
            dist.all_reduce(torch.ones(100_000), group=group)
            assert type(group) is dist.ProcessGroup
            assert group._get_backend(torch.device("cpu")).name() == "gloo"
    return world.counters()["links"]


def test_a_group_inside_one_island_is_native_and_bridges_nothing():
    assert run_ranks(4, one_island_groups, islands=[[0, 1], [2, 3]]) == [[]] * 4


def bench_rows(world):
    return bench.run(world, sizes=[4096, 1 << 20], repeats=1)


def test_bench_measures_every_path():
    rows = run_ranks(4, bench_rows, islands=[[0, 1], [2, 3]])[0]
    assert {row["path"] for row in rows} == {"world", "island", "flat"}
    assert {row["operation"] for row in rows} == {"all_reduce", "all_gather", "reduce_scatter", "send_receive"}
    large = [row for row in rows if row["bridge_bytes_over_bound"] is not None and row["bytes"] == 1 << 20]
    assert [row["bridge_bytes_over_bound"] for row in large] == [1.0]
    assert all(row["bytes_per_second"] == row["bytes"] / row["seconds"] for row in rows)
    bounded = [(row["operation"], row["path"], row["bytes"]) for row in rows if row["bound_seconds"] is not None]
    assert bounded == [("all_reduce", "world", 4096), ("all_reduce", "world", 1 << 20)]


def test_bench_of_one_rank_sends_no_messages():
    """It timed nothing at all, at 335,544 GB/s."""
    rows = run_ranks(1, bench_rows, islands=[[0]])[0]
    assert {row["operation"] for row in rows} == {"all_reduce", "all_gather", "reduce_scatter"}


def test_bench_of_one_island_of_devices_does_not_wait_in_a_ring():
    rows = run_ranks(3, bench_rows, islands=[[0, 1, 2]], staged_ranks=range(3), timeout_seconds=60)[0]
    assert [row["bytes"] for row in rows if row["operation"] == "send_receive"] == [4096, 1 << 20]


def test_bench_leaves_out_the_first_call_and_gives_legs_per_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def call():
        now[0] += 1.0 if now[0] else 100.0

    assert bench._slowest([[1.0, 5.0, 2.0], [4.0, 2.0, 3.0]]) == 4.0
    assert bench._timed(SimpleNamespace(device=Device(vendor="cpu")), call, 3) == [1.0] * 3
    rows = [
        {"calls": 3, "legs": {"wire": 6.0, "add": 1.0}},
        {"calls": 1, "legs": {"wire": 2.0}},
        {"calls": 9, "legs": {}},
    ]
    assert bench._legs({"operations": rows}) == {"wire": 2.0, "add": 0.25}


@pytest.mark.parametrize("islands", LAYOUTS, ids=str)
def test_the_bound_in_seconds_moves_the_least_bytes(islands):
    messages = least_messages(islands, 1200)
    assert sum(messages.values()) == lower_bound_bridge_elements(islands, 1200)
    of_island = [sum(size for (sender, _), size in messages.items() if sender in island) for island in islands]
    assert len(set(of_island)) == 1


def test_two_islands_tell_each_other_their_partials_and_no_totals():
    islands = [[0, 1], [2]]
    route = all_reduce_route(islands, island_parts(islands, Range(0, 10)), 0)
    assert (route.returns, route.returned) == (False, [])


def more_than_2_gib(world):
    tensor = torch.zeros(2**31 + 1, dtype=torch.uint8)
    tensor[-1] = world.rank + 1
    tensor[0] = 1
    dist.all_reduce(tensor)
    return tensor[0].item(), tensor[-1].item(), tensor[2**30].item()


def available_gib():
    """Memory that could be had without swapping; Linux tells."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("relay", ["gloo", "shm"])
def test_more_than_2_gib(relay):
    """2 ranks, uint8, 2^31 + 1 bytes: beyond what a signed 32-bit count holds."""
    if available_gib() < 10:
        pytest.skip(
            f"needs 10 GiB of free memory for two ranks' 2 GiB tensors and chunks; {available_gib():.1f} are free"
        )
    assert run_ranks(2, more_than_2_gib, islands=[[0], [1]], relay=relay, timeout_seconds=200) == [(2, 3, 0)] * 2


def ranges_of(draw, size):
    return from_sizes(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))


@st.composite
def problems(draw):
    size = draw(st.integers(1, 7))
    labels = draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
    return islands_by_label(labels), ranges_of(draw, size)


@given(problems())
def test_each_island_carries_exactly_what_others_own(problem):
    islands, ranges = problem
    carried = carried_pieces(islands, ranges)
    for island in islands:
        foreign = [ranges[rank] for other in islands if other is not island for rank in other]
        ours = [piece for rank in island for piece in carried[rank]]
        assert sorted(i for p in ours for i in range(*p)) == sorted(i for p in foreign for i in range(*p))
        sizes = [sum(p.size for p in carried[rank]) for rank in island]
        assert max(sizes) - min(sizes) <= 1


def check_routes(islands, routes):
    """Every total is made of one partial per island, and every message that is sent is expected, in the same order."""
    for route in routes:
        made = {p.piece for p in route.partials}
        assert made <= set(route.held[route.rank])
        for partial in route.partials:
            readers = [message for message in partial.readers if message[0] != route.rank]
            alone = partial.only_reader(route.rank)
            assert alone is None or readers == [(alone, partial.piece)]
        for total in route.totals:
            assert all(holder in island for holder, island in zip(total.holders, islands, strict=True))
            for holder in total.holders:
                read = [piece for p in routes[holder].partials for rank, piece in p.readers if rank == route.rank]
                assert sum(piece.contains(total.piece) for piece in read) == 1
        for peer in routes:
            if peer is not route:
                sent = [piece for p in route.partials for rank, piece in p.readers if rank == peer.rank]
                assert sent == [piece for rank, piece in peer.expected if rank == route.rank]
                told = [total.piece for total in route.totals if peer.rank in total.readers]
                assert told == [piece for rank, piece in peer.returned if rank == route.rank]


@given(problems(), st.integers(0, 50))
def test_routes_of_an_all_reduce_fit_together(problem, num_elements):
    islands, ranges = problem
    parts = island_parts(islands, Range(0, num_elements))
    routes = [all_reduce_route(islands, parts, rank) for rank in range(len(ranges))]
    check_routes(islands, routes)
    for island in islands:
        assert covers_exactly([parts[rank] for rank in island], Range(0, num_elements))
    for route in routes:
        settled = [total.piece for total in route.totals] + [piece for _, piece in route.returned]
        assert covers_exactly(settled, route.mine)
    if len(islands) > 2:
        owned = [total.piece for route in routes for total in route.totals]
        assert covers_exactly(owned, Range(0, num_elements))


@given(problems())
def test_routes_of_a_reduce_scatter_fit_together(problem):
    islands, ranges = problem
    routes = [reduce_scatter_route(islands, ranges, rank) for rank in range(len(ranges))]
    check_routes(islands, routes)
    for route in routes:
        assert covers_exactly([total.piece for total in route.totals], ranges[route.rank])


@given(problems())
def test_routes_of_an_all_gather_fit_together(problem):
    islands, ranges = problem
    routes = [gather_route(islands, ranges, rank) for rank in range(len(ranges))]
    for rank, route in enumerate(routes):
        assert route.held == routes[0].held
        for peer, other in enumerate(routes):
            sent = [piece for reader, piece in route.sent if reader == peer]
            assert sent == [piece for source, piece in other.expected if source == rank]
        assert merge(piece for _, piece in route.expected) == merge(route.held[rank][1:])
    for island in islands:
        held = [piece for rank in island for piece in routes[0].held[rank]]
        assert covers_exactly(held, Range(0, ranges[-1].stop))


@given(problems(), st.integers(1, 5))
def test_chunks_cover_every_range_once(problem, num_chunks):
    _, ranges = problem
    for rank, whole in enumerate(ranges):
        assert covers_exactly([chunk[rank] for chunk in chunked(ranges, num_chunks)], whole)


@given(st.lists(st.integers(0, 6), max_size=5), st.integers(1, 4))
def test_split_pieces_keeps_every_integer(sizes, parts):
    pieces = from_sizes(sizes)
    cut = [i for part in split_pieces(pieces, parts) for piece in part for i in range(*piece)]
    assert cut == list(range(sum(sizes)))


def test_islands_of_a_group_keep_their_order():
    assert restrict(((2, 3), (0, 1)), [1, 2, 3]) == ((1, 2), (0,))
    assert parse_islands("0,2|1", 3) == ((0, 2), (1,))
    with pytest.raises(BadInput, match=r"write e\.g\. '0,1"):
        parse_islands("0;1", 2)
    with pytest.raises(BadInput, match="exactly once"):
        check_islands([[0], [0, 1]], 2)
