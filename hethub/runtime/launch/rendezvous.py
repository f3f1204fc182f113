"""How the ranks of a job find each other: through their launcher's daemons, over MPI, or at rank 0's store."""

import functools
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from hethub.communicator import Rendezvous
from hethub.communicator.joining import pmix
from hethub.communicator.joining.mpi_library import end_mpi, import_mpi, start_mpi
from hethub.communicator.joining.rendezvous import agree_on_token
from hethub.communicator.joining.segments import place_segments, remove_dead_segments
from hethub.communicator.joining.watch import Watch, deadline, watch_over
from hethub.runtime.launch.launcher_environment import LaunchInfo, launcher_of, place_of
from hethub.runtime.launch.store import join_served_store, meet_at_master, serve_store
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import RunFailed
from hethub.spec.network import TOKEN_VARIABLE, Interface, choose_interface

_GREETING = "hethub.greeting"
_GREETING_BYTES = 512
_SPARE_SECONDS = 5.0  # for a last try to reach the store, a name looked up above all
_NEWS_SECONDS = 10.0  # for rank 0's word of who has not come to reach a rank that came before it


def meet(info: LaunchInfo, cluster: ClusterSpec | None, timeout_seconds: float) -> Rendezvous:
    """The rendezvous of a command's ranks, on the network that their cluster names for this one. Raises as `rendezvous`."""
    network = None if cluster is None else cluster.network_of(info.rank)
    return rendezvous(info, network=network, timeout_seconds=timeout_seconds)


def rendezvous(info: LaunchInfo, *, network: str | None = None, timeout_seconds: float = 120.0) -> Rendezvous:
    """The store all ranks share and the address each listens on, once all ranks have come.

    `network` is a CIDR (10.0.0.0/16): each rank takes its own address in it. Without it, ranks of one node use
    loopback, and ranks of several nodes the address of their host name. From here on the ranks watch each other, and
    each ends with another or with the launcher. Raises BadInput where that cannot work, and RunFailed naming a rank
    that has not come `timeout_seconds` after rank 0.
    """
    interface = choose_interface(network, is_multi_node=info.is_multi_node)
    ends: Callable[[], None] | None = None
    place: Callable[[int], str] = functools.partial(place_of, info)
    if info.launcher in ("openmpi", "mpich"):
        store, token, ends, place = _meet_under_mpirun(info, interface, timeout_seconds)
    elif info.launcher == "alone":
        store, token = dist.HashStore(), secrets.token_hex(16)
    else:
        with _answering(info, timeout_seconds + _SPARE_SECONDS):  # the store has a timeout of its own
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
        finalize=ends,
        watch=None if info.launcher == "alone" else _watched(info, store, interface, token, timeout_seconds, place),
    )


def _watched(
    info: LaunchInfo,
    store: dist.Store,
    interface: Interface,
    token: str,
    timeout_seconds: float,
    place: Callable[[int], str],
) -> Watch:
    """The ranks' watch, when all of them have joined it."""
    with _answering(info, timeout_seconds):
        watch = watch_over(
            store, rank=info.rank, size=info.size, address=interface.address, token=token,
            timeout_seconds=timeout_seconds, place=place,
        )  # fmt: skip
    watch.end_with_the_launcher(launcher_of(os.getpid()))
    watch.end_with_the_job()
    try:
        watch.liveness.wait_for_all(timeout_seconds + _NEWS_SECONDS)
    except RunFailed as error:
        watch.tell(str(error))
        raise
    return watch


@contextmanager
def _answering(info: LaunchInfo, timeout_seconds: float) -> Iterator[None]:
    """The block, in which rank 0 serves the store: it may be gone, or be stopped, and then its kernel still accepts."""
    silent = f"rank 0, which serves the store, has not answered for {timeout_seconds:g} s: it has stopped, or is gone"
    try:
        with deadline(timeout_seconds, info.rank, silent):
            yield
    except (dist.DistError, OSError) as error:
        reason = str(error).splitlines()[0]
        if info.rank == 0:
            raise RunFailed(f"rank 0 cannot open what the ranks meet at: {reason}.") from None
        raise RunFailed(
            f"rank {info.rank} ends because rank 0 is gone: its store does not answer ({reason})."
        ) from None


# Store, token, what ends the launcher's library, where a rank belongs.
Meeting = tuple[dist.Store, str, Callable[[], None], Callable[[int], str]]


def _meet_under_mpirun(info: LaunchInfo, interface: Interface, timeout_seconds: float) -> Meeting:
    """Rank 0 opens the store; Open MPI's daemons carry its address and a random token, or else MPI itself."""
    _keep_mpi_inside(info, interface)
    if info.local_rank == 0:
        remove_dead_segments()
    mpi = import_mpi()
    ends = functools.partial(end_mpi, mpi)
    if info.rank == 0:
        store, token = serve_store(interface.address, timeout_seconds), secrets.token_hex(16)
        told = pmix.publish(_GREETING, json.dumps([interface.address, store.port, token]), info.size)
    else:
        told = pmix.look_up(_GREETING, info.size, timeout_seconds)
    if told is None:  # MPICH, or an Open MPI that hides its PMIx
        return _meet_over_mpi(mpi, info, interface, timeout_seconds)
    place = functools.partial(_placed, info, told.hosts)
    if info.rank == 0:
        return store, token, ends, place
    if told.text is None:
        raise RunFailed(
            f"rank {info.rank} ends because rank 0{place(0)} has not come: it did not join within {timeout_seconds:g} s."
        )
    address, port, token = json.loads(told.text)
    with _answering(info, timeout_seconds):
        return join_served_store(address, port, timeout_seconds, info), token, ends, place


def _placed(info: LaunchInfo, hosts: Sequence[str | None], rank: int) -> str:
    return place_of(info, rank, host=hosts[rank])


def _meet_over_mpi(mpi: Any, info: LaunchInfo, interface: Interface, timeout_seconds: float) -> Meeting:
    """Meet as `_meet_under_mpirun` does, but by an MPI broadcast, which cannot say who is missing."""
    greeting = bytearray(_GREETING_BYTES)
    store: dist.Store | None = None
    place_segments(local_rank=info.local_rank, local_size=info.local_size, job=None)
    missing = f"MPI has not started within {timeout_seconds:g} s: a rank has not come, or is gone"
    with deadline(timeout_seconds, info.rank, missing):
        start_mpi(mpi, rank=info.rank, size=info.size, launcher=info.launcher)
        if info.rank == 0:
            store, token = serve_store(interface.address, timeout_seconds), secrets.token_hex(16)
            text = json.dumps([interface.address, store.port, token]).encode()
            greeting[: len(text)] = text
        mpi.COMM_WORLD.Bcast([greeting, mpi.BYTE], root=0)
    address, port, token = json.loads(greeting.rstrip(b"\0"))
    if store is None:
        with _answering(info, timeout_seconds):
            store = join_served_store(address, port, timeout_seconds, info)
    return store, token, functools.partial(end_mpi, mpi), functools.partial(place_of, info)


def _keep_mpi_inside(info: LaunchInfo, interface: Interface) -> None:
    """Points Open MPI's own sockets at the job's interface; on one host it needs none. What the user has set stays."""
    if info.is_multi_node and interface.name is not None:
        os.environ.setdefault("OMPI_MCA_btl_tcp_if_include", interface.name)
    elif not info.is_multi_node:
        os.environ.setdefault("OMPI_MCA_btl", "^tcp")
