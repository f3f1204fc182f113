"""Real mpirun: rendezvous over MPI, the mpi relay, and where its ranks listen."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import AS_ROOT, MPIRUN, needs_mpirun

pytestmark = needs_mpirun

SOCKETS = Path(__file__).resolve().parents[2] / "support" / "hosts" / "sockets.py"
REDUCE = f"""
import importlib.util, json, sys, torch, torch.distributed as dist
from hethub.runtime.launch.launcher_environment import launch_info
from hethub.runtime.launch.rendezvous import rendezvous
from hethub.communicator import connect
from hethub.communicator.relays import mpi
from hethub.runtime.measure.clock import clock_offset
spec = importlib.util.spec_from_file_location("sockets", {str(SOCKETS)!r})
sockets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sockets)
mpi._MAX_MESSAGE_BYTES = 100_000  # an MPI count ends at 2 GiB; a message above the limit is cut
mpi.calls_and_tags = lambda max_tag, inner=mpi.calls_and_tags: inner(32_767)
def start(relay, begin, tensor, peer, tag, *status, inner=mpi.MpiRelay._start):
    assert tag <= 32_767, f"tag {{tag}} is above what every MPI takes"
    return inner(relay, begin, tensor, peer, tag, *status)
mpi.MpiRelay._start = start
world = connect(rendezvous(launch_info()), islands=[[0, 2], [1]], relay=sys.argv[1], staged_ranks=[1])
tensor = torch.arange(200_000, dtype=torch.float64) * (world.rank + 1)
dist.all_reduce(tensor)
assert torch.equal(tensor, torch.arange(200_000, dtype=torch.float64) * 6)
links = world.counters()["links"]
clock_offset(world)
move = world.receive if world.rank == 1 else world.send
message = torch.full((100,), float(world.rank))
if world.rank:
    move(message, 3 - world.rank, tag=10**6).wait()
    assert (message == 2).all()
dist.all_reduce(torch.ones(10), group=world.group([0, 1, 2]))
listening = world.all_gather_objects(sorted(sockets.listening_addresses()))
world.close()
if world.rank == 0:
    print(json.dumps([sorted({{link["relay"] for link in links}}), listening]))
"""


def mpirun(program, *arguments, size=3):
    environment = {**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1"}
    command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(size), sys.executable, "-c", program]
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@functools.cache
def reduced(relay):
    """The relays over which rank 0 sent, and what every rank listened on."""
    ended = mpirun(REDUCE, relay)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


RELAYS = [pytest.param("gloo", marks=pytest.mark.slow), "mpi"]


@pytest.mark.parametrize("relay", RELAYS)
def test_bridged_all_reduce_under_mpirun(relay):
    relays, _ = reduced(relay)
    assert relays == [relay]


@pytest.mark.parametrize("relay", RELAYS)
def test_ranks_of_mpirun_on_one_host_listen_on_loopback_only(relay):
    _, listening = reduced(relay)
    assert listening == [["127.0.0.1"]] * 3


UNLIKE = """
import pathlib, sys, time, torch, torch.distributed as dist
from hethub.runtime.launch.launcher_environment import launch_info
from hethub.runtime.launch.rendezvous import rendezvous
from hethub.communicator import connect
staged = [0, 1] if "message" in sys.argv[1] else []  # else Gloo carries what a CPU sends another
world = connect(rendezvous(launch_info()), islands=[[0], [1]], relay="mpi", timeout_seconds=5, staged_ranks=staged)
own = torch.ones(8)
try:
    if sys.argv[1] == "refused alone":
        if world.rank == 0:
            try:
                dist.all_reduce(torch.zeros(1).expand(8))
            except ValueError:
                own.fill_(10)
        dist.all_reduce(own)
    elif staged:
        move, sizes = (world.receive, [6, 4]) if world.rank else (world.send, [4, 6])
        move(torch.ones(sizes["long" in sys.argv[1]]), 1 - world.rank).wait()
    else:
        rows = ([4, 4], [4, 4]) if world.rank == 0 else ([6, 4], [4, 4])
        dist.all_to_all_single(torch.zeros(sum(rows[0])), own, *rows)
    said = "nothing"
except RuntimeError as error:
    said = str(error)
print(f"rank {world.rank} says {said}", flush=True)
spoken = pathlib.Path(sys.argv[2])
if world.rank == 1:
    spoken.touch()
for _ in range(600):  # rank 1 is to hear of the operation, not of rank 0's end
    time.sleep(0 if spoken.exists() else 0.05)
"""


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("refused alone", "no answer within 5 s"),
        ("short", "has sent 16 bytes, and 24 were"),
        ("short message", "has sent 16 bytes, and 24 were"),
        ("long message", "message truncated"),
    ],
)
def test_what_is_no_part_of_an_operation_is_not_taken_for_it_by_mpi(what, why, tmp_path):
    said = mpirun(UNLIKE, what, str(tmp_path / "spoken"), size=2).stdout
    assert "rank 1 says nothing" not in said
    assert (
        what != "refused alone" or "rank 0 says all_reduce in group" in said
    )  # of the other rank 0 may have its result
    name = r"receive from rank 0 \(tag 0\) in the world" if "message" in what else r"all_\w+ in group"
    assert re.search(rf"rank 1 says {name} .* on rank 1 with rank 0: .*{why}", said)
