"""All-reduce of device tensors over two islands: the vendor's library inside, host memory in between.

Per chunk: native reduce-scatter, copy of this rank's part to pinned memory, exchange with the other island, addition on
the host, copy back, native all-gather. The stages of consecutive chunks overlap: device work goes to a stream of its
own, and only this thread ever waits for it. All native calls of a process come from one thread per group in an order
that is the same on every rank, as NCCL and RCCL want.
"""

from collections.abc import Iterator
from typing import Any

import torch

from hethub.communicator import torch_private
from hethub.communicator.bridge import Bridge
from hethub.communicator.pipeline import run_pipelined
from hethub.communicator.reduction import Reduction
from hethub.kernels.device import Device, Event
from hethub.spec.ranges import Range


class NativeLegs:
    """The island's side of an all-reduce over two islands; `native` is its library's group, None for a rank alone."""

    def __init__(self, bridge: Bridge, native: Any, device: Device) -> None:
        self._bridge = bridge
        self._native = native
        self._device = device
        self._stream = device.new_stream()

    def can_reduce(self, reduction: Reduction) -> bool:
        """Whether the native library knows the operation."""
        return self._native is None or reduction.is_native

    def all_reduce(self, flat: torch.Tensor, ready: Event, reduction: Reduction) -> None:
        """`flat` (on the device, contiguous) becomes the reduction over both islands; done when this returns."""
        self._device.activate()
        self._stream.wait(ready)
        chunks = (self._stages(flat, piece, reduction) for piece in self._bridge.chunks_of(flat))
        run_pipelined(chunks, self._bridge.lag)

    def _stages(self, flat: torch.Tensor, whole: Range, reduction: Reduction) -> Iterator[None]:
        mine = self._bridge.part_of(whole)
        with self._stream.active():
            part = self._scatter(flat, whole, reduction)
            host = self._device.host_buffer(mine.size * flat.itemsize).view(flat.dtype)
            host.copy_(part[: mine.size], non_blocking=True)
            arrived = self._stream.record()
        yield
        arrived.synchronize()
        yield from self._bridge.exchange_partial(host, whole, reduction)
        with self._stream.active():
            part[: mine.size].copy_(host, non_blocking=True)
            self._gather(flat, whole, part)
            done = self._stream.record()
        yield
        done.synchronize()

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
