"""What a world that has closed or failed leaves behind: no shared memory, no ports, no descriptors, no threads."""

import gc
import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import Rendezvous, connect
from hethub.spec.errors import RunFailed
from tests.support.ranks import start_ranks, values


def init_plainly(name, rank, size, store):
    dist.init_process_group("hethub", store=dist.PrefixStore(name, store), rank=rank, world_size=size)


def connect_with_few_files(rank, store, hard):
    """What the process may open afterwards, or what is said; `hard` is None for a limit that is as low."""
    few = len(os.listdir("/proc/self/fd")) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard or few))
    try:
        init_plainly("few", rank, 3, store)
    except RunFailed as error:
        return str(error)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_rank_opens_as_many_files_as_the_system_lets_it():
    assert values(start_ranks(3, connect_with_few_files, 1000, timeout_seconds=60)) == [1000] * 3


def test_a_rank_that_may_open_too_few_files_says_what_to_raise():
    said = values(start_ranks(3, connect_with_few_files, None, timeout_seconds=60))
    for each in said:
        assert "Too many open files" in each
        assert "(ulimit -n)" in each


def listening():
    """The ports on which this process listens."""
    own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def in_shared_memory():
    """The names in /dev/shm, but Open MPI's: a test that runs beside this one may have started it."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sm_segment.")}


def settled(left):
    """`left()` when it is empty, or what it still is after ten seconds: torch frees some of its own in its own time."""
    deadline = time.monotonic() + 10
    while any(found := left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def reduce_for_ever():
    while True:
        dist.all_reduce(torch.ones(500_000))


def left_by_a_failure(rank, store):
    """Shared memory, ports and blocks that a failed and closed world has left in a survivor."""
    names, ports = in_shared_memory(), listening()

    def left():
        blocks = sum("memfd:hethub" in line for line in Path("/proc/self/maps").read_text().splitlines())
        # The last Gloo groups' ports are torch's, which frees them when it likes.
        return in_shared_memory() - names, sorted(listening() - ports)[2:], blocks

    world = connect(Rendezvous.on_one_host(store, rank, 3), islands=[[0, 1], [2]])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RunFailed, match="rank 2 is gone"):
        reduce_for_ever()
    world.close()
    del world
    gc.collect()
    return settled(left)


def test_a_failure_leaves_nothing_behind():
    for outcome in start_ranks(3, left_by_a_failure, timeout_seconds=60)[:2]:
        assert outcome.value is not None, outcome.traceback
        assert outcome.value == (set(), [], 0)


def leaked(rank, store):
    """What is left of shared memory and sockets after a world has closed."""
    before = in_shared_memory()
    descriptors = len(os.listdir("/proc/self/fd"))

    def left():
        # The last Gloo group's descriptors are torch's, which frees them when it likes.
        return in_shared_memory() - before, max(0, len(os.listdir("/proc/self/fd")) - descriptors - 6)

    for number in range(3):
        world = connect(Rendezvous.on_one_host(dist.PrefixStore(str(number), store), rank, 2), islands=[[0], [1]])
        dist.all_reduce(torch.ones(500_000))
        world.close()
        del world
        gc.collect()
    return settled(left)


def left_by_plain_groups(rank, store):
    """As `leaked`, for a program that knows torch's own functions only: threads, and what two rounds have added to the
    ports and descriptors that torch keeps from the first two."""

    def held():
        return len(listening()), len(os.listdir("/proc/self/fd"))

    def left():
        ports, descriptors = held()
        threads = sum(thread.name.startswith("hethub-") for thread in threading.enumerate())
        return threads, max(0, ports - before[0]), max(0, descriptors - before[1] - 2)

    for number in range(4):
        init_plainly(str(number), rank, 2, store)
        summing = dist.all_reduce(torch.ones(5_000_000), async_op=True)
        summing.get_future().wait()
        dist.destroy_process_group()
        gc.collect()
        if number == 1:
            time.sleep(1.0)
            before = held()
    return settled(left)


@pytest.mark.parametrize("islands", ["0|1", "0,1"])
def test_plain_groups_leave_nothing_behind(islands):
    outcomes = start_ranks(2, left_by_plain_groups, timeout_seconds=60, environment={"HETHUB_ISLANDS": islands})
    assert values(outcomes) == [(0, 0, 0)] * 2


def added_to_the_store(rank, store, name):
    """The keys that a second world leaves in the store that it met in."""
    shared = dist.PrefixStore(name, store)
    for number in range(2):
        before = store.num_keys()
        dist.init_process_group("hethub", store=shared, rank=rank, world_size=2)
        dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
        store.set(f"{name}/closed/{number}/{rank}", "")
        store.wait([f"{name}/closed/{number}/{other}" for other in range(2)])
    return store.num_keys() - before - 2


@pytest.mark.parametrize("islands", ["0|1", "0,1"])
def test_a_world_takes_what_its_ranks_said_out_of_the_store(islands):
    """About a dozen keys of each stayed in a launcher's store, which outlives many."""
    name = f"rounds {islands}"
    outcomes = start_ranks(2, added_to_the_store, name, timeout_seconds=60, environment={"HETHUB_ISLANDS": islands})
    assert max(values(outcomes)) <= 2  # where its watch listens, and the numbers of its groups


def test_nothing_is_left_behind():
    assert values(start_ranks(2, leaked, timeout_seconds=60)) == [(set(), 0)] * 2
