"""Who may take part: sockets on the job's interface only, ranks with the job's token only, no pickles of strangers."""

import ast
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import Rendezvous, connect
from hethub.communicator.joining.connection import proof
from hethub.communicator.joining.rendezvous import agree_on_token
from hethub.communicator.relays import shm_connection
from hethub.spec.errors import BadInput
from hethub.spec.network import TOKEN_VARIABLE
from tests.support.hosts.sockets import listening_addresses
from tests.support.ranks import run_ranks, start_ranks, values

ROOT = Path(__file__).resolve().parents[3]
SEARCHED = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"

PROGRAM = f"""
import importlib.util, json, sys
import torch, torch.distributed as dist
from hethub.communicator import connect
from hethub.runtime.launch.launcher_environment import launch_info
from hethub.runtime.launch.rendezvous import rendezvous
spec = importlib.util.spec_from_file_location("sockets", {str(ROOT / "tests/support/hosts/sockets.py")!r})
sockets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sockets)
relay, network = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
world = connect(rendezvous(launch_info(), network=network), islands=[[0], [1]], relay=relay, timeout_seconds=60)
dist.all_reduce(torch.ones(100_000))
dist.all_reduce(torch.ones(10), group=world.group([0, 1]))
found = world.all_gather_objects(sorted(sockets.listening_addresses()))
world.close()
if world.rank == 0:
    print(json.dumps(found))
"""


