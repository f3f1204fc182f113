"""What carries bytes between two ranks: one small interface over Gloo, MPI and shared memory.

Messages between an ordered pair of ranks with the same tag arrive in the order sent; different tags are independent.
Both sides know sizes beforehand; empty messages are not sent. Tensors are contiguous, and in host memory but where a
relay says that it takes a device's.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from hethub.kernels.device import Device

CLOSED = "connection closed: that rank destroyed its process group, or its process ended"

OTHER_CALL = (
    "that rank is in another operation of the group: it has refused one that this rank has begun, or the other way round, or"
    " their calls differ in name, type, size, root or reduction (HETHUB_DEBUG=1 says in which)"
)


def misfit(num_bytes: int, num_expected: int) -> str:
    """Why a message of that size is of no use to its receiver."""
    return f"has sent {num_bytes} bytes, and {num_expected} were expected: the two ranks' tensors do not fit each other"


class PeerError(RuntimeError):
    """A transfer with `peer` failed; becomes RunFailed where operation and group are known."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"rank {peer}: {reason}")
        self.peer = peer
        self.reason = reason


class Transfer(Protocol):
    """A message under way. The tensor must stay unchanged until `wait` returns."""

    def wait(self) -> None:
        """Returns when the tensor may be used again. Raises PeerError on failure or timeout."""

    def wait_until_read(self) -> None:
        """Wait until the peer has the message and no memory of the relay holds it any more. It takes the place of `wait`."""
        self.wait()


class Incoming(Protocol):
    """A message expected, in memory the relay lends."""

    def wait(self) -> torch.Tensor:
        """The message; valid until `release`. Raises PeerError."""

    def release(self) -> None:
        """Gives the memory back; the tensor must not be used any more."""


class Outgoing(Protocol):
    """A message about to be written in memory the relay lends; after `send` it may still be read until `release`."""

    tensor: torch.Tensor

    def send(self, tag: int) -> Transfer: ...

    def release(self) -> None:
        """The sender has no more use for the tensor."""


class Relay(ABC):
    """Carries messages between this rank and any other rank of the world (ranks are the world's)."""

    name: str
    num_tags = 1 << 19
    """Tags begin at 0. Above them stands what tells a group's operations apart, modulo `num_calls`: a message of another
    operation than its receiver's is never taken for one of this."""
    num_calls = 1 << 12
    takes_device_memory = False
    """Whether `send` and `receive` take tensors of a device, whose work on them is done."""
    device = Device(vendor="cpu")
    """What copies messages to and from the memory that the relay lends."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer: ...

    @abstractmethod
    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer: ...

    def expect(self, num_elements: int, dtype: torch.dtype, peer: int, tag: int) -> Incoming:
        """Receive a message that is only read. A relay that can do so lends its own memory."""
        tensor = self._memory(num_elements, dtype)
        return ReceivedInto(tensor, self.receive(tensor, peer, tag))

    def outgoing(self, num_elements: int, dtype: torch.dtype, peer: int) -> Outgoing:
        """Memory to write a message for `peer` into: a relay that can lends what the peer will read."""
        return OwnMemory(self, self._memory(num_elements, dtype), peer)

    def _memory(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self.device.host_buffer(num_elements * dtype.itemsize).view(dtype)

    @abstractmethod
    def abort(self) -> None:
        """Makes every pending and later transfer of this process fail soon; may be called from any thread."""

    def close(self) -> None:  # noqa: B027  most relays hold nothing that outlives the process group
        """Frees what the relay holds, when all ranks are done with it."""


class OwnMemory:
    """An outgoing message in a tensor of its own."""

    def __init__(self, relay: Relay, tensor: torch.Tensor, peer: int) -> None:
        self.tensor = tensor
        self._relay = relay
        self._peer = peer

    def send(self, tag: int) -> Transfer:
        return self._relay.send(self.tensor, self._peer, tag)

    def release(self) -> None:
        return None


class ReceivedInto:
    """An expected message in a tensor of its own."""

    def __init__(self, tensor: torch.Tensor, transfer: Transfer) -> None:
        self._tensor = tensor
        self._transfer = transfer

    def wait(self) -> torch.Tensor:
        self._transfer.wait()
        return self._tensor

    def release(self) -> None:
        return None
