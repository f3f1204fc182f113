"""The store of a job: rank 0 serves it on the job's own interface, the others join it there."""

import ipaddress
import json
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from hethub.runtime.launch.launcher_environment import LaunchInfo, first_host
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.network import Interface

_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_LOOPBACK = "127.0.0.1"
_FIRST_PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.2
_SIGNPOST = "hethub/store"


def serve_store(address: str, timeout_seconds: float, port: int = 0) -> dist.TCPStore:
    """A store served from here, listening on `address` only (torch's own server listens on every interface)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family)
    except OSError as error:
        raise RunFailed(
            f"rank 0 ({socket.gethostname()}) cannot listen on {address}:{port}: {error}. Another job may have the port:"
            " set MASTER_PORT; the address must be one of this host's: set MASTER_ADDR, or name the network."
        ) from None
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener.detach(),
    )


def join_store(address: str, port: int, timeout_seconds: float, info: LaunchInfo) -> dist.TCPStore:
    """The store that rank 0 serves at `address`, or will serve there. Raises RunFailed where it does not answer.

    torch's own client says so after up to twice its timeout: it begins a last try before that is over.
    """
    end = time.monotonic() + timeout_seconds
    while (refusal := _refusal(address, port)) is not None and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
    try:
        if refusal is not None:
            raise refusal
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
    except (dist.DistError, OSError) as error:
        raise RunFailed(
            f"rank {info.rank} ({socket.gethostname()}) could not reach rank 0's store at {address}:{port} within "
            f"{timeout_seconds:g} s: {getattr(error, 'strerror', None) or error}. Check that rank 0 has started and that the nodes share "
            "that network, or name the right one as a CIDR in the cluster file; MASTER_ADDR and MASTER_PORT count where they are set."
        ) from None


def join_served_store(address: str, port: int, timeout_seconds: float, info: LaunchInfo) -> dist.TCPStore:
    """Do what `join_store` does, where rank 0 has said that it serves: stop waiting as soon as nothing listens there any more.

    torch tries again for the whole timeout, while a launcher ends the ranks that have not spoken.
    """
    end, patience = time.monotonic() + timeout_seconds, _FIRST_PATIENCE_SECONDS
    while patience < end - time.monotonic():
        try:
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=patience))
        except dist.DistError:
            if isinstance(_refusal(address, port), ConnectionRefusedError):  # what does not answer at all may be slow
                raise RunFailed(
                    f"rank {info.rank} ends because rank 0 is gone: nothing listens at {address}:{port} any more, where it"
                    " served the store."
                ) from None
            patience *= 2  # a server that many come to may need longer
        else:
            store.set_timeout(timedelta(seconds=timeout_seconds))
            return store
    return join_store(address, port, max(1.0, end - time.monotonic()), info)


def _refusal(address: str, port: int) -> OSError | None:
    """Why nobody can be reached there; None where somebody listens."""
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError as error:
        return error
    return None


def meet_at_master(info: LaunchInfo, interface: Interface, timeout_seconds: float) -> dist.Store:
    """The job's store, found through MASTER_ADDR and MASTER_PORT; under Slurm through the step's nodes and number.

    torchrun's agent has a store of its own there, open to every interface: it only tells where ours is.
    """
    host, port = master(info, interface)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if info.rank == 0:
            return serve_store(_listening(host, interface), timeout_seconds, port)
        return join_store(host, port, timeout_seconds, info)
    agents = join_store(os.environ["MASTER_ADDR"], port, timeout_seconds, info)
    if info.rank > 0:
        return _follow_signpost(agents, timeout_seconds, info)
    store = serve_store(interface.address, timeout_seconds)
    agents.set(_SIGNPOST, json.dumps([interface.address, store.port]))
    return store


def _follow_signpost(agents: dist.Store, timeout_seconds: float, info: LaunchInfo) -> dist.TCPStore:
    """The store that rank 0 serves, once it does: until then the agents' store, which outlives a start, may name the one
    before.

    TORCHELASTIC_RESTART_COUNT does not tell starts apart: an agent that starts its ranks again because another's have
    failed does not count that.
    """
    end, last = time.monotonic() + timeout_seconds, "none"
    with suppress(dist.DistStoreError):  # none was ever named
        while time.monotonic() < end:
            address, port = json.loads(agents.get(_SIGNPOST))
            if _refusal(address, port) is None:
                return join_served_store(address, port, timeout_seconds, info)
            last = f"{address}:{port}"
            time.sleep(_PAUSE_SECONDS)
    raise RunFailed(
        f"rank {info.rank} ends because rank 0 has not come: no store of its has answered within {timeout_seconds:g} s (the last that "
        f"it named: {last}). Where it did come, check that the nodes share the job's network."
    )


def master(info: LaunchInfo, interface: Interface) -> tuple[str, int]:
    """Where rank 0 serves: what the environment says, else (Slurm) the step's first node and a port from its number."""
    if info.launcher == "slurm":
        job, step = (int(os.environ.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        first = first_host(os.environ.get("SLURM_STEP_NODELIST", _LOOPBACK))
        port = _FIRST_PORT + (job * 31 + step) % _NUM_PORTS
    else:
        first, port = _LOOPBACK, 29_500
    host = os.environ.get("MASTER_ADDR", first) if info.is_multi_node else interface.address
    named = os.environ.get("MASTER_PORT", str(port))
    if not (named.isdecimal() and 0 < int(named) < 2**16):
        raise BadInput(f"MASTER_PORT={named!r} is no port; set a number from 1 to 65535, the same for all ranks.")
    return host, int(named)


def _listening(host: str, interface: Interface) -> str:
    """The address named where one is; a name may mean loopback on its own host, so then the interface's."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return interface.address
