"""Rotary position embedding in Hugging Face's layout (rotate_half), with Llama 3.1's stretching."""

import math
from typing import Any

import torch
from torch import Tensor

from hethub.kernels.bodies import Body
from hethub.spec.model import Llama3Rope, ModelSpec


def rope_table(model: ModelSpec, seq_len: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each (seq_len, head_dim), computed in at least fp32 and rounded to `dtype` at the end."""
    compute = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, model.head_size, 2, dtype=torch.int64).to(compute) / model.head_size
    frequencies = 1.0 / (model.rope_theta**exponent)
    if model.rope_scaling is not None:
        frequencies = _stretch(frequencies, model.rope_scaling)
    angles = torch.outer(torch.arange(seq_len, dtype=compute), frequencies)  # (seq_len, head_dim / 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


def _stretch(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Long wavelengths slowed by `factor`, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_seq_len / scaling.high_freq_factor
    shortest_slowed = scaling.original_max_seq_len / scaling.low_freq_factor
    band = scaling.high_freq_factor - scaling.low_freq_factor
    kept = (scaling.original_max_seq_len / wavelengths - scaling.low_freq_factor) / band
    blended = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    slowed = torch.where(wavelengths > shortest_slowed, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, slowed)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both (batch, seq, heads, head_dim) turned by their positions; cos and sin (seq, head_dim)."""
    return _Rotate.apply(query, key, cos, sin)


class _Rotate(torch.autograd.Function):
    """The turn is orthogonal, so the gradient is turned back: nothing but the tables is needed for it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.tables = cos, sin
        return _turned(query, key, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_turned_back(*grads, *ctx.tables), None, None


@Body
def _turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _turn(query, cos, sin), _turn(key, cos, sin)


@Body
def _turned_back(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    sin = -sin
    return _turn(query, cos, sin), _turn(key, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    result = x * cos.unsqueeze(1)
    result[..., :half].addcmul_(x[..., half:], sin[:, :half].unsqueeze(1), value=-1)
    result[..., half:].addcmul_(x[..., :half], sin[:, half:].unsqueeze(1))
    return result
