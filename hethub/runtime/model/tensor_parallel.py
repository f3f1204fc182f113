"""Matrix products and lookups on explicit shards: column-parallel, row-parallel, and the group they sum over.

Every weight is stored with its cut dimension first: column-parallel shards are (out, in), row-parallel shards (in,
out).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.runtime.pace import Pace
from hethub.runtime.state.parameter import Parameter


class TensorGroup:
    """The ranks of a replica; sums over them, and does nothing where the replica is one rank.

    `pace` is told, so that what a rank computes can be timed without what it waits for. A rank that `is_cut` holds a
    shard, also where the others are not there and nothing is summed: then what a shard computes is timed, or warmed up.
    """

    def __init__(self, group: dist.ProcessGroup | None, pace: Pace | None = None, *, is_cut: bool = False) -> None:
        self.group, self.is_cut, self._pace = group, is_cut or group is not None, pace or Pace()

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed in place over the group."""
        if self.group is not None:
            with self._pace.communicating():
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def start_sum(self, tensor: Tensor) -> "dist.Work | None":
        """Start what `sum` does and return at once; `finish` waits for it."""
        if self.group is None:
            return None
        with self._pace.communicating() as waits:
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
            if waits and work is not None:
                work.wait()
        return work

    def finish(self, work: "dist.Work | None") -> None:
        """Waits for what `start_sum` began."""
        if work is not None:
            with self._pace.communicating():
                work.wait()

    def max(self, tensor: Tensor) -> Tensor:
        if self.group is not None:
            with self._pace.communicating():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor


class _ColumnParallel(torch.autograd.Function):
    """x (tokens, in) times each weight (out_i, in) transposed; the input's gradient is summed over the group.

    That sum runs while the weights' gradients are computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, *weights: Parameter) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.group, ctx.weights = group, weights
        return tuple(torch.nn.functional.linear(x, weight.weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x = grads[0] @ ctx.weights[0].weight
        for grad, weight in zip(grads[1:], ctx.weights[1:], strict=True):
            grad_x.addmm_(grad, weight.weight)
        work = ctx.group.start_sum(grad_x)
        for grad, weight in zip(grads, ctx.weights, strict=True):
            weight.add_product(grad.t(), x)
        ctx.group.finish(work)
        return grad_x, None, *(None for _ in ctx.weights)


class _RowParallel(torch.autograd.Function):
    """x (tokens, in_local) times weight (in_local, out), summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, weight: Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return group.sum(x @ weight.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x = grad @ ctx.weight.weight.t()
        ctx.weight.add_product(x.t(), grad)
        return grad_x, None, None


class _Embedding(torch.autograd.Function):
    """Rows `tokens` (tokens,) of a vocabulary shard that starts at `first`; rows of other ranks come by the group's
    sum.

    `anchor` is any tensor that requires a gradient: it makes autograd call backward, where the rows' gradient is added.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, first: int, group: TensorGroup, weight: Parameter) -> Tensor:
        local = tokens - first
        held = (local >= 0) & (local < weight.weight.shape[0])
        ctx.weight, ctx.whole = weight, not group.is_cut
        rows = local if ctx.whole else local.where(held, 0)
        ctx.save_for_backward(rows, held)
        embedded = weight.weight.index_select(0, rows)
        return embedded if ctx.whole else group.sum(embedded * held.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, held = ctx.saved_tensors
        ctx.weight.add_rows(rows, grad if ctx.whole else grad * held.unsqueeze(1))
        return None, None, None, None, None


def column_parallel(x: Tensor, group: TensorGroup, weights: Sequence[Parameter]) -> tuple[Tensor, ...]:
    """x (tokens, in) through every weight (out_i, in): results (tokens, out_i), the rank's own columns."""
    return _ColumnParallel.apply(x, group, *weights)


def row_parallel(x: Tensor, group: TensorGroup, weight: Parameter) -> Tensor:
    """x (tokens, in_local) through weight (in_local, out): (tokens, out), complete on every rank of the group."""
    return _RowParallel.apply(x, group, weight)


def embed(tokens: Tensor, first: int, group: TensorGroup, weight: Parameter) -> Tensor:
    """The rows (tokens, hidden) of token ids `tokens` (tokens,); `weight` holds the vocabulary from `first` on."""
    anchor = torch.empty(0, device=tokens.device, requires_grad=True)
    return _Embedding.apply(anchor, tokens, first, group, weight)
