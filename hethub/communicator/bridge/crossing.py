"""Partials on their way over the bridge: encoded for the wire, decoded on arrival, the same on both sides.

A `Side` is where this rank computes: in host memory, or on its device, where partials are encoded before they are
copied to the host and arrivals are decoded and added, so that only what the wire carries crosses to and fro.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from hethub.communicator.bridge.links import Links, Stage
from hethub.communicator.bridge.wire import Wire
from hethub.communicator.counters import Leg, LegClock
from hethub.communicator.relays.relay import Incoming, Transfer
from hethub.kernels.device import Device, Event, Stream
from hethub.spec.ranges import Range


def encode_pieces(
    partial: torch.Tensor, pieces: Sequence[Range], wire: Wire, residual: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The messages for `pieces` (which cover the flat `partial`), and the partial as their receivers will see it.

    With error feedback, `residual` is what earlier calls rounded away here: it is added first, and what this call
    rounds away replaces it (1-bit SGD, Seide et al. 2014; Karimireddy et al. 2019 for why it converges).
    """
    if wire.dtype == partial.dtype:
        return [partial[piece.start : piece.stop] for piece in pieces], partial
    wanted = partial if residual is None else partial + residual
    messages = [wire.encode(wanted[piece.start : piece.stop]) for piece in pieces]
    seen = [wire.decode(message, piece.size) for message, piece in zip(messages, pieces, strict=True)]
    own = seen[0] if len(seen) == 1 else torch.cat(seen) if seen else wanted
    if residual is not None:
        residual.copy_(wanted - own)
    return messages, own


class Expected(Protocol):
    """A piece of another island's partial, or of a total, that will arrive."""

    def wait(self) -> torch.Tensor:
        """The piece, decoded, where this side computes; valid until `release`."""

    def release(self) -> None: ...


class Departing(Protocol):
    """A message on its way to where its relay takes it from: host memory, but for a GPU-aware MPI."""

    def message(self) -> torch.Tensor:
        """The message, there."""


class Side(Protocol):
    """Where this rank computes."""

    def depart(self, message: torch.Tensor, peer: int) -> Departing:
        """Starts what brings an encoded message for `peer` to where its relay takes it from."""

    def expect(self, num_elements: int, wire: Wire, peer: int, stage: Stage) -> Expected:
        """Posts the receive of a message that stands for that many elements."""


class HostSide:
    """Partials lie in host memory: nothing moves but over the wire."""

    def __init__(self, links: Links, clock: LegClock) -> None:
        self._links = links
        self._clock = clock

    def depart(self, message: torch.Tensor, peer: int) -> Departing:
        return _InHostMemory(message)

    def expect(self, num_elements: int, wire: Wire, peer: int, stage: Stage) -> Expected:
        incoming = self._links.expect(wire.num_elements(num_elements), wire.dtype, peer, stage)
        return Decoded(wire, [(incoming, num_elements)], self._clock)


class _InHostMemory:
    def __init__(self, message: torch.Tensor) -> None:
        self._message = message

    def message(self) -> torch.Tensor:
        return self._message


class DeviceSide:
    """Partials lie on a device: messages are copied through pinned memory, unless their relay takes the device's.

    `stream` is the calling thread's current.
    """

    def __init__(self, links: Links, clock: LegClock, device: Device, stream: Stream) -> None:
        self._links = links
        self._clock = clock
        self._device = device
        self._stream = stream

    def depart(self, message: torch.Tensor, peer: int) -> Departing:
        if self._links.takes_device_memory(peer, message.nbytes):
            return _Copied(message, self._stream.record(), self._clock)
        host = self._device.host_buffer(message.nbytes).view(message.dtype)
        host.copy_(message, non_blocking=True)
        return _Copied(host, self._stream.record(), self._clock)

    def expect(self, num_elements: int, wire: Wire, peer: int, stage: Stage) -> Expected:
        size = wire.num_elements(num_elements)
        if self._links.takes_device_memory(peer, size * wire.dtype.itemsize):
            place = torch.empty(size, dtype=wire.dtype, device=self._device.torch_device)
            self._stream.record().synchronize()  # what used this memory before must be done with it
        else:
            place = self._device.host_buffer(size * wire.dtype.itemsize).view(wire.dtype)
        return _ToDevice(self, place, self._links.receive(place, peer, stage), wire, num_elements)

    def arrived(self, message: torch.Tensor, wire: Wire, num_elements: int) -> torch.Tensor:
        """What a message stands for, on the device once the stream is there."""
        return wire.decode(message.to(self._device.torch_device, non_blocking=True), num_elements)


class _Copied:
    def __init__(self, host: torch.Tensor, event: Event, clock: LegClock) -> None:
        self._host = host
        self._event = event
        self._clock = clock

    def message(self) -> torch.Tensor:
        with self._clock(Leg.COPY):
            self._event.synchronize()
        return self._host


class _ToDevice:
    def __init__(self, side: DeviceSide, host: torch.Tensor, transfer: Transfer, wire: Wire, num_elements: int) -> None:
        self._side = side
        self._host = host
        self._transfer = transfer
        self._wire = wire
        self._num_elements = num_elements

    def wait(self) -> torch.Tensor:
        with self._side._clock(Leg.WIRE):
            self._transfer.wait()
        return self._side.arrived(self._host, self._wire, self._num_elements)

    def release(self) -> None:
        return None


class Assembled:
    """A partial that arrives in parts, put where they belong."""

    def __init__(self, whole: torch.Tensor, transfers: Sequence[Transfer], clock: LegClock) -> None:
        self._whole = whole
        self._transfers = transfers
        self._clock = clock

    def wait(self) -> torch.Tensor:
        with self._clock(Leg.WIRE):
            for transfer in self._transfers:
                transfer.wait()
        return self._whole

    def release(self) -> None:
        return None


class Decoded:
    """A partial that arrives as messages of a narrow wire, in the order of its pieces."""

    def __init__(self, wire: Wire, messages: Sequence[tuple[Incoming, int]], clock: LegClock) -> None:
        self._wire = wire
        self._messages = messages
        self._clock = clock

    def wait(self) -> torch.Tensor:
        with self._clock(Leg.WIRE):
            arrived = [message.wait() for message, _ in self._messages]
        with self._clock(Leg.ADD):
            sizes = (num_elements for _, num_elements in self._messages)
            parts = [self._wire.decode(message, size) for message, size in zip(arrived, sizes, strict=True)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

    def release(self) -> None:
        for message, _ in self._messages:
            message.release()
