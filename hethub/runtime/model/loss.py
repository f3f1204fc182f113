"""Cross-entropy over a vocabulary-parallel head, in chunks of tokens, with its gradient computed on the way."""

from typing import Any

import torch
from torch import Tensor

from hethub.runtime.model.tensor_parallel import TensorGroup
from hethub.runtime.state.parameter import Parameter
from hethub.spec.layout.tensors import LOSS_CHUNK_TOKENS

IGNORED = -100  # a target that counts for nothing, as torch and Hugging Face have it


class _HeadLoss(torch.autograd.Function):
    """Sum of token losses times `scale`. The gradient is computed with the logits at hand, so they are never kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: Tensor, first: int, scale: float, group: TensorGroup, weight: Parameter
    ) -> Tensor:
        grad_x = torch.empty_like(x)
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for start in range(0, x.shape[0], LOSS_CHUNK_TOKENS):
            chunk = slice(start, start + LOSS_CHUNK_TOKENS)
            loss, grad_logits = _chunk(x[chunk] @ weight.weight.t(), targets[chunk], first, group)
            total += loss
            grad_logits = grad_logits.mul_(scale).to(x.dtype)
            torch.mm(grad_logits, weight.weight, out=grad_x[chunk])
            weight.add_product(grad_logits.t(), x[chunk], completes=start + LOSS_CHUNK_TOKENS >= x.shape[0])
        group.sum(grad_x)
        ctx.save_for_backward(grad_x)
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_x,) = ctx.saved_tensors
        return grad_x * grad, None, None, None, None, None


def _chunk(logits: Tensor, targets: Tensor, first: int, group: TensorGroup) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk and its gradient by the logits (tokens, vocab_local), both in at least fp32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = targets != IGNORED
    local = targets - first
    held = (local >= 0) & (local < wide.shape[1]) & valid
    # Of the target, where it is held: a gather, so that nothing waits for the host.
    column = local.clamp(0, wide.shape[1] - 1).unsqueeze(1)
    largest = group.max(wide.amax(dim=1))
    wide.sub_(largest.unsqueeze(1))
    target = wide.gather(1, column).squeeze(1) * held
    probabilities = wide.exp_()
    sums = group.sum(torch.stack((probabilities.sum(dim=1), target)))  # exponentials, the target's logit
    loss = ((sums[0].log() - sums[1]) * valid).sum()
    probabilities.div_(sums[0].unsqueeze(1)).mul_(valid.unsqueeze(1))
    probabilities.scatter_add_(1, column, -held.to(probabilities.dtype).unsqueeze(1))
    return loss, probabilities


def head_loss(x: Tensor, targets: Tensor, first: int, scale: float, group: TensorGroup, weight: Parameter) -> Tensor:
    """Cross-entropy summed over tokens and multiplied by `scale`, as a 0-d tensor in at least fp32.

    x (tokens, hidden), targets (tokens,); `weight` (vocab_local, hidden) holds the vocabulary from `first` on. The
    weight's gradient is added now, x's when backward reaches it.
    """
    return _HeadLoss.apply(x, targets, first, scale, group, weight)
