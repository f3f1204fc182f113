"""The norm of the whole gradient, and clipping by it: the same bits on every rank."""

import math
from collections.abc import Sequence


def global_norm(square_sums: Sequence[float], loss_scale: float) -> float | None:
    """The gradient's norm from every rank's sum of squares, the loss scale taken out; None where it is not finite."""
    square_sum = ordered_sum(square_sums)
    return math.sqrt(square_sum) / loss_scale if math.isfinite(square_sum) else None


def clip_scale(norm: float, limit: float | None) -> float:
    """The factor that brings a gradient of this norm down to `limit`, as torch.nn.utils.clip_grad_norm_ computes it."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def ordered_sum(values: Sequence[float]) -> float:
    """The sum in the order given, the same bits on every rank that has the same values."""
    total = 0.0
    for value in values:
        total += value
    return total
