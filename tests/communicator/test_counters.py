"""What was communicated: bridged operations and their legs in torch's profiler and in the counters."""

import torch
import torch.distributed as dist

from hethub.communicator.counters import Counters, Leg, LegClock, since
from tests.support.ranks import run_ranks


def profiled_names(world):
    with torch.autograd.profiler.profile() as profile:
        dist.all_reduce(torch.ones(1000))
        dist.broadcast(torch.ones(10), 0, async_op=True).wait()
    return {event.name: event.is_async for event in profile.function_events}


def test_operations_are_profiler_ranges():
    for names in run_ranks(2, profiled_names, islands=[[0], [1]]):
        assert "hethub:all_reduce" in names  # its caller waits: it runs in the caller's thread
        assert names["hethub:broadcast"] is True
        assert {"hethub:wire", "hethub:add"} <= set(names)  # its legs, where they run in the profiled thread


def test_seconds_and_legs_add_up_also_since_then_and_of_what_is_destroyed():
    counters = Counters()
    counters.count_operation("a group", "all_reduce", 8, 2.0, {"wire": 1.5})
    before = counters.to_dict()
    counters.count_operation("a group", "all_reduce", 8, 1.0, {"wire": 0.5, "add": 0.25})
    (news,) = since(before, counters.to_dict())["operations"]
    assert (news["calls"], news["seconds"], news["legs"]) == (1, 1.0, {"wire": 0.5, "add": 0.25})
    for _ in range(2):
        (row,) = counters.to_dict()["operations"]
        assert (row["calls"], row["seconds"], row["legs"]) == (2, 3.0, {"wire": 2.0, "add": 0.25})
        counters.fold("a group")


def test_seconds_of_a_leg_are_taken_once():
    clock = LegClock()
    with clock(Leg.WIRE):
        pass
    assert set(clock.take()) == {"wire"}
    assert clock.take() == {}


def counted(world):
    everybody, pair = world.default_group, world.group([0, 3])
    before = world.counters()
    dist.all_reduce(torch.ones(300_000))
    if pair is not None:
        dist.all_gather([torch.empty(5), torch.empty(5)], torch.ones(5), group=pair)
    world.barrier()
    return since(before, world.counters()), everybody._label


def test_counters_by_operation_group_leg_and_link():
    for rank, (news, label) in enumerate(run_ranks(4, counted, islands=[[0, 1], [2, 3]])):
        operations = {(row["group"], row["operation"]): row for row in news["operations"]}
        reduce = operations.pop((label, "all_reduce"))
        assert (reduce["calls"], reduce["bytes"]) == (1, 1_200_000)
        assert {"island_reduce_scatter", "wire", "add", "island_all_gather"} <= set(reduce["legs"])
        assert 0 < sum(reduce["legs"].values()) <= reduce["seconds"]
        assert [row["calls"] for row in operations.values()] == ([1] if rank in (0, 3) else [])
        ours = [link for link in news["links"] if link["group"] == label]
        crossed = {link["peer"]: link["bytes"] for link in ours if link["level"] == "bridge"}
        assert crossed == {(rank + 2) % 4: 600_000}
        assert {link["peer"] for link in ours if link["level"] == "island"} == {rank ^ 1}


def test_destroyed_groups_keep_their_totals_but_not_their_rows():
    counters = Counters()
    counters.count_operation("stays", "all_reduce", 10, 1.0, {"wire": 0.5})
    for number in range(5):
        counters.count_operation(f"group {number}", "all_reduce", 100, 2.0, {"wire": 1.0})
        counters.count_sent(f"group {number}", 1, "shm", is_bridge=True, num_bytes=7)
        before = counters.to_dict()
        counters.fold(f"group {number}")
        assert since(before, counters.to_dict()) == {"operations": [], "links": []}
    counts = counters.to_dict()
    assert [(row["group"], row["calls"], row["bytes"]) for row in counts["operations"]] == [
        ("groups that were destroyed", 5, 500), ("stays", 1, 10)
    ]  # fmt: skip
    assert counts["operations"][0]["legs"] == {"wire": 5.0}
    assert [(row["messages"], row["bytes"]) for row in counts["links"]] == [(5, 35)]
    assert counters.bridge_bytes() == 35


def test_a_group_made_anew_under_a_name_has_its_own_counts():
    """torch names groups by their members where asked to, so a second one has the first one's name."""
    counters = Counters()
    for _ in range(3):
        counters.count_operation("a name", "all_reduce", 100, 2.0, {"wire": 1.0})
        counters.count_sent("a name", 1, "shm", is_bridge=True, num_bytes=7)
    before = counters.to_dict()
    counters.fold("a name")
    counters.count_operation("a name", "all_reduce", 10, 5.0, {"wire": 0.5})
    counters.count_sent("a name", 1, "shm", is_bridge=True, num_bytes=2)
    news = since(before, counters.to_dict())
    assert news == {
        "operations": [
            {
                "group": "a name",
                "operation": "all_reduce",
                "calls": 1,
                "bytes": 10,
                "seconds": 5.0,
                "legs": {"wire": 0.5},
            }
        ],
        "links": [{"group": "a name", "peer": 1, "relay": "shm", "level": "bridge", "messages": 1, "bytes": 2}],
    }


def sent_over_the_bridge_by_a_pair(world):
    pair, before = world.group([1, 2]), world._context.counters.bridge_bytes()
    if pair is not None:
        dist.all_reduce(torch.ones(10), group=pair)
    return world._context.counters.bridge_bytes() - before


def test_what_a_group_sends_to_another_island_is_counted_as_such():
    """Rank 2 is the group's rank 1, and rank 1 its rank 0."""
    assert run_ranks(4, sent_over_the_bridge_by_a_pair, islands=[[0, 1], [2, 3]]) == [0, 40, 40, 0]
