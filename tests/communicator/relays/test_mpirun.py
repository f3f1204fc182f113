"""Real mpirun: rendezvous over MPI, the mpi relay, and where its ranks listen."""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")

pytestmark = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py: pip install 'hethub[train]'",
)

SOCKETS = Path(__file__).resolve().parents[2] / "support" / "hosts" / "sockets.py"
REDUCE = f"""
import importlib.util, json, sys, torch, torch.distributed as dist
from hethub.runtime.launch.rendezvous import launch_info, rendezvous
from hethub.communicator import connect
from hethub.communicator.relays import mpi
spec = importlib.util.spec_from_file_location("sockets", {str(SOCKETS)!r})
sockets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sockets)
mpi._MAX_MESSAGE_BYTES = 100_000  # an MPI count ends at 2 GiB; a message above the limit is cut
world = connect(rendezvous(launch_info()), islands=[[0, 2], [1]], relay=sys.argv[1])
tensor = torch.arange(200_000, dtype=torch.float64) * (world.rank + 1)
dist.all_reduce(tensor)
assert torch.equal(tensor, torch.arange(200_000, dtype=torch.float64) * 6)
links = world.counters()["links"]
dist.all_reduce(torch.ones(10), group=world.group([0, 1, 2]))
listening = world.all_gather_objects(sorted(sockets.listening_addresses()))
world.close()
if world.rank == 0:
    print(json.dumps([sorted({{link["relay"] for link in links}}), listening]))
"""


def mpirun(program, *arguments, size=3):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
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
