"""Host memory that state and activations are offloaded to, and the side stream that carries them there and back.

On an accelerator host memory is pinned and copies overlap with compute; on a CPU the same calls copy into a second
arena, which is counted alike, and are done when they return.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from hethub.kernels.device import Device, Event
from hethub.runtime.pace import Pace


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
        buffer = self.device.host_buffer(numel * dtype.itemsize).view(dtype)
        self.live_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(buffer.untyped_storage(), self._given_back, buffer.nbytes)
        return buffer

    def _given_back(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

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
