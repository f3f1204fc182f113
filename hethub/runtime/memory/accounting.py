"""Memory of a rank by our own count of tensors: weights, gradients, optimizer state, and what backward keeps."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

COUNTED_STEPS = 2  # steps whose memory is counted tensor by tensor; the following ones are alike


class MemoryMeter:
    """Counts the bytes of storages from the first time it is shown one of their tensors until they die, and remembers
    the peak.

    A storage lives as long as any view of it, whoever holds that. `fixed` are storages counted elsewhere (weights,
    tables): what refers to them is free.
    """

    def __init__(self, fixed: list[Tensor]) -> None:
        # torch keeps a storage's Python object for as long as the storage lives: until then its id is its own.
        self._fixed = {id(tensor.untyped_storage()) for tensor in fixed}
        self._counted: set[int] = set()
        self._steps_counted = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what the graphs built in this block keep, until it is freed."""
        with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept):
            yield

    def counting_step(self) -> AbstractContextManager[None]:
        """Do what `counting` does for the first COUNTED_STEPS steps only, so that later steps are not slowed by it."""
        if self._steps_counted == COUNTED_STEPS:
            return nullcontext()
        self._steps_counted += 1
        return self.counting()

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor, counted, and detached: a result that its own graph keeps would never be freed if backward does
        not run."""
        self.take(tensor)
        return tensor.detach()

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is counted elsewhere."""
        return id(tensor.untyped_storage()) in self._fixed

    def take(self, tensor: Tensor) -> None:
        """Counts a tensor's storage until it dies; one that is counted already adds nothing."""
        storage = tensor.untyped_storage()
        if (key := id(storage)) in self._fixed or key in self._counted:
            return
        self._counted.add(key)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._died, key, storage.nbytes())

    def _died(self, key: int, num_bytes: int) -> None:
        self._counted.remove(key)
        self.live_bytes -= num_bytes
