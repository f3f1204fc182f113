"""One rank's shard of one parameter: a view into flat storage that accumulates its own gradient."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _accumulates_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrix products of half precision add to fp32 there without rounding in between; on CPUs they do not."""
    half, wide = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    small = torch.finfo(dtype).eps  # beside 15 a half precision loses it
    few = half.clone()
    few[-1] = small
    try:
        torch.addmm(wide, half, few, out=wide, out_dtype=torch.float32)
        fresh = torch.mm(half, few, out=torch.empty_like(wide), out_dtype=torch.float32)
    except RuntimeError:  # NotImplementedError is one
        return False
    return all(torch.equal(found, torch.full_like(found, sum_ + small)) for found, sum_ in ((wide, 16), (fresh, 15)))


class Parameter:
    """A weight shard and its gradient, both views into the rank's flat storage, in stored shape (cut dimension first).

    The gradient is written by the backward functions themselves, so that a matrix product can accumulate in place and
    no separate pass over the weights is needed. A step has `uses` x microbatches contributions; when the last one is in,
    `on_complete` is called, which lets the gradient's reduction start while backward goes on.
    """

    def __init__(self, name: str, weight: Tensor, grad: Tensor) -> None:
        self.name, self.weight, self.grad = name, weight, grad
        self.uses = 0
        self._pending = 0
        self._fresh = True
        self._on_complete: Callable[[Parameter], None] = lambda parameter: None
        self._deferred_wgrad: list[Product] | None = None

    def start_step(self, num_microbatches: int, on_complete: Callable[["Parameter"], None]) -> None:
        """Forgets the old gradient and expects `num_microbatches` contributions of every use."""
        self._pending, self._fresh, self._on_complete = self.uses * num_microbatches, True, on_complete

    def open(self, grad: Tensor) -> None:
        """Takes an empty place for a round's gradient, whatever is written there."""
        self.grad, self._fresh = grad, True

    def close(self) -> None:
        """Makes the round's gradient complete: zeros where nothing was added."""
        if self._fresh:
            self.grad.zero_()

    def add_product(self, left: Tensor, right: Tensor, *, completes: bool = True) -> None:
        """Adds left @ right, (rows, n) x (n, columns) with the shape of the shard.

        A contribution that comes in several products is counted with the one that `completes` it.
        """
        if self._deferred_wgrad is not None:
            self._deferred_wgrad.append((self, left, right))
            return
        wide: dict[str, Any] = {} if left.dtype == self.grad.dtype else {"out_dtype": self.grad.dtype}
        if wide and not _accumulates_wide(left.device, left.dtype):
            self._add(left @ right)
        elif self._fresh:
            torch.mm(left, right, out=self.grad, **wide)
        else:
            torch.addmm(self.grad, left, right, out=self.grad, **wide)
        self._contributed(completes)

    def add(self, value: Tensor) -> None:
        """Adds a gradient of the shard's shape."""
        self._add(value)
        self._contributed()

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Adds values[i] (n, columns) to row rows[i] (n,); rows may repeat."""
        if self._fresh:
            self.grad.zero_()
        self.grad.index_add_(0, rows, values.to(self.grad.dtype))
        self._contributed()

    def _add(self, value: Tensor) -> None:
        self.grad.copy_(value) if self._fresh else self.grad.add_(value)

    def _contributed(self, completes: bool = True) -> None:
        self._fresh = False
        self._pending -= completes
        if completes and self._pending == 0:
            self._on_complete(self)


Product = tuple[Parameter, Tensor, Tensor]  # left @ right belongs to the parameter's gradient


@contextmanager
def deferring(parameters: Iterable[Parameter]) -> Iterator[list[Product]]:
    """Inside the block, products for these parameters' gradients are listed instead of added; each is a complete contribution."""
    own, products = list(parameters), list[Product]()
    for parameter in own:
        parameter._deferred_wgrad = products
    try:
        yield products
    finally:
        for parameter in own:
            parameter._deferred_wgrad = None
