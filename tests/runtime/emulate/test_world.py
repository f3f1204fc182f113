"""In an emulated world messages and collectives end when the emulated network would have delivered them."""

import gc
import os
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import Rendezvous
from hethub.kernels.device import choose_device
from hethub.runtime.emulate.network import EmulatedClock, Fabric, Transfer
from hethub.runtime.emulate.world import connect_emulated
from tests.support.ranks import start_ranks, values


class SlowLine:
    """A network of one line between any two ranks: a second a kilobyte, and two seconds on the way."""

    num_interfaces = 1

    def message(self, source, target, num_bytes):
        return Transfer(num_bytes / 1000, 2.0, ((0,),))

    def collective(self, name, ranks, num_bytes, parts=()):
        return Transfer(num_bytes / 1000, 2.0, ((0,),))


def on_slow_line(rank, store, scale, function):
    meeting = Rendezvous(
        store=store, rank=rank, size=2, local_rank=rank, local_size=2, address="127.0.0.1", interface=None,
        token="token", launcher="test",
    )  # fmt: skip
    device = choose_device(rank, 2, kind="cpu")
    world = connect_emulated(meeting, SlowLine(), device=device, islands=[[0, 1]], timeout_seconds=60)
    world.clock.scale = scale
    world.barrier()
    origin = world.all_gather_objects(monotonic())[0]
    world.clock.at = max(monotonic(), origin)
    times, seen = {"messages": messages, "collectives": collectives, "groups": groups}[function](world)
    world.close()
    return [(at - origin) / scale for at in times], seen


def messages(world):
    """Two messages of a kilobyte, one after the other on the line; when the sender is through with both, and the
    receiver with each, and whether it saw that before the clock did."""
    if world.rank == 0:
        works = [world.send(torch.zeros(250), 1, tag) for tag in (0, 1)]
        for work in works:
            work.wait()
        return [world.clock.at], False
    works = [world.receive(torch.empty(250), 0, tag) for tag in (0, 1)]
    ends, early = [], False
    for work in works:
        work.wait()
        early |= monotonic() < world.clock.at
        ends.append(world.clock.at)
    return ends, early


def collectives(world):
    """Rank 1 computes for ten seconds before it joins two, begun at once; when each is through."""
    world.clock.begin(10.0 * world.rank)
    world.clock.end()
    summed, ends = [torch.full((250,), float(world.rank + 1)) for _ in range(2)], []
    for work in [dist.all_reduce(one, group=world.group([0, 1]), async_op=True) for one in summed]:
        work.wait()
        ends.append(world.clock.at)
    return ends, torch.cat(summed).tolist()


def held():
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))


def groups(world):
    """Groups made, used and destroyed; what was held when two were gone, and all."""
    for number in range(8):
        group = dist.new_group([0, 1], backend="hethub")
        dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        if number == 1:
            early = held()
    deadline = monotonic() + 10
    while held() > early and monotonic() < deadline:
        sleep(0.1)
    return [], (early, held())


def through(function, scale=0.005):
    return values(start_ranks(2, on_slow_line, scale, function, timeout_seconds=60))


def test_messages_take_the_line_in_turn_and_are_there_a_latency_later():
    ((sent,), _), ((first, second), early) = through("messages")
    assert not early
    slack = 400  # emulated seconds that the start of this test may take, 2 real ones
    assert 3.0 <= first <= 3.0 + slack
    assert second - first == pytest.approx(1.0, abs=1e-3)
    assert sent == pytest.approx(second - 2.0, abs=1e-3)  # what is on its way may be overwritten


def test_a_collective_starts_with_its_last_member_and_ends_for_all_at_once():
    (ends, first), (others, second) = through("collectives")
    assert ends == others
    assert ends[0] >= 13.0
    assert first == second == [3.0] * 500


def test_a_group_runs_its_collectives_one_at_a_time():
    """The second held the line behind the first and was there a latency later: both hid one latency."""
    (ends, _), _ = through("collectives")
    assert ends[1] - ends[0] == pytest.approx(3.0, abs=1e-3)


@pytest.fixture
def fabric():
    meeting = Rendezvous(
        store=dist.HashStore(), rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", interface=None,
        token="token", launcher="test",
    )  # fmt: skip
    opened = Fabric(meeting, 3)
    yield opened
    opened.close()


def test_who_is_first_by_emulated_time_goes_first_whoever_asks_first(fabric):
    """A rank asks when it starts an action, at whose end it sends: others' earlier messages waited behind that."""
    assert fabric.reserve([(0,)], 10.0, 5.0) == 10.0
    assert fabric.reserve([(0,)], 3.0, 2.0) == 3.0
    assert fabric.reserve([(0,)], 4.0, 5.0) == 5.0
    assert fabric.reserve([(0,)], 4.0, 0.5) == 15.0
    assert fabric.reserve([(1,)], 16.0, 2.0) == 16.0
    assert fabric.reserve([(0,), (1,)], 9.5, 2.0) == 18.0  # the first gap that both have
    assert fabric.reserve([(0, 1, 2)], 10.0, 1.0) == 10.0  # the one that is free


def test_an_interface_keeps_its_last_spans(fabric):
    for number in range(100):
        assert fabric.reserve([(0,)], number, 1.0) == number
    assert fabric.reserve([(0,)], 70.5, 1.0) == 100.0


def test_groups_that_were_destroyed_leave_nothing():
    for _, (early, late) in through("groups"):
        assert late <= early


def test_a_clock_adds_up_what_it_computes_and_never_runs_behind():
    clock = EmulatedClock(scale=1e-4)
    start = clock.at
    for _ in range(3):
        clock.begin(10.0)
        clock.end()
    clock.advance(start)  # something that came long ago
    assert clock.at == pytest.approx(start + 3e-3)
    assert monotonic() >= clock.at
