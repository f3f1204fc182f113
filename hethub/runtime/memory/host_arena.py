"""Host memory that state and activations are offloaded to, and the side streams that carry them there and back, both ways
at once.

On an accelerator host memory is pinned and copies overlap with compute; on a CPU the same calls copy into a second
arena, which is counted alike, and are done when they return. There it lies in mappings of its own, which
/proc/PID/smaps tells apart by their name.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hethub.kernels.device import Device, Event, Stream
from hethub.runtime.memory.allocator import return_free_pages
from hethub.runtime.pace import Pace

MAPPING_NAME = "hethub-host"


class HostArena:
    """One rank's offloaded bytes in host memory, counted; what nobody holds any more is given back."""

    def __init__(self, device: Device, pace: Pace | None = None) -> None:
        self.device, self._pace = device, pace or Pace()
        self._down, self._up = device.new_stream(), device.new_stream()
        self._last: dict[int, Event] = {}  # by where a buffer lies: the last copy from or to it
        self._leaving: list[Copy] = []
        self._left: list[Copy] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self.fetched_bytes = 0  # from host to device, since the start

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor (numel,) in host memory."""
        buffer = host_memory(self.device, numel * dtype.itemsize).view(dtype)
        self.live_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        storage = buffer.untyped_storage()
        weakref.finalize(storage, self._given_back, buffer.nbytes, storage.data_ptr())
        return buffer

    def _given_back(self, num_bytes: int, place: int) -> None:
        self.live_bytes -= num_bytes
        self._last.pop(place, None)

    def trim(self) -> None:
        """On a CPU: returns what freed copies on the device's side leave in malloc's heap."""
        if not self.device.is_gpu:
            return_free_pages()

    def store(self, host: Tensor, values: Tensor) -> "Copy":
        """Starts copying `values`, a result of the current stream, to `host`; later fetches of `host` come after it."""
        event = self._copy(self._down, host, values, host)
        self._pace.start_host_copy(values.nbytes, fetches=False)
        return Copy(values, event, self._down, self.device)

    def leave(self, copies: "list[Copy]") -> None:
        """Let a layer's copies to the host go on while the next layer runs."""
        if self.device.is_gpu:  # else they are done, and their memory can go
            self._leaving += copies

    def end_layer(self) -> None:
        """The current stream waits for what has left the layer before, whose memory is had again from there on."""
        for copy in self._left:
            copy.wait()
        self._left, self._leaving = self._leaving, []

    def fetch(self, host: Tensor, into: Tensor | None = None) -> "Fetch":
        """Starts copying `host` to the device: to a new tensor, or `into` one."""
        if into is None:
            into = torch.empty(host.shape, dtype=host.dtype, device=self.device.torch_device)
        self.fetched_bytes += host.nbytes
        # The memory may have been given back by work that the current stream has not done yet.
        event = self._copy(self._up, into, host, host)
        return Fetch(into, event, self._up, self.device, self._pace)

    def _copy(self, stream: Stream, into: Tensor, source: Tensor, host: Tensor) -> Event:
        """Copies behind what the current stream has, and behind the last copy from or to the buffer that `host` is of."""
        stream.wait(self.device.current_stream().record())
        place = host.untyped_storage().data_ptr()
        if place in self._last:
            stream.wait(self._last[place])
        with stream.active():
            into.copy_(source, non_blocking=True)
            event = self._last[place] = stream.record()
        return event

    def synchronize(self) -> None:
        """Returns when every copy started is done: the host may read what was stored, and its memory be written."""
        for stream in (self._down, self._up):
            stream.record().synchronize()


def host_memory(device: Device, num_bytes: int) -> Tensor:
    """An uninitialised uint8 tensor (num_bytes,) in host memory: pinned for a GPU, a mapping by name on a CPU."""
    if device.is_gpu or not num_bytes or not hasattr(os, "memfd_create"):
        return device.host_buffer(num_bytes)
    descriptor = os.memfd_create(MAPPING_NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8)
    finally:
        os.close(descriptor)  # the mapping stays until the tensor's storage dies


class Copy:
    """A copy under way, from or to `values` on the device.

    Their memory is kept for the copy's stream only where nobody waits for it: an allocator hands such memory out again
    once it has seen that the copy is done, which a host that runs ahead does not.
    """

    def __init__(self, values: Tensor, event: Event, stream: Stream, device: Device) -> None:
        self.values, self.event = values, event
        self._stream, self._device = stream, device
        self._is_ordered = False

    def wait(self) -> Tensor:
        """The values; what the current stream does from now on comes after the copy."""
        self._device.current_stream().wait(self.event)
        self._is_ordered = True
        return self.values

    def finish(self) -> None:
        """Returns when the copy is done."""
        self.event.synchronize()
        self._is_ordered = True

    def __del__(self) -> None:
        if not self._is_ordered:
            self._stream.keep(self.values)


class Fetch(Copy):
    """A copy to the device."""

    def __init__(self, values: Tensor, event: Event, stream: Stream, device: Device, pace: Pace) -> None:
        super().__init__(values, event, stream, device)
        self._pace, self._end = pace, pace.start_host_copy(values.nbytes, fetches=True)  # in the pace's own time

    def wait(self) -> Tensor:
        values = super().wait()
        self._pace.end_host_copy(self._end)
        return values

    @contextmanager
    def behind(self) -> Iterator[None]:
        """What the block begins for the device comes behind the copy, and the current stream's own work beside both."""
        with self._stream.active(), self._pace.behind_host_copy(self._end):
            yield
