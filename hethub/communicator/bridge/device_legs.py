"""All-reduce of device tensors: the vendor's library inside islands, host memory in between.

Per chunk: native reduce-scatter, this rank's part encoded for the wire and copied to pinned memory, exchange with the
other islands, arrivals copied to the device and added there, native all-gather. The stages of consecutive chunks
overlap: device work goes to the dispatcher's stream, and only the group's own thread ever waits for it.
"""

from collections.abc import Iterator
from typing import Any

import torch

from hethub.communicator import torch_private
from hethub.communicator.bridge.arithmetic import Reduction
from hethub.communicator.bridge.chunks import run_pipelined
from hethub.communicator.bridge.collectives import Bridge
from hethub.communicator.bridge.launch_order import Dispatcher, Turn
from hethub.communicator.counters import Leg
from hethub.kernels.device import Device, Event
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
        self._native = native
        self._device = device
        self._dispatcher = dispatcher

    def can_reduce(self, reduction: Reduction) -> bool:
        """Whether the native library knows the operation and the type."""
        return self._native is None or (reduction.is_native and reduction.dtype in _NATIVE_TYPES)

    def take_turn(self) -> Turn:
        """This operation's place among all that launch legs in this process; taken when it is submitted."""
        return self._dispatcher.take_turn()

    def all_reduce(self, flat: torch.Tensor, ready: Event, reduction: Reduction, turn: Turn) -> None:
        """`flat` (on the device, contiguous) becomes the reduction over all islands; done when this returns."""
        self._device.activate()
        stream = self._dispatcher.stream
        with turn, stream.active():
            stream.wait(ready)
            chunks = (self._stages(flat, piece, reduction) for piece in self._bridge.chunks_of(flat))
            run_pipelined(chunks, self._bridge.lag)
            done = stream.record()
        with self._bridge.clock(Leg.ISLAND_GATHER):
            done.synchronize()

    def _stages(self, flat: torch.Tensor, whole: Range, reduction: Reduction) -> Iterator[None]:
        with self._bridge.clock(Leg.ISLAND_REDUCE):
            part = self._scatter(flat, whole, reduction)
        mine = part[: self._bridge.part_of(whole).size]
        stream = self._dispatcher.stream
        yield from self._bridge.exchange_partial(whole, lambda: mine, reduction, self._device, stream)
        with self._bridge.clock(Leg.ISLAND_GATHER):
            self._gather(flat, whole, part)
        yield

    def _scatter(self, flat: torch.Tensor, whole: Range, reduction: Reduction) -> torch.Tensor:
        """The island's sum of this rank's part, on the device, padded to the size all parts have."""
        data = flat[whole.start : whole.stop]
        if self._native is None:
            return data
        part_size = -(-whole.size // self._native.size())
        part = torch.empty(part_size, dtype=flat.dtype, device=flat.device)
        padded = torch.nn.functional.pad(data, (0, part_size * self._native.size() - whole.size))
        torch_private.native_reduce_scatter(self._native, part, padded, reduction.native_op)
        return part

    def _gather(self, flat: torch.Tensor, whole: Range, part: torch.Tensor) -> None:
        if self._native is None:
            return
        padded = torch.empty(part.numel() * self._native.size(), dtype=flat.dtype, device=flat.device)
        torch_private.native_all_gather(self._native, padded, part)
        flat[whole.start : whole.stop].copy_(padded[: whole.size], non_blocking=True)
