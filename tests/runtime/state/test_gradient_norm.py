"""The norm over all ranks and clipping by it are torch's, and the same bits on every rank."""

import math

import pytest
import torch

from hethub.runtime.state.gradient_norm import clip_scale, global_norm, ordered_sum


@pytest.mark.parametrize("square", [math.inf, math.nan])
def test_the_norm_takes_the_loss_scale_out_and_is_none_after_an_overflow(square: float) -> None:
    assert global_norm([9.0, 16.0], 1.0) == 5.0
    assert global_norm([9.0, 16.0], 2.0) == 2.5
    assert global_norm([9.0, square], 2.0) is None


@pytest.mark.parametrize("size", [1e-3, 0.5, 1.0, 20.0])
def test_clipping_is_torchs(size: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    weight.grad = torch.full_like(weight, size)
    before = weight.grad.clone()
    norm = float(torch.nn.utils.clip_grad_norm_([weight], 1.0))
    assert torch.allclose(weight.grad, before * clip_scale(norm, 1.0), rtol=1e-12)
    assert clip_scale(norm, None) == 1.0


def test_ordered_sum_is_the_sum_in_rank_order() -> None:
    assert ordered_sum([1e16, 1.0, -1e16]) == 0.0
    assert ordered_sum([1e16, -1e16, 1.0]) == 1.0
