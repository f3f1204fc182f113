"""Cross-entropy over a vocabulary-parallel head, in chunks of tokens, with its gradient computed on the way."""

from typing import Any

import torch
from torch import Tensor

from hethub.kernels.bodies import Body
from hethub.runtime.model.tensor_parallel import TensorGroup
from hethub.runtime.state.parameter import Parameter
from hethub.spec.layout.tensors import IGNORED, LOSS_CHUNK_TOKENS


class _HeadLoss(torch.autograd.Function):
    """Sum of token losses times `scale`. The gradient is computed with the logits at hand, so they are never kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: Tensor, first: int, scale: float, group: TensorGroup, weight: Parameter
    ) -> Tensor:
        grad_x = torch.empty_like(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=x.device)
        factor = torch.full((), scale, dtype=dtype, device=x.device)  # it is another one at every step
        for start in range(0, x.shape[0], LOSS_CHUNK_TOKENS):
            chunk = slice(start, start + LOSS_CHUNK_TOKENS)
            logits = x[chunk] @ weight.weight.t()
            loss, largest, sums = _losses(logits, targets[chunk], first, group)
            total += loss
            at_targets = _to_gradient(logits, targets[chunk], largest, sums, factor, first)
            logits.scatter_(1, *at_targets)  # by itself: within the body Inductor would write all logits twice
            torch.mm(logits, weight.weight, out=grad_x[chunk])
            weight.add_product(logits.t(), x[chunk], completes=start + LOSS_CHUNK_TOKENS >= x.shape[0])
        group.sum(grad_x)
        ctx.save_for_backward(grad_x)
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_x,) = ctx.saved_tensors
        return grad_x * grad, None, None, None, None, None


def _losses(logits: Tensor, targets: Tensor, first: int, group: TensorGroup) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of a chunk in at least fp32; then, for its gradient, of each token the largest logit and the sum
    of exponentials. Logits of at least fp32 become exponentials."""
    largest = None
    if group.is_cut:
        largest = group.max(logits.amax(dim=1).to(torch.promote_types(logits.dtype, torch.float32)))
    largest, sums = _statistics(logits, targets, largest, first)
    total, target = group.sum(sums)
    return ((total.log() - target) * (targets != IGNORED)).sum(), largest, total


def _held(targets: Tensor, first: int, columns: int) -> Tensor:
    """Which targets lie in the columns from `first` on."""
    return (targets >= first) & (targets < first + columns) & (targets != IGNORED)


def _column(targets: Tensor, first: int, columns: int) -> Tensor:
    """Each target's column (tokens, 1), or any: a gather from there asks nothing of the host."""
    return (targets - first).clamp(0, columns - 1).unsqueeze(1)


@Body
def _statistics(logits: Tensor, targets: Tensor, largest: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
    """Return per token the largest logit (tokens,), which is `largest` where other ranks hold logits too, and (2, tokens): the
    sum of exponentials, and the target's logit if this rank holds it, both relative to the largest logit."""
    columns = logits.shape[1]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    highest = wide.amax(dim=1) if largest is None else largest.clone()
    wide.sub_(highest.unsqueeze(1))
    target = wide.gather(1, _column(targets, first, columns)).squeeze(1) * _held(targets, first, columns)
    return highest, torch.stack((wide.exp_().sum(dim=1), target))


@Body
def _to_gradient(
    logits: Tensor, targets: Tensor, largest: Tensor, total: Tensor, scale: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Logits, or what `_statistics` made of them, become the gradient of the loss times `scale`, but for each token's
    target: its column and what is to be there, both (tokens, 1)."""
    dtype, columns = total.dtype, logits.shape[1]
    weight = ((targets != IGNORED) * scale).unsqueeze(1)

    def probabilities(values: Tensor) -> Tensor:
        """Return the probabilities of logits. Those rounded to half precision are recomputed: keeping them in fp32 would take three
        times the memory."""
        wide = values if values.dtype == dtype else values.to(dtype).sub_(largest.unsqueeze(1)).exp_()
        return wide.div_(total.unsqueeze(1))

    column, held = _column(targets, first, columns), _held(targets, first, columns).unsqueeze(1)
    target = (probabilities(logits.gather(1, column)) - held.to(dtype)) * weight
    logits.copy_(probabilities(logits).mul_(weight))
    return column, target.to(logits.dtype)


def summed_loss(x: Tensor, targets: Tensor, first: int, group: TensorGroup, weight: Parameter) -> Tensor:
    """The loss of `head_loss` without its scale and gradients."""
    total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for start in range(0, x.shape[0], LOSS_CHUNK_TOKENS):
        chunk = slice(start, start + LOSS_CHUNK_TOKENS)
        total += _losses(x[chunk] @ weight.weight.t(), targets[chunk], first, group)[0]
    return total


def head_loss(x: Tensor, targets: Tensor, first: int, scale: float, group: TensorGroup, weight: Parameter) -> Tensor:
    """Cross-entropy summed over tokens and multiplied by `scale`, as a 0-d tensor in at least fp32.

    x (tokens, hidden), targets (tokens,); `weight` (vocab_local, hidden) holds the vocabulary from `first` on. The
    weight's gradient is added now, x's when backward reaches it.
    """
    return _HeadLoss.apply(x, targets, first, scale, group, weight)
