"""Every launcher's environment, and the interface a job listens on."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from hethub.runtime.launch.launcher_environment import (
    LaunchInfo,
    expand_tasks_per_node,
    first_host,
    is_first_rank,
    launch_info,
)
from hethub.runtime.launch.store import join_served_store, master, meet_at_master, serve_store
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.network import Interface, choose_interface, interfaces
from tests.support.hosts.namespaces import ADDRESSES, namespaces, why_no_namespaces
from tests.support.ranks import start_ranks, values

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "nv1"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("alone", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 3, 8, 1, 2)),
        (OPENMPI, ("openmpi", 2, 4, 0, 2)),
        (MPICH, ("mpich", 1, 2, 1, 2)),
        (SLURM, ("slurm", 5, 9, 1, 4)),
        ({**SLURM, **OPENMPI}, ("openmpi", 2, 4, 0, 2)),
        ({**OPENMPI, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, ("torchrun", 3, 8, 1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ("alone", 0, 1, 0, 1)),
    ],
    ids=["alone", "torchrun", "openmpi", "mpich", "slurm", "mpirun in slurm", "torchrun in mpirun", "batch script"],
)
def test_place_in_the_job(environment, expected):
    info = launch_info(environment)
    assert (info.launcher, info.rank, info.size, info.local_rank, info.local_size) == expected
    assert is_first_rank(environment) == (info.rank == 0)


def test_half_a_launcher_is_refused():
    environment = {key: value for key, value in OPENMPI.items() if key != "OMPI_COMM_WORLD_SIZE"}
    with pytest.raises(BadInput, match="OMPI_COMM_WORLD_SIZE is not set"):
        launch_info(environment)


def test_contradicting_numbers_are_refused():
    with pytest.raises(BadInput, match="contradict"):
        launch_info({**TORCHRUN, "RANK": "8"})


def test_slurm_notations():
    assert expand_tasks_per_node("4(x2),1") == [4, 4, 1]
    assert first_host("nv[01-04,07],amd1") == "nv01"
    assert first_host("single") == "single"


HERE = [
    Interface(name="lo", address="127.0.0.1"),
    Interface(name="eth0", address="192.168.1.5"),
    Interface(name="bond0", address="10.0.3.7"),
]


def test_the_network_picks_the_interface():
    assert choose_interface("10.0.0.0/16", is_multi_node=True, available=HERE).name == "bond0"


def test_a_network_no_interface_is_in_is_refused_with_what_there_is():
    with pytest.raises(BadInput, match=r"no address in the network 172.16.0.0/12; it has .*bond0 10.0.3.7"):
        choose_interface("172.16.0.0/12", is_multi_node=True, available=HERE)


def test_a_network_that_is_none_is_refused():
    with pytest.raises(BadInput, match="not a CIDR"):
        choose_interface("eth0", is_multi_node=True, available=HERE)


def test_an_ipv6_network_is_refused_as_such():
    with pytest.raises(BadInput, match=r"'fd00::/8' is an IPv6 network, .* name an IPv4 network"):
        choose_interface("fd00::/8", is_multi_node=True, available=HERE)


def addresses_in(rank, store, found):
    """What a process finds that is on the first host."""
    found.enter(0)
    chosen = choose_interface("10.99.0.0/16", is_multi_node=True)
    return [(one.name, one.address) for one in interfaces()], (chosen.name, chosen.address)


def test_all_addresses_of_an_interface_are_seen():
    """More than one question's answer holds; the second address of an interface may be the job's."""
    if (reason := why_no_namespaces()) is not None:
        pytest.skip(f"a host with addresses of its own {reason}")
    with namespaces(f"hethub-addresses-{os.getpid()}") as found:
        added = [f"10.98.0.{last}" for last in range(1, 20)] + ["10.99.0.1"]
        for address in added:
            command = f"ip -n {found.names[0]} addr add {address}/24 dev {found.devices[0]}"
            subprocess.run(command.split(), check=True)
        [(seen, chosen)] = values(start_ranks(1, addresses_in, found, timeout_seconds=30))
    device = found.devices[0]
    assert set(seen) == {("lo", "127.0.0.1"), *((device, address) for address in (ADDRESSES[0], *added))}
    assert chosen == (device, "10.99.0.1")


def test_one_node_uses_loopback():
    assert choose_interface(None, is_multi_node=False, available=HERE).address == "127.0.0.1"


def test_a_loopback_host_name_is_refused_for_several_nodes():
    with pytest.raises(BadInput, match=r"resolves to 127.0.1.1, which is loopback"):
        choose_interface(None, is_multi_node=True, available=HERE, resolve=lambda host: "127.0.1.1")


def test_the_host_names_interface_is_found():
    found = choose_interface(None, is_multi_node=True, available=HERE, resolve=lambda host: "192.168.1.5")
    assert found.name == "eth0"


def test_this_machine_has_a_loopback_interface():
    assert "127.0.0.1" in {interface.address for interface in interfaces()}


ETH0 = HERE[1]


@pytest.mark.parametrize(
    ("environment", "launcher", "expected"),
    [
        (
            {"SLURM_STEP_NODELIST": "nv[01-02],amd1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"},
            "slurm",
            ("nv01", 20_219),
        ),
        ({"SLURM_STEP_NODELIST": "nv1", "MASTER_ADDR": "10.0.3.7", "MASTER_PORT": "5"}, "slurm", ("10.0.3.7", 5)),
        ({"MASTER_ADDR": "nv1", "MASTER_PORT": "29400"}, "torchrun", ("nv1", 29_400)),
    ],
)
def test_where_rank_0_serves(monkeypatch, environment, launcher, expected):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    two_nodes = LaunchInfo(rank=1, size=2, local_rank=0, local_size=1, launcher=launcher)
    assert master(two_nodes, ETH0) == expected
    one_node = LaunchInfo(rank=1, size=2, local_rank=1, local_size=2, launcher=launcher)
    assert master(one_node, HERE[0])[0] == "127.0.0.1"


@pytest.mark.parametrize("port", ["any", "70000", "0", "-1", ""])
def test_a_port_that_is_none_is_refused(port, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", port)
    info = LaunchInfo(rank=0, size=2, local_rank=0, local_size=2, launcher="torchrun")
    with pytest.raises(BadInput, match=f"MASTER_PORT='{port}' is no port; set a number from 1 to 65535"):
        master(info, ETH0)


def test_a_taken_port_is_told_with_what_to_set():
    store = serve_store("127.0.0.1", 10)
    with pytest.raises(RunFailed, match="MASTER_PORT"):
        serve_store("127.0.0.1", 10, store.port)


def test_a_store_that_was_served_is_not_waited_for_once_nothing_listens():
    info = LaunchInfo(rank=1, size=2, local_rank=1, local_size=2, launcher="openmpi")
    server = serve_store("127.0.0.1", 30)
    store = join_served_store("127.0.0.1", server.port, 30, info)
    assert store.timeout.total_seconds() == 30
    # One that accepts and says nothing, then is gone, as a rank that is killed.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    threading.Timer(1.0, listener.close).start()
    begun = time.monotonic()
    with pytest.raises(RunFailed, match="rank 1 ends because rank 0 is gone: nothing listens"):
        join_served_store("127.0.0.1", port, 200, info)
    assert time.monotonic() - begun < 100


def test_an_address_at_which_nobody_serves_is_named():
    """torch's client took up to twice its timeout, and the rank ended before without a word of where it had looked."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    words = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    words |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = (
        "from hethub.runtime.launch.launcher_environment import launch_info\n"
        "from hethub.runtime.launch.rendezvous import rendezvous\n"
        "rendezvous(launch_info(), network='127.0.0.0/8', timeout_seconds=4.0)"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], env=words, capture_output=True, text=True, check=False)
    said = f"could not reach rank 0's store at 127.0.0.1:{port} within 4 s: Connection refused"
    assert said in ended.stderr, ended.stderr


