"""A world over emulated islands: groups, messages and collectives of the runtime."""

import time
from datetime import timedelta
from hashlib import sha256

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import all_gather_by_ranges, reduce_scatter_by_ranges, torch_private
from hethub.spec.ranges import from_sizes
from tests.support.ranks import run_ranks, start_ranks, values

LAYOUTS = {
    "2+2": [[0, 1], [2, 3]],
    "2+2 interleaved": [[0, 2], [1, 3]],
    "1+3": [[0], [1, 2, 3]],
    "three islands": [[0], [1, 3], [2]],
    "one island": [[0, 1, 2, 3]],
}


def values_of(rank, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def all_reduce_everywhere(world, sizes):
    """(result bits on this rank, worst error) for each size and type."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for size in sizes:
            tensor = (values_of(world.rank, size) * 10).to(dtype)
            exact = sum((values_of(r, size) * 10).to(dtype).double() for r in range(world.size))
            dist.all_reduce(tensor)
            error = (tensor.double() - exact).abs().max().item() if size else 0.0
            found.append(
                (
                    str(dtype),
                    size,
                    tensor.view(torch.uint8).tolist() if size < 100 else hash(tensor.double().sum().item()),
                    error,
                )
            )
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_reduce_is_right_and_the_same_everywhere(layout):
    results = run_ranks(4, all_reduce_everywhere, [0, 1, 7, 1009, 300_000], islands=LAYOUTS[layout])
    for result in results[1:]:
        assert [row[:3] for row in result] == [row[:3] for row in results[0]]
    for dtype, size, _, error in results[0]:
        assert error <= {"torch.bfloat16": 0.5}.get(dtype, 1e-4), (dtype, size)


def has_left(world, wait_seconds):
    """Whether the sender finds out that its message has left, though it does not wait."""
    tensor = torch.ones(1000)
    if world.rank == 1:
        world.receive(tensor, 0).wait()
        return True
    sent, end = world.send(tensor, 1), time.monotonic() + wait_seconds
    while not sent.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    return sent.is_completed()


@pytest.mark.parametrize("islands", [[[0], [1]], [[0, 1]]])
def test_a_message_that_has_left_is_known_to_have_left(islands):
    """Gloo told only who waited, so a stage on a CPU held the results of all its microbatches until the step was over."""
    assert run_ranks(2, has_left, 60.0, islands=islands) == [True, True]


def ask_for_the_later_one_first(world):
    """What the receiver gets, who asks for the first message once the sender knows that the second has left."""
    if world.rank == 0:
        sends = [world.send(torch.full((1000,), float(tag)), 1, tag) for tag in (1, 2)]
        sends[1].wait()
        sends.append(world.send(torch.full((1000,), 3.0), 1, 3))
        return [work.wait() for work in sends]
    found = torch.empty(3, 1000)
    for place, tag in enumerate((2, 3, 1)):
        world.receive(found[place], 0, tag).wait()
    return found[:, -1].tolist()


@pytest.mark.parametrize("islands", [[[0], [1]], [[0, 1]]])
def test_a_message_has_left_whether_or_not_those_before_it_have(islands):
    assert run_ranks(2, ask_for_the_later_one_first, islands=islands) == [[True] * 3, [2.0, 3.0, 1.0]]


def by_ranges(world, groups):
    found = {}
    for ranks in groups:
        group = world.group(ranks)
        if group is None:
            continue
        place = ranks.index(world.rank)
        ranges = from_sizes([0, 5, 1000, 300_001][: len(ranks)])
        size = ranges[-1].stop
        flat = values_of(world.rank, size)
        out = torch.empty(ranges[place].size)
        exact = sum(values_of(r, size).double() for r in ranks)
        reduce_scatter_by_ranges(group, flat, ranges, out).wait()
        assert torch.equal(flat, values_of(world.rank, size))
        torch.testing.assert_close(out.double(), exact[ranges[place].start : ranges[place].stop], rtol=1e-5, atol=1e-5)
        whole = torch.zeros(size)
        whole[ranges[place].start : ranges[place].stop] = out
        work = all_gather_by_ranges(group, whole, ranges)
        work.wait()
        torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-5)
        found[tuple(ranks)] = whole.sum().item()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_by_ranges_on_all_kinds_of_groups(layout):
    groups = [[0, 1, 2, 3], [0, 1], [1, 3], [0, 2, 3]]
    results = run_ranks(4, by_ranges, groups, islands=LAYOUTS[layout])
    for ranks in groups:
        assert len({results[rank][tuple(ranks)] for rank in ranks}) == 1


def exchange_messages(world):
    """Everyone sends to everyone under several tags; receives are posted first and in another order."""
    posted = {}
    for tag in (3, 1, 2):
        for peer in range(world.size):
            if peer != world.rank:
                tensor = torch.empty(50_000 * tag)
                posted[peer, tag] = tensor, world.receive(tensor, peer, tag)
    sends = []
    for tag in (1, 2, 3):
        for peer in range(world.size):
            if peer != world.rank:
                sends.append(world.send(torch.full((50_000 * tag,), 100.0 * world.rank + tag), peer, tag))
    for (peer, tag), (tensor, work) in sorted(posted.items()):
        work.wait()
        assert (tensor == 100.0 * peer + tag).all()
    for work in sends:
        work.wait()
    return len(sends)


def test_messages_by_tag():
    counts = run_ranks(3, exchange_messages, islands=[[0, 2], [1]])
    assert counts[0] == counts[1] == counts[2] > 0


def objects(world):
    """What all ranks say, and how many messages this one sent for it."""
    sent, send = [], torch_private.gloo_send
    torch_private.gloo_send = lambda group, tensor, *others: (sent.append(tensor), send(group, tensor, *others))[1]
    found = world.all_gather_objects({"rank": world.rank, "text": "x" * world.rank, "not finite": float("inf")})
    torch_private.gloo_send = send
    return found, len(sent)


@pytest.mark.parametrize(("size", "messages"), [(1, 0), (2, 2), (3, 4), (4, 4), (5, 6)])
def test_objects_on_the_control_lane(size, messages):
    """A step waits for them: their messages are as many as a length and a text in each of log2(ranks) rounds."""
    said = [{"rank": r, "text": "x" * r, "not finite": float("inf")} for r in range(size)]
    assert run_ranks(size, objects) == [(said, messages)] * size


def sums_in_bits(world):
    """A hash of every sum's bytes: sizes below and above what one lane carries (1 MiB of the two ranks' halves)."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for size in (1009, 1_500_001):
            tensor = (values_of(world.rank, size) * 10).to(dtype)
            dist.all_reduce(tensor)
            found.append(sha256(tensor.view(torch.uint8).numpy()).hexdigest())
    return found


