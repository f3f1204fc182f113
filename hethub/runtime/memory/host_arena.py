"""Host memory that state and activations are offloaded to, and the side stream that carries them there and back.

On an accelerator host memory is pinned and copies overlap with compute; on a CPU the same calls copy into a second
arena, which is counted alike, and are done when they return. There it lies in mappings of its own, which
/proc/PID/smaps tells apart by their name.
"""

import os
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from hethub.kernels.device import Device, Event
from hethub.runtime.memory.allocator import return_free_pages
from hethub.runtime.pace import Pace

MAPPING_NAME = "hethub-host"


class HostArena:
    """One rank's offloaded bytes in host memory, counted; what nobody holds any more is given back."""

    def __init__(self, device: Device, pace: Pace | None = None) -> None:
        self.device, self._pace = device, pace or Pace()
        self._stream = device.new_stream()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.fetched_bytes = 0  # from host to device, since the start

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor (numel,) in host memory."""
        buffer = host_memory(self.device, numel * dtype.itemsize).view(dtype)
        self.live_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(buffer.untyped_storage(), self._given_back, buffer.nbytes)
        return buffer

    def _given_back(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

    def trim(self) -> None:
        """On a CPU: returns what freed copies on the device's side leave in malloc's heap."""
        if not self.device.is_gpu:
            return_free_pages()

    def store(self, host: Tensor, values: Tensor) -> None:
        """Starts copying `values`, a result of the current stream, to `host`; later fetches of `host` come after it."""
        self._stream.wait(self.device.current_stream().record())
        with self._stream.active():
            host.copy_(values, non_blocking=True)
        self._stream.keep(values)
        self._pace.start_host_copy(values.nbytes)

    def fetch(self, host: Tensor, into: Tensor | None = None) -> "Fetch":
        """Starts copying `host` to the device: to a new tensor, or `into` one."""
        if into is None:
            into = torch.empty(host.shape, dtype=host.dtype, device=self.device.torch_device)
        self.fetched_bytes += host.nbytes
        # The memory may have been given back by work that the current stream has not done yet.
        self._stream.wait(self.device.current_stream().record())
        with self._stream.active():
            into.copy_(host, non_blocking=True)
            event = self._stream.record()
        self._stream.keep(into)
        return Fetch(into, event, self.device, self._pace, self._pace.start_host_copy(host.nbytes))

    def synchronize(self) -> None:
        """Returns when every copy started is done: the host may read what was stored."""
        self._stream.record().synchronize()


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


@dataclass(frozen=True)
class Fetch:
    """A copy to the device under way."""

    values: Tensor
    event: Event
    device: Device
    pace: Pace
    end: float | None  # in the pace's own time

    def wait(self) -> Tensor:
        """The copy; what the current stream does from now on comes after it."""
        self.device.current_stream().wait(self.event)
        self.pace.end_host_copy(self.end)
        return self.values
