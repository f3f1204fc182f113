"""Memory of a rank by our own count of tensors: weights, gradients, optimizer state, and what backward keeps."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

COUNTED_STEPS = 2  # steps whose memory is counted tensor by tensor; the following ones are alike


class Kept:
    """A tensor kept for backward; its bytes are given back when nobody holds this any more."""

    __slots__ = ("_meter", "tensor")

    def __init__(self, tensor: Tensor, meter: "MemoryMeter") -> None:
        # Detached: a result that its own graph keeps would never be freed if backward does not run.
        self.tensor, self._meter = tensor.detach(), meter
        meter.take(tensor)

    def __del__(self) -> None:
        self._meter.release(self.tensor)

    def prefetch(self) -> None:
        """Nothing to bring: it is on the device."""


class MemoryMeter:
    """Counts the bytes of tensors kept for backward, each storage once, and remembers the peak.

    `fixed` are storages counted elsewhere (weights, tables): what refers to them is free.
    """

    def __init__(self, fixed: list[Tensor]) -> None:
        self._fixed = {tensor.untyped_storage().data_ptr() for tensor in fixed}
        self._uses: dict[int, int] = {}
        self._steps_counted = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what the graphs built in this block keep, until they are freed."""
        with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept.tensor):
            yield

    def counting_step(self) -> AbstractContextManager[None]:
        """As `counting` for the first COUNTED_STEPS steps; later ones are not slowed by it."""
        if self._steps_counted == COUNTED_STEPS:
            return nullcontext()
        self._steps_counted += 1
        return self.counting()

    def keep(self, tensor: Tensor) -> Kept:
        """Counts a tensor for as long as the result lives."""
        return Kept(tensor, self)

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is counted elsewhere."""
        return tensor.untyped_storage().data_ptr() in self._fixed

    def take(self, tensor: Tensor) -> None:
        """Counts a tensor that stays alive; storages already counted add nothing."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self._fixed:
            return
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] == 1:
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, tensor: Tensor) -> None:
        """Ends one use of a counted tensor."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._uses:
            return
        self._uses[key] -= 1
        if self._uses[key] == 0:
            del self._uses[key]
            self.live_bytes -= storage.nbytes()
