"""The `mpi` relay: messages through MPI, host-staged, on a communicator of its own.

MPI moves bytes only inside its calls, so a waiting thread tests its request and sleeps in between: a blocking
MPI_Wait would spin on a core and could not be interrupted when a peer is gone.
"""

import threading
import time
from typing import Any

import torch

from hethub.communicator.relay import PeerError, Relay, Transfer
from hethub.communicator.rendezvous import Rendezvous
from hethub.spec.errors import BadInput

_SPINS = 20
_MAX_SLEEP_SECONDS = 5e-4
_MAX_MESSAGE_BYTES = 1 << 30


class MpiTransfer:
    """A message cut into parts below MPI's 2 GiB counts."""

    def __init__(self, relay: "MpiRelay", requests: list[Any], tensor: torch.Tensor, peer: int) -> None:
        self._relay = relay
        self._requests = requests
        self._tensor = tensor
        self._peer = peer

    def wait(self) -> None:
        deadline = time.monotonic() + self._relay.timeout_seconds
        pause = 1e-6
        for request in self._requests:
            spins = 0
            while not request.Test():
                if self._relay.aborted.is_set():
                    raise PeerError(self._peer, "communication was given up on this rank")
                if time.monotonic() > deadline:
                    raise PeerError(self._peer, f"no answer within {self._relay.timeout_seconds:g} s")
                spins += 1
                if spins > _SPINS:
                    time.sleep(pause)
                    pause = min(2 * pause, _MAX_SLEEP_SECONDS)


class MpiRelay(Relay):
    """Any message as non-blocking MPI sends and receives."""

    name = "mpi"

    def __init__(self, mpi: Any, comm: Any, timeout_seconds: float) -> None:
        self._mpi = mpi
        self._comm = comm
        self._max_tag = comm.Get_attr(mpi.TAG_UB)
        self.timeout_seconds = timeout_seconds
        self.aborted = threading.Event()

    @classmethod
    def create(cls, rendezvous: Rendezvous, timeout_seconds: float) -> "MpiRelay":
        """The relay of this rank. Raises BadInput unless MPI started the job and allows calls from any thread."""
        if rendezvous.launcher not in ("openmpi", "mpich"):
            raise BadInput(
                f"communicator.relay is mpi, but this job was started by {rendezvous.launcher}: MPI connects only the"
                " ranks that mpirun started. Start it with mpirun, or choose relay gloo."
            )
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise BadInput(
                "communicator.relay is mpi, but this MPI library does not allow calls from several threads"
                " (MPI_THREAD_MULTIPLE). Use one that does, or choose relay gloo."
            )
        return cls(MPI, MPI.COMM_WORLD.Dup(), timeout_seconds)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start(self._comm.Isend, tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._start(self._comm.Irecv, tensor, peer, tag)

    def _start(self, start: Any, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        assert tag <= self._max_tag, f"tag {tag} is above this MPI's limit of {self._max_tag}"
        if self.aborted.is_set():
            raise PeerError(peer, "communication was given up on this rank")
        data = tensor.view(torch.uint8).numpy()
        parts = [data[at : at + _MAX_MESSAGE_BYTES] for at in range(0, len(data), _MAX_MESSAGE_BYTES)]
        return MpiTransfer(self, [start([part, self._mpi.BYTE], peer, tag) for part in parts], tensor, peer)

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self._comm.Free()
