"""Tensors of any device and layout as flat, contiguous host tensors, and back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hethub.kernels.device import Device, Event, Stream
from hethub.kernels.reference import TorchKernels
from hethub.spec.ranges import Range, from_sizes


@dataclass(frozen=True, kw_only=True)
class Stager:
    """How one thread of communication moves tensors between a device and the host: on a stream of its own."""

    device: Device
    kernels: TorchKernels
    stream: Stream
    stages_host_tensors: bool = False
    """Host tensors take the way of a device's, so that this way can be tested where there is none."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu" or self.stages_host_tensors

    def stage(self, *tensors: torch.Tensor) -> "Staged":
        """Called in the caller's thread, where the device's current stream is the one the data is produced on."""
        return Staged(tensors, self)


class Staged:
    """The flat host form of some tensors of one type: their own memory where they are contiguous on the host.

    Others are packed into one buffer (pinned, for a device), so that a list of device tensors crosses in one copy.
    `load` and `store` run in a communication thread: the caller's stream never waits for the host.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], stager: Stager) -> None:
        self._tensors = list(tensors)
        self._stager = stager
        self.is_on_device = any(stager.on_device(tensor) for tensor in tensors)
        self.ready = stager.device.current_stream().record() if self.is_on_device else Event(None)
        self._is_own_memory = not self.is_on_device and all(is_plain(tensor) for tensor in tensors)
        self._whole: torch.Tensor | None = None

    def load(self) -> list[torch.Tensor]:
        """Each tensor's elements, flat on the host."""
        if self._is_own_memory:
            return [in_a_row(tensor) for tensor in self._tensors]
        return self._cut(self.load_whole())

    def empty(self) -> list[torch.Tensor]:
        """Do what `load` does for tensors that are only written, whose contents do not matter."""
        if self._is_own_memory:
            return [in_a_row(tensor) for tensor in self._tensors]
        return self._cut(self.empty_whole())

    def load_whole(self) -> torch.Tensor:
        """The elements of all tensors, one tensor after another."""
        whole = self.empty_whole()
        if self._is_own_memory and len(self._tensors) == 1:
            return whole
        if not self.is_on_device:
            self._pack(whole)
            return whole
        stream = self._stager.stream
        stream.wait(self.ready)
        with stream.active():
            whole.copy_(self._packed_on_device(), non_blocking=True)
        stream.record().synchronize()
        return whole

    def empty_whole(self) -> torch.Tensor:
        """Do what `load_whole` does for a tensor that is only written."""
        if self._is_own_memory and len(self._tensors) == 1:
            return in_a_row(self._tensors[0])
        num_elements = sum(tensor.numel() for tensor in self._tensors)
        host = self._stager.device.host_buffer(num_elements * self._tensors[0].itemsize)
        self._whole = host.view(self._tensors[0].dtype)
        return self._whole

    def store(self) -> None:
        """Writes the flat form back; done when this returns, so that any stream of the caller may read the tensors."""
        if self._whole is None:
            return
        stream = self._stager.stream
        stream.wait(self.ready)
        with stream.active():
            self._unpack(self._whole)
        stream.record().synchronize()

    def _cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole[place.start : place.stop] for place in self._places()]

    def _places(self) -> list[Range]:
        return from_sizes([tensor.numel() for tensor in self._tensors])

    def _packed_on_device(self) -> torch.Tensor:
        """All elements on the device, in one piece."""
        first = self._tensors[0]
        if len(self._tensors) == 1:
            # Plain on the device already: on the host torch would negate before a copy under way has come there.
            return flat_of(first)
        packed = torch.empty(sum(t.numel() for t in self._tensors), dtype=first.dtype, device=first.device)
        self._pack(packed)
        return packed

    def _pack(self, whole: torch.Tensor) -> None:
        sources = [_bytes(tensor.resolve_conj().resolve_neg().contiguous()) for tensor in self._tensors]
        self._stager.kernels.pack(sources, _bytes(whole))

    def _unpack(self, whole: torch.Tensor) -> None:
        if len(self._tensors) == 1 or not all(is_plain(tensor) for tensor in self._tensors):
            for tensor, place in zip(self._tensors, self._places(), strict=True):
                tensor.copy_(whole[place.start : place.stop].view(tensor.shape), non_blocking=True)
            return
        near = whole.to(self._tensors[0].device, non_blocking=True)
        self._stager.kernels.unpack(_bytes(near), [_bytes(tensor) for tensor in self._tensors])


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in order: its own memory where that holds them so."""
    return in_a_row(tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous())


def place_for(tensor: torch.Tensor) -> torch.Tensor:
    """Where the tensor's elements can land in order: its own memory, or other that is to be copied from."""
    plain = tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return in_a_row(plain)


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's own memory in one dimension of stride 1.

    torch calls a tensor of one or no element contiguous whatever its strides, and `view(-1)` keeps them: a column of a
    matrix of one row. Such a tensor could not be seen as bytes.
    """
    flat = tensor.view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds its elements in order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return in_a_row(tensor).view(torch.uint8)
