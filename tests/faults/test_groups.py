"""Groups made, used and destroyed leave nothing: as many descriptors, threads and blocks as after the first ten."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import all_gather_by_ranges
from hethub.spec.ranges import split
from tests.support.ranks import start_ranks, values

FIRST = 10
RESIDENT_BYTES_PER_GROUP = 20_000  # names, counters, and what torch's store keeps of a group: it forgets no key


def held():
    """Descriptors, threads (the native libraries' too) and blocks of shared memory of this process; resident bytes."""
    maps = Path("/proc/self/maps").read_text().count("memfd:hethub")
    threads = len(os.listdir("/proc/self/task"))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), threads, maps, resident


def use(group, number):
    """A bridged or native sum, one that takes shared memory, an uneven collective, a message."""
    dist.all_reduce(torch.ones(1000), group=group)
    dist.all_reduce(torch.ones(50_000), group=group)
    flat = torch.zeros(10)
    all_gather_by_ranges(group, flat, split(10, 2), async_op=False)
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1, group=group)
    else:
        dist.recv(torch.empty(3), 0, group=group)


def make_and_destroy(rank, store, num_groups):
    """What is held after the first ten and after all, once it has settled."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    for number in range(num_groups):
        if number == FIRST:
            gc.collect()
            time.sleep(0.5)
            first = held()
        group = dist.new_group([0, 1])
        use(group, number)
        dist.destroy_process_group(group)
        del group
    deadline = time.monotonic() + 10
    while any(now > before for now, before in zip(held()[:3], first[:3], strict=True)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.1)
    last, names = held(), [thread.name for thread in threading.enumerate()]
    dist.barrier()
    dist.destroy_process_group()
    return first, last, names


def check(islands, relay, num_groups):
    environment = {"HETHUB_ISLANDS": islands, "HETHUB_RELAY": relay}
    outcomes = start_ranks(2, make_and_destroy, num_groups, timeout_seconds=280, environment=environment)
    for first, last, names in values(outcomes):
        assert all(now <= before + 1 for now, before in zip(last[:3], first[:3], strict=True)), (first, last, names)
        assert last[3] - first[3] < RESIDENT_BYTES_PER_GROUP * num_groups + 4e6, (first, last)


@pytest.mark.parametrize(("islands", "relay"), [("0|1", "shm"), ("0,1", "gloo")])
def test_fifty_groups_leave_nothing(islands, relay):
    check(islands, relay, 50)


@pytest.mark.slow
@pytest.mark.parametrize("islands", ["0|1", "0,1"])
@pytest.mark.parametrize("relay", ["shm", "gloo"])
def test_a_thousand_groups_leave_nothing(islands, relay):
    check(islands, relay, 1000)
