"""The `mpi` relay: messages through MPI on a communicator of its own, from device memory where MPI says it takes it.

MPI moves bytes only inside its calls, so a waiting thread tests its request and sleeps in between: a blocking
MPI_Wait would spin on a core and could not be interrupted when a peer is gone.
"""

import ctypes
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hethub.communicator.joining.mpi_library import import_mpi, start_mpi
from hethub.communicator.joining.rendezvous import Rendezvous
from hethub.communicator.joining.segments import place_segments
from hethub.communicator.joining.settings import is_on
from hethub.communicator.relays.relay import PeerError, Relay, Transfer, misfit
from hethub.kernels.device import Vendor
from hethub.spec.errors import BadInput

_SPINS = 20
_MAX_SLEEP_SECONDS = 5e-4
_MAX_MESSAGE_BYTES = 1 << 30
_JOB = "mpi/job"  # in the store: the name of the job's folder for what it shares


class MpiTransfer(Transfer):
    """A message cut into parts below MPI's 2 GiB counts. MPI takes a shorter one than was asked for without a word: a
    receiver looks at the size of what has come."""

    def __init__(
        self, relay: "MpiRelay", requests: list[Any], tensor: torch.Tensor, peer: int, status: Any = None
    ) -> None:
        self._relay = relay
        self._requests = requests
        self._status = status
        self._tensor = tensor
        self._peer = peer
        relay.under_way.add(self)

    def wait(self) -> None:
        deadline = time.monotonic() + self._relay.timeout_seconds
        pause, num_bytes = 1e-6, 0
        for request in self._requests:
            spins = 0
            while not request.Test(self._status):
                if self._relay.aborted.is_set():
                    raise PeerError(self._peer, "communication was given up on this rank")
                if time.monotonic() > deadline:
                    raise PeerError(self._peer, f"no answer within {self._relay.timeout_seconds:g} s")
                spins += 1
                if spins > _SPINS:
                    time.sleep(pause)
                    pause = min(2 * pause, _MAX_SLEEP_SECONDS)
            num_bytes += self._status.count if self._status is not None else 0
        self._relay.under_way.discard(self)
        if self._status is not None and num_bytes != self._tensor.nbytes:
            raise PeerError(self._peer, misfit(num_bytes, self._tensor.nbytes))


class MpiRelay(Relay):
    """Any message as non-blocking MPI sends and receives."""

    name = "mpi"

    def __init__(self, mpi: Any, comm: Any, timeout_seconds: float, *, takes_device_memory: bool = False) -> None:
        self.takes_device_memory = takes_device_memory
        self._mpi = mpi
        self._comm = comm
        self.num_calls, self.num_tags = calls_and_tags(comm.Get_attr(mpi.TAG_UB))
        self.timeout_seconds = timeout_seconds
        self.aborted = threading.Event()
        self.under_way: set[MpiTransfer] = set()
        """Held until they are done, however their waits end: MPI may still write into the memory of one given up."""

    @classmethod
    def create(cls, rendezvous: Rendezvous, timeout_seconds: float, vendor: Vendor) -> "MpiRelay":
        """The relay of this rank. Raises BadInput unless MPI started the job and allows calls from any thread."""
        if rendezvous.launcher == "init_process_group":
            raise BadInput(
                "HETHUB_RELAY is mpi, which is for hethub's own commands and `connect` alone: init_process_group meets"
                " without MPI, whatever started the ranks. Set HETHUB_RELAY to auto, gloo or shm, or leave it out."
            )
        if rendezvous.launcher not in ("openmpi", "mpich"):
            raise BadInput(
                f"communicator.relay is mpi, but this job was started by {rendezvous.launcher}: MPI connects only the"
                " ranks that mpirun started. Start it with mpirun, or choose relay gloo."
            )
        mpi = import_mpi()
        if rendezvous.rank == 0:
            rendezvous.store.set(_JOB, secrets.token_hex(8))
        job = rendezvous.store.get(_JOB).decode()
        place_segments(local_rank=rendezvous.local_rank, local_size=rendezvous.local_size, job=job)
        start_mpi(mpi, rank=rendezvous.rank, size=rendezvous.size, launcher=rendezvous.launcher)
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise BadInput(
                "communicator.relay is mpi, but this MPI library does not allow calls from several threads"
                " (MPI_THREAD_MULTIPLE). Use one that does, or choose relay gloo."
            )
        aware = is_gpu_aware(vendor, os.environ, ask_open_mpi(mpi.__file__))
        return cls(mpi, mpi.COMM_WORLD.Dup(), timeout_seconds, takes_device_memory=aware)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start(self._comm.Isend, tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start(self._comm.Irecv, tensor, peer, tag, self._mpi.Status())

    def _start(self, start: Any, tensor: torch.Tensor, peer: int, tag: int, status: Any = None) -> Transfer:
        if self.aborted.is_set():
            raise PeerError(peer, "communication was given up on this rank")
        data = tensor.view(torch.uint8)
        # mpi4py takes a host tensor's bytes fastest as an array, a device's by their own interface.
        place: Any = data if tensor.is_cuda else data.numpy()
        parts = [place[at : at + _MAX_MESSAGE_BYTES] for at in range(0, len(data), _MAX_MESSAGE_BYTES)]
        return MpiTransfer(self, [start([part, self._mpi.BYTE], peer, tag) for part in parts], tensor, peer, status)

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self._comm.Free()


def calls_and_tags(max_tag: int) -> tuple[int, int]:
    """How many of a group's operations, and how many tags, an MPI can tell apart whose tags end there: at 32,767 or above."""
    num_calls = min(Relay.num_calls, (max_tag + 1) >> 15)
    return num_calls, (max_tag + 1) // num_calls


def ask_open_mpi(library: str) -> Callable[[Vendor], bool | None]:
    """Asks the MPI that `library` is linked to, as Open MPI lets one: MPIX_Query_cuda_support and its ROCm sister.

    The answer is None where the library has no such function.
    """
    loaded = ctypes.CDLL(library)

    def ask(vendor: Vendor) -> bool | None:
        name = {"nvidia": "MPIX_Query_cuda_support", "amd": "MPIX_Query_rocm_support"}[vendor]
        query = getattr(loaded, name, None)
        return None if query is None else bool(query())

    return ask


def is_gpu_aware(vendor: Vendor, environment: Mapping[str, str], ask: Callable[[Vendor], bool | None]) -> bool:
    """Whether this MPI takes memory of the vendor's devices.

    HETHUB_MPI_GPU_AWARE (1 or 0) decides where it is set; else the library itself, else what the MPIs that cannot be
    asked take as their switch: MPICH_GPU_SUPPORT_ENABLED (MPICH, Cray), MV2_USE_CUDA and MV2_USE_ROCM (MVAPICH).
    """
    if vendor == "cpu":
        return False
    if "HETHUB_MPI_GPU_AWARE" in environment:
        return is_on("HETHUB_MPI_GPU_AWARE", environment)
    said = ask(vendor)
    if said is not None:
        return said
    switches = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA" if vendor == "nvidia" else "MV2_USE_ROCM")
    return any(environment.get(switch) == "1" for switch in switches)