def addresses(command, **environment):
    """What the ranks that `command` starts listen on."""
    base = {key: value for key, value in os.environ.items() if key not in ("RANK", "MASTER_ADDR", TOKEN_VARIABLE)}
    ended = subprocess.run(
        command, env={**base, "OMP_NUM_THREADS": "1", "PATH": SEARCHED, **environment}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [set(row) for row in json.loads(ended.stdout.strip().splitlines()[-1])]


@pytest.mark.slow
def test_ranks_of_torchrun_on_one_host_listen_on_loopback_only(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2", str(tmp_path / "program.py"), "gloo"]
    assert addresses(torchrun, **{TOKEN_VARIABLE: "a secret"}) == [{"127.0.0.1"}, {"127.0.0.1"}]


IN_A_NAMESPACE = """
ip link set lo up && ip link add fast type veth peer name slow || exit 1
ip addr add 10.203.9.1/24 dev fast && ip addr add 10.204.9.1/24 dev slow && ip link set fast up && ip link set slow up || exit 1
RANK=0 "$@" & first=$!
RANK=1 "$@" & second=$!
wait $first && wait $second
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="needs root, unshare and ip (Debian: apt-get install iproute2) to make a network namespace",
)
def test_ranks_of_several_nodes_listen_in_the_given_network_only():
    """Two ranks that take themselves for two nodes, in a namespace with two networks."""
    nodes = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.203.9.1"}
    start = ["unshare", "--net", "bash", "-c", IN_A_NAMESPACE, "bash"]
    command = [*start, sys.executable, "-c", PROGRAM, "gloo", "10.203.9.0/24"]
    assert addresses(command, **nodes, MASTER_PORT="29511") == [{"10.203.9.1"}, {"10.203.9.1"}]


def own_addresses(world):
    dist.all_reduce(torch.ones(100_000))
    dist.all_reduce(torch.ones(1000), group=world.group(list(range(world.size))))
    return listening_addresses()


@pytest.mark.parametrize("relay", ["gloo", "shm"])
def test_every_group_listens_on_loopback(relay):
    for found in run_ranks(3, own_addresses, islands=[[0, 2], [1]], relay=relay):
        assert found <= {"127.0.0.1"}


def test_a_socket_open_to_every_interface_would_be_seen():
    with socket.create_server(("", 0)), socket.create_server(("127.0.0.1", 0)):
        assert listening_addresses() >= {"0.0.0.0", "127.0.0.1"}


def test_tokens_are_agreed_on_and_a_given_one_never_enters_the_store():
    store = dist.HashStore()
    assert agree_on_token(store, 0, "secret") == agree_on_token(store, 1, "secret") == "secret"
    assert b"secret" not in store.get("token")
    drawn = dist.HashStore()
    assert agree_on_token(drawn, 0, None) == agree_on_token(drawn, 1, None)


@pytest.mark.parametrize(("rank_0", "rank_1"), [("secret", "guess"), ("secret", None), (None, "secret")])
def test_another_token_is_refused(rank_0, rank_1):
    store = dist.HashStore()
    agree_on_token(store, 0, rank_0)
    with pytest.raises(BadInput, match=r"rank 1 .* do not have the same HETHUB_TOKEN"):
        agree_on_token(store, 1, rank_1)


def run_beside_a_stranger(rank, store):
    """Ranks 0 and 1 make a world; rank 2 is a stranger who reads the store and tries all doors with a token of its
    own."""
    if rank < 2:
        meeting = Rendezvous.on_one_host(dist.PrefixStore("job", store), rank, 2, token="the job's secret")
        world = connect(meeting, islands=[[0], [1]], relay="gloo")
        if rank == 0:
            store.set("running", "")
        store.get("tried")
        tensor = torch.full((100_000,), float(rank + 1))
        dist.all_reduce(tensor)
        failure = world.failure
        world.close()
        return tensor[0].item(), failure
    store.get("running")
    refused = []
    for claimed, token in ((1, "guess"), (1, None)):
        try:
            Rendezvous.on_one_host(dist.PrefixStore("job", store), claimed, 2, token=token)
        except BadInput as error:
            refused.append(str(error))
    store.set("tried", "")
    return refused


def test_a_stranger_with_the_store_but_without_the_token_cannot_join_a_running_job():
    *ranks, refused = values(start_ranks(3, run_beside_a_stranger, timeout_seconds=60))
    assert ranks == [(3.0, None), (3.0, None)]
    assert len(refused) == 2
    assert all("HETHUB_TOKEN" in text for text in refused)


UNPICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "multiprocessing"}
# torch's object collectives, and mpi4py's methods in lower case, which pickle; the ones in capitals move buffers.
UNPICKLING_CALLS = {"load", "recv_object_list", "broadcast_object_list", "scatter_object_list", "all_gather_object"}
MPI_METHODS = {"send", "recv", "isend", "irecv", "bcast", "gather", "allgather", "scatter", "alltoall", "reduce"}


def test_nothing_of_ours_unpickles():
    """By reading the source: no pickling module but for what the planner's own forks answer over their pipes and DCP's
    index, whose reader knows its few classes, and one object collective of torch's (what a checkpoint wrote)."""
    found = set()
    for path in sorted((ROOT / "hethub").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = str(path.relative_to(ROOT))
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                )
                found |= {(where, name) for name in names if name.partition(".")[0] in UNPICKLES}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                if owner in ("torch", "dist", "pickle", "np") and node.func.attr in UNPICKLING_CALLS:
                    found.add((where, f"{owner}.{node.func.attr}"))
                if owner in ("comm", "mpi", "_comm") and node.func.attr in MPI_METHODS:
                    found.add((where, f"{owner}.{node.func.attr}"))
    assert found == {
        ("hethub/planner/evaluate/processes.py", "multiprocessing"),
        ("hethub/planner/evaluate/processes.py", "multiprocessing.connection"),
        ("hethub/planner/evaluate/processes.py", "multiprocessing.process"),
        ("hethub/runtime/checkpoint/manager.py", "dist.all_gather_object"),
        ("hethub/runtime/program/checkpoint.py", "pickle"),
    }


@pytest.mark.parametrize("hello", ["right", "too short", "not text", "nothing", "gone", "another user"])
def test_only_ranks_are_admitted_to_shared_memory(hello, monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    right = shm_connection._HELLO.pack(1, proof("secret", "shm", 1).encode())
    sent = {"right": right, "another user": right, "too short": b"x", "not text": right[:4] + b"\xff" * 64}
    if hello in sent:
        theirs.send(sent[hello])
    if hello == "gone":
        theirs.close()
    if hello == "another user":
        monkeypatch.setattr(os, "getuid", lambda: -1)
    assert shm_connection._admitted(ours, "secret", 0.2) == (1 if hello == "right" else None)
    ours.close()
    theirs.close()
