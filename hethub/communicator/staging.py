"""Tensors of any device and layout as flat, contiguous host tensors, and back."""

from collections.abc import Sequence

import torch

from hethub.kernels.device import Device, Event


class Staged:
    """A tensor's flat host form: the tensor's own memory where it is contiguous on the host, else a copy.

    Made in the caller's thread, where the device's current stream is the one the data is produced on; `load` and
    `store` run in a communication thread and never make the caller's stream wait on the host.
    """

    def __init__(self, tensor: torch.Tensor, device: Device) -> None:
        self._tensor = tensor
        self._device = device
        self.is_on_device = tensor.is_cuda
        self.ready = device.current_stream().record() if tensor.is_cuda else Event(None)
        self._is_host_memory = not tensor.is_cuda and tensor.is_contiguous() and not tensor.is_conj()

    def load(self) -> torch.Tensor:
        """The tensor's elements, flat on the host."""
        self.flat = self.empty()
        if not self._is_host_memory:
            self.ready.synchronize()
            self.flat.view(self._tensor.shape).copy_(self._tensor)
        return self.flat

    def empty(self) -> torch.Tensor:
        """As `load` for a tensor that is only written: what is in it does not matter."""
        if self._is_host_memory:
            self.flat = self._tensor.view(-1)
        else:
            host = self._device.host_buffer(self._tensor.numel() * self._tensor.itemsize)
            self.flat = host.view(self._tensor.dtype)
        return self.flat

    def store(self) -> None:
        """Writes the flat form back; done when this returns, so that any stream of the caller may read the tensor."""
        if not self._is_host_memory:
            self._tensor.copy_(self.flat.view(self._tensor.shape))


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Flat tensors one after another."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
