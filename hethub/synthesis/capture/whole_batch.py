"""Operators whose results belong to the whole batch, in a form that is right for ranks' pieces of it.

Most divide by the number of samples. A rank that holds a piece of the batch would divide by its own; sums can be added
up over ranks, and then divided once.
"""

from math import prod
from typing import Any

import torch
from torch import nn

from hethub.spec.errors import BadInput

aten: Any = torch.ops.aten
BATCH_NORMS: tuple[Any, ...] = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)  # whose forward all others inherit


def refuse_batch_norm(name: str) -> None:
    raise BadInput(
        f"'{name}' is BatchNorm in training, which mixes the samples of a batch and would see a rank's own only; convert it"
        " to follow the whole batch (torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)), call .eval() on it to keep its"
        " statistics, or use GroupNorm."
    )


def refuse_instance_norm(name: str) -> None:
    raise BadInput(
        f"'{name}' is InstanceNorm in training that keeps running statistics, and every rank would keep those of its own samples;"
        " set track_running_stats=False, with which it trains alike, or call .eval() on it to keep its statistics."
    )


def normalized(norm: Any, name: str, updates: dict[str, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """What SyncBatchNorm `norm`, or any batch norm that keeps its statistics, makes of values [samples, channels, ...].

    SyncBatchNorm's statistics are those of the whole batch; what it would store of them goes into `updates`, by the names
    that the buffers have in a module which calls it `name`. Raises BadInput for another batch norm in training,
    and for a batch without a variance.
    """
    norm._check_input_dim(values)
    by_channel = (1, -1, *[1] * (values.dim() - 2))
    if norm.training or norm.running_mean is None:
        if not isinstance(norm, nn.SyncBatchNorm):
            refuse_batch_norm(name)
        dims = [0, *range(2, values.dim())]
        count = values.numel() // values.shape[1]
        if count < 2:
            raise BadInput(
                f"'{name}' normalizes over the batch, which has fewer than two values for each channel and so no variance; give"
                " it a larger batch, or call .eval() on it where it has running statistics."
            )
        mean = values.sum(dims) / count
        centred = values - mean.view(by_channel)
        variance = (centred * centred).sum(dims) / count
        if norm.running_mean is not None:
            _update(norm, f"{name}." if name else "", updates, mean.detach(), variance.detach() * (count / (count - 1)))
    else:
        centred, variance = values - norm.running_mean.view(by_channel), norm.running_var
    result = centred * (variance + norm.eps).rsqrt().view(by_channel)
    if norm.weight is not None:
        result = result * norm.weight.view(by_channel) + norm.bias.view(by_channel)
    return result


def _update(
    norm: Any, prefix: str, updates: dict[str, torch.Tensor], mean: torch.Tensor, variance: torch.Tensor
) -> None:
    def held(name: str) -> torch.Tensor:
        return updates.get(prefix + name, getattr(norm, name))  # a norm may be called again in one step

    updates[f"{prefix}num_batches_tracked"] = count = held("num_batches_tracked") + 1
    part = 1.0 / count.to(mean.dtype) if norm.momentum is None else norm.momentum
    for name, value in (("running_mean", mean), ("running_var", variance)):
        updates[prefix + name] = held(name) * (1.0 - part) + value * part


def _wide(values: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type to sum in: what is summed may be too large for a type of 16 bits that holds the mean."""
    return torch.float32 if (dtype or values.dtype).itemsize < 4 else dtype


def mean(values: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return (aten.sum.default(values, dtype=_wide(values, dtype)) / values.numel()).to(dtype or values.dtype)


def mean_dims(
    values: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = dim if dim else list(range(values.dim()))
    count = prod(values.shape[d] for d in dims)
    return (aten.sum.dim_IntList(values, dims, keepdim, dtype=_wide(values, dtype)) / count).to(dtype or values.dtype)


def nll_loss(
    scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As aten.nll_loss_forward: the loss and the weight of all targets that count. scores: [samples, classes]."""
    if scores.dim() != 2:
        return NotImplemented
    counts = target != ignore_index
    safe = torch.where(counts, target, 0)
    picked = -aten.gather.default(scores, 1, safe.unsqueeze(1)).squeeze(1)
    weights = counts.to(scores.dtype)
    if weight is not None:
        weights = weights * aten.embedding.default(weight.unsqueeze(1), safe).squeeze(1)
    # Where a target is ignored its score may be infinite, so it is replaced and not multiplied by zero.
    losses = torch.where(counts, picked, 0.0) * weights
    total = weights.sum()
    if reduction == 0:
        return losses, total
    return (losses.sum() if reduction == 2 else losses.sum() / total), total


def squeeze(values: torch.Tensor) -> torch.Tensor:
    """By the dimensions of the whole tensor that go: a rank's piece of another may have one entry as well."""
    return aten.squeeze.dims(values, [d for d, size in enumerate(values.shape) if size == 1])


# Losses that divide by the number of samples; torch writes them with the means that are written anew above.
_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
_NAMES = [*(name + end for name in _LOSSES for end in ("", "_backward")), "binary_cross_entropy_with_logits"]
_TORCHS = torch.export.default_decompositions()
DECOMPOSITIONS: dict[Any, Any] = {
    aten.mean.default: mean,
    aten.mean.dim: mean_dims,
    aten.nll_loss_forward.default: nll_loss,
    aten.squeeze.default: squeeze,
    **{operator: _TORCHS[operator] for operator in (getattr(aten, name).default for name in _NAMES)},
}
