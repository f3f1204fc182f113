"""Groups made, used and destroyed leave nothing: as many descriptors, threads and blocks as after the first ten or tenth,
and no more memory than torch's own groups leave."""

import ctypes
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import all_gather_by_ranges, connect
from hethub.runtime.launch.launcher_environment import launch_info
from hethub.runtime.launch.rendezvous import rendezvous
from hethub.spec.ranges import split
from tests.support.command import PROJECT, needs_mpirun, start_mpirun
from tests.support.ranks import start_ranks, values

FIRST = 10
SLACK_BYTES = 1_500_000  # the allocator's; beyond it, what torch's registry and store keep of a group: they forget none
MPI_BYTES = 4_000  # of a group over MPI, which has no native group beside it to compare with
PROGRAM = "import sys; sys.path.append(sys.argv[1]); from tests.faults.test_groups import under_mpirun; under_mpirun()"


def held():
    """Descriptors, threads (the native libraries' too) and blocks of shared memory of this process; resident bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    maps = Path("/proc/self/maps").read_text().count("memfd:hethub")
    threads = len(os.listdir("/proc/self/task"))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), threads, maps, resident


def use(group):
    """A sum of few and one of many numbers, a message; and, where it is ours, an uneven collective."""
    dist.all_reduce(torch.ones(1000), group=group)
    dist.all_reduce(torch.ones(50_000), group=group)
    if dist.get_backend(group) == "hethub":
        all_gather_by_ranges(group, torch.zeros(10), split(10, 2), async_op=False)
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1, group=group)
    else:
        dist.recv(torch.empty(3), 0, group=group)


def make_and_destroy(num_groups):
    """What is held after the first and after all, once it has settled."""
    num_first = max(FIRST, num_groups // 10)  # threads' allocators, once they have all been at work
    for number in range(num_groups):
        if number == num_first:
            gc.collect()
            time.sleep(0.5)
            first = held()
        group = dist.new_group([0, 1])
        use(group)
        dist.destroy_process_group(group)
        del group
    deadline = time.monotonic() + 10
    while any(now > before for now, before in zip(held()[:3], first[:3], strict=True)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.1)
    return first, held(), [thread.name for thread in threading.enumerate()]


def in_ranks(rank, store, backend, num_groups):
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    found = make_and_destroy(num_groups)
    dist.barrier()
    dist.destroy_process_group()
    return found


def under_mpirun():
    world = connect(rendezvous(launch_info()), islands=[[0], [1]], relay="mpi")
    assert "mpi" in json.dumps(world.relays)
    found = make_and_destroy(int(sys.argv[2]))
    Path(f"rank-{world.rank}").write_text(json.dumps(found))
    world.close()


def growth(found):
    """Bytes, by rank; checks that all else is as it was."""
    for first, last, names in found:
        assert all(now <= before + 1 for now, before in zip(last[:3], first[:3], strict=True)), (first, last, names)
    return [last[3] - first[3] for first, last, _ in found]


def check(islands, relay, num_groups):
    environment = {"HETHUB_ISLANDS": islands, "HETHUB_RELAY": relay}
    ours, torchs = (
        growth(values(start_ranks(2, in_ranks, backend, num_groups, timeout_seconds=280, environment=environment)))
        for backend in ("hethub", "gloo")
    )
    assert all(own < native + SLACK_BYTES for own, native in zip(ours, torchs, strict=True)), (ours, torchs)


@pytest.mark.parametrize(("islands", "relay"), [("0|1", "shm"), ("0,1", "gloo")])
def test_fifty_groups_leave_nothing(islands, relay):
    check(islands, relay, 50)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("islands", "relay"),
    [("0|1", "shm"), ("0|1", "gloo"), ("0,1", "gloo")],
)
def test_a_thousand_groups_leave_nothing(islands, relay):
    check(islands, relay, 1000)


@needs_mpirun
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_groups_over_mpi_leave_nothing(tmp_path):
    num_groups = 1000
    program = (sys.executable, "-P", "-c", PROGRAM, PROJECT, num_groups)
    ended = start_mpirun(2, cwd=tmp_path, program=program).end()
    assert ended.exit_code == 0, ended.stderr
    found = growth([json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)])
    assert all(own < MPI_BYTES * num_groups + SLACK_BYTES for own in found), found