def test_lanes_change_no_bit():
    one, two, three = (
        run_ranks(4, sums_in_bits, islands=LAYOUTS["2+2"], relay="gloo", num_lanes=lanes) for lanes in (1, 2, 3)
    )
    assert len(set(one[0])) == 8
    assert one == two == three == [one[0]] * 4


def late_with_a_value(world):
    if world.rank == 1:
        time.sleep(7)
    return world.all_gather_objects(world.rank, timedelta(seconds=60))


def test_values_that_take_unlike_times_are_waited_for_beyond_the_timeout():
    outcomes = start_ranks(2, late_with_a_value, connect={"islands": [[0], [1]], "timeout_seconds": 5})
    assert values(outcomes) == [[0, 1], [0, 1]]


def close_before_sums_are_there(world):
    """The sums of a group that is not the default one, begun when the world is closed."""
    group, tensors = world.group([0, 1]), [torch.ones(4_000_000) for _ in range(30)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors] if world.rank < 2 else []
    world.close()
    for work in works:
        work.wait()
    return {tensor[0].item() for tensor in tensors}


def test_what_is_under_way_in_any_group_is_ended_before_a_world_is_closed():
    sums = run_ranks(3, close_before_sums_are_there, islands=[[0], [1], [2]], timeout_seconds=60)
    assert sums == [{2.0}, {2.0}, {1.0}]