def test_ranks_of_two_torchruns_meet_again_whatever_these_have_counted(monkeypatch):
    """torchrun's agents count their own ranks' failures: where a rank has failed before the ranks met, the two of a job told
    theirs 0 and 1, and no later start met either. What rank 0 said at the start before is not taken for its word now."""
    agents, interface = serve_store("127.0.0.1", 20), Interface(name=None, address="127.0.0.1")
    for name, value in (("USE_AGENT_STORE", "True"), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    first, second = (
        LaunchInfo(rank=rank, size=2, local_rank=0, local_size=1, launcher="torchrun") for rank in range(2)
    )
    before = meet_at_master(first, interface, 20)
    before.set("start", "before")
    del before  # gone, as its rank
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    served = []
    late = threading.Timer(1.0, lambda: served.append(meet_at_master(first, interface, 20)))
    late.start()
    found = meet_at_master(second, interface, 20)
    late.join()
    served[0].set("start", "now")
    assert found.get("start") == b"now"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert meet_at_master(second, interface, 20).get("start") == b"now"


def test_a_rank_0_that_torchrun_has_not_started_is_named(monkeypatch):
    agents = serve_store("127.0.0.1", 20)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    info = LaunchInfo(rank=1, size=2, local_rank=0, local_size=1, launcher="torchrun")
    interface = Interface(name=None, address="127.0.0.1")
    with pytest.raises(RunFailed, match=r"rank 0 has not come: no store of its has answered within 1 s .* named: none"):
        meet_at_master(info, interface, 1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    agents.set("hethub/store", f'["127.0.0.1", {port}]')
    with pytest.raises(RunFailed, match=f"named: 127.0.0.1:{port}"):
        meet_at_master(info, interface, 1)


def test_a_node_may_have_a_network_of_its_own():
    nodes = [{"name": name, "accelerator": "CPU-core", "accelerators": 2, "vendor": name} for name in ("nvidia", "amd")]
    nodes[1]["network"] = "192.168.1.0/24"
    cluster = ClusterSpec.model_validate({"name": "lab", "network": "10.0.0.0/16", "nodes": nodes})
    assert [cluster.network_of(rank) for rank in range(4)] == ["10.0.0.0/16"] * 2 + ["192.168.1.0/24"] * 2
    assert {cluster.replace(emulated=True).network_of(rank) for rank in range(4)} == {None}  # which run on one host
