"""All-reduce of device tensors: the vendor's library inside islands, host memory in between.

Per chunk: native reduce-scatter, this rank's part encoded for the wire and copied to pinned memory, exchange with the
other islands, arrivals copied to the device and added there, native all-gather. The stages of consecutive chunks
overlap: device work goes to the dispatcher's stream, and only the group's own thread ever waits for it. The messages
are those of a host all-reduce, so other islands may be made of CPUs.
"""

from collections.abc import Iterator
from typing import Any

import torch

from hethub.communicator import torch_private
from hethub.communicator.bridge.arithmetic import Reduction
from hethub.communicator.bridge.chunks import run_pipelined
from hethub.communicator.bridge.collectives import Bridge
from hethub.communicator.bridge.exchange import Exchange, Start, at
from hethub.communicator.bridge.launch_order import Dispatcher, Turn
from hethub.communicator.bridge.links import Links, Stage
from hethub.communicator.bridge.staging import is_plain
from hethub.communicator.bridge.wire import Wire
from hethub.communicator.counters import Leg, LegClock
from hethub.communicator.relays.relay import Transfer
from hethub.kernels.device import Device, Event, Stream
from hethub.spec.ranges import Range

# What NCCL and RCCL add; torch has more types.
_NATIVE_TYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}


class NativeLegs:
    """The island's side of an all-reduce; `native` is its library's group, None for a rank alone in its island."""

    def __init__(self, bridge: Bridge, native: Any, device: Device, dispatcher: Dispatcher) -> None:
        self._bridge = bridge
        self.native = native
        self._device = device
        self._dispatcher = dispatcher

    def can_reduce(self, reduction: Reduction) -> bool:
        """Whether the native library knows the operation and the type."""
        return self.native is None or (reduction.is_native and reduction.dtype in _NATIVE_TYPES)

    def take_turn(self) -> Turn:
        """This operation's place among all that launch legs in this process; taken when it is submitted."""
        return self._dispatcher.take_turn()

    def all_reduce(self, tensor: torch.Tensor, ready: Event, reduction: Reduction, turn: Turn) -> None:
        """`tensor` (on the device, of any layout) becomes the reduction over all islands; done when this returns."""
        self._device.activate()
        stream = self._dispatcher.stream
        with turn, stream.active():
            stream.wait(ready)
            plain = is_plain(tensor)
            flat = reduction.prepared((tensor if plain else tensor.resolve_conj().resolve_neg().contiguous()).view(-1))
            chunks = (self._stages(flat, piece, reduction) for piece in self._bridge.chunks_of(flat))
            run_pipelined(chunks, self._bridge.lag)
            if not plain or reduction.is_scaled:
                tensor.copy_(flat.view(tensor.shape))
            done = stream.record()
        with self._bridge.clock(Leg.ISLAND_GATHER):
            done.synchronize()

    def _stages(self, flat: torch.Tensor, whole: Range, reduction: Reduction) -> Iterator[None]:
        bridge = self._bridge
        with bridge.clock(Leg.ISLAND_REDUCE):
            part = self._scatter(flat, whole, reduction)
        route = bridge.all_reduce_route(whole)
        side = DeviceSide(bridge.links, bridge.clock, self._device, self._dispatcher.stream, part, route.mine)
        yield from Exchange(route=route, side=side, reduction=reduction).stages()
        with bridge.clock(Leg.ISLAND_GATHER):
            self._gather(flat, whole, part)
        yield

    def _scatter(self, flat: torch.Tensor, whole: Range, reduction: Reduction) -> torch.Tensor:
        """The island's sum of this rank's part, on the device, padded to the size all parts have."""
        data = flat[whole.start : whole.stop]
        if self.native is None:
            return data
        part_size = -(-whole.size // self.native.size())
        part = torch.empty(part_size, dtype=flat.dtype, device=flat.device)
        padded = torch.nn.functional.pad(data, (0, part_size * self.native.size() - whole.size))
        torch_private.native_reduce_scatter(self.native, part, padded, reduction.native_op)
        return part

    def _gather(self, flat: torch.Tensor, whole: Range, part: torch.Tensor) -> None:
        if self.native is None:
            return
        padded = torch.empty(part.numel() * self.native.size(), dtype=flat.dtype, device=flat.device)
        torch_private.native_all_gather(self.native, padded, part)
        flat[whole.start : whole.stop].copy_(padded[: whole.size], non_blocking=True)


class DeviceSide:
    """One chunk on a device: `part` holds the island's sum of `mine`, which becomes the total.

    Messages are copied through pinned memory, unless their relay takes the device's. `stream` is the calling thread's
    current.
    """

    copies = True

    def __init__(
        self, links: Links, clock: LegClock, device: Device, stream: Stream, part: torch.Tensor, mine: Range
    ) -> None:
        self.clock = clock
        self._links = links
        self._device = device
        self._stream = stream
        self._part = part
        self._mine = mine

    def partial(self, piece: Range, only_reader: int | None) -> torch.Tensor:
        return self.place(piece)

    def place(self, piece: Range) -> torch.Tensor:
        return at(self._part, self._mine, piece)

    def send(self, message: torch.Tensor, peer: int, stage: Stage) -> Start:
        if not self._links.takes_device_memory(peer, message.nbytes):
            host = self._device.host_buffer(message.nbytes).view(message.dtype)
            message = host.copy_(message, non_blocking=True)
        copied = self._stream.record()

        def start() -> Transfer:
            with self.clock(Leg.COPY):
                copied.synchronize()
            return self._links.send(message, peer, stage)

        return start

    def expect(self, num_elements: int, wire: Wire, peer: int, stage: Stage) -> "Uploaded":
        size = wire.num_elements(num_elements)
        if self._links.takes_device_memory(peer, size * wire.dtype.itemsize):
            place = torch.empty(size, dtype=wire.dtype, device=self._device.torch_device)
            self._stream.record().synchronize()  # what used this memory before must be done with it
        else:
            place = self._device.host_buffer(size * wire.dtype.itemsize).view(wire.dtype)
        transfer = self._links.receive(place, peer, stage)
        return Uploaded(place, transfer, self._device, wire, num_elements, self.clock)

    def release(self) -> None:
        return None


class Uploaded:
    """A message that is copied to the device, and decoded there, when it has arrived."""

    def __init__(
        self,
        message: torch.Tensor,
        transfer: Transfer,
        device: Device,
        wire: Wire,
        num_elements: int,
        clock: LegClock,
    ) -> None:
        self._message = message
        self._transfer = transfer
        self._device = device
        self._wire = wire
        self._num_elements = num_elements
        self._clock = clock

    def wait(self) -> torch.Tensor:
        with self._clock(Leg.WIRE):
            self._transfer.wait()
        return self._wire.decode(self._message.to(self._device.torch_device, non_blocking=True), self._num_elements)

    def release(self) -> None:
        return None
