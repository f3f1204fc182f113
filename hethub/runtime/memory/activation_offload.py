"""What a layer keeps for its backward, in host memory instead of on the device (offloaded activations)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.memory.host_arena import Copy, Fetch, HostArena

_Storage = tuple[int, torch.dtype]  # address and type of a storage's elements


class _View(NamedTuple):
    """A tensor that autograd keeps, as a view of a storage that is offloaded."""

    storage: _Storage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class OffloadedLayer:
    """The tensors that one layer keeps of one microbatch, each storage once; they leave beside the layer after it.

    `prefetch` starts bringing all of them back; otherwise the first one that is needed does. Their host memory is given
    back with this object.
    """

    def __init__(self, arena: HostArena, meter: MemoryMeter) -> None:
        self._arena, self._meter = arena, meter
        self._hosts: dict[_Storage, Tensor] = {}
        self._leaving: list[Copy] = []  # held until the layer is through: an address stands for one storage only
        self._coming: dict[_Storage, Fetch] = {}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Offloads what the graph built in this block keeps."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield
        self.end()

    def end(self) -> None:
        """Free the tensors on the device."""
        self._arena.leave(self._leaving)
        self._leaving = []
        self._arena.trim()

    def pack(self, tensor: Tensor) -> Any:
        """Starts copying a tensor to the host; masks and what is counted as fixed stay where they are."""
        if not tensor.is_floating_point() or self._meter.is_fixed(tensor):
            return self._meter.keep(tensor)
        key = tensor.untyped_storage().data_ptr(), tensor.dtype
        if key not in self._hosts:
            self._meter.keep(tensor)
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.detach().untyped_storage())
            self._hosts[key] = self._arena.empty(flat.numel(), flat.dtype)
            self._leaving.append(self._arena.store(self._hosts[key], flat))
        return _View(key, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        """The tensor on the device, as it was."""
        if isinstance(packed, Tensor):
            return packed
        self.prefetch()
        return self._coming[packed.storage].wait().as_strided(packed.size, packed.stride, packed.offset)

    def prefetch(self) -> None:
        """Starts bringing everything back, once."""
        if self._coming:
            return
        self._arena.trim()
        for key, host in self._hosts.items():
            self._coming[key] = self._arena.fetch(host)
            self._meter.take(self._coming[key].values)


@dataclass(frozen=True)
class Kept:
    """Tensors kept on the device, where `OffloadedTensors` keeps some in host memory."""

    tensors: tuple[Tensor, ...]

    def prefetch(self) -> None:
        """Nothing to bring."""


class OffloadedTensors:
    """A layer's input, or what its weights' gradients are made of: in host memory until asked for, each storage once."""

    def __init__(self, tensors: Iterable[Tensor], arena: HostArena, meter: MemoryMeter) -> None:
        self._layer = OffloadedLayer(arena, meter)
        self._packed = [self._layer.pack(tensor) for tensor in tensors]
        self._layer.end()

    def prefetch(self) -> None:
        """Starts bringing them back."""
        self._layer.prefetch()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, on the device."""
        return tuple([self._layer.unpack(packed).detach() for packed in self._packed])
