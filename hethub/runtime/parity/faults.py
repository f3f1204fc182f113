"""Formulas that are known to be computed instead of the right ones: where one explains a device, it is the fault's
name."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hethub.runtime.parity import formulas as right
from hethub.runtime.parity.formulas import AdamWStep, Formulas, State
from hethub.spec.layout.tensors import IGNORED
from hethub.spec.model import ModelSpec


@dataclass(frozen=True)
class Fault:
    """What is computed, in words, and as formulas."""

    name: str
    formulas: Formulas


def known_faults() -> list[Fault]:
    """Every fault that has a name."""
    wrong = partial(replace, Formulas())
    return [
        Fault("attention's scores are not divided by sqrt(head_dim)", wrong(scores=_unscaled)),
        Fault("attention's mask is dropped", wrong(allowed=lambda seq: torch.ones(seq, seq, dtype=torch.bool))),
        Fault("attention sees one token ahead", wrong(allowed=lambda seq: torch.ones(seq, seq).tril(1).bool())),
        Fault("key and value heads are given to the wrong queries", wrong(spread_heads=_interleaved_heads)),
        *(
            Fault(f"the rotary base is {base:,}", wrong(rotate=_with_base(base)))
            for base in (10_000, 500_000, 1_000_000)
        ),
        Fault("rotary pairs neighbours (2i, 2i + 1) instead of halves", wrong(rotate=_neighbours)),
        Fault("rotary positions are one too high", wrong(rotate=lambda x, model: right.rotate(x, model, 1))),
        Fault("rotary angles lack Llama 3.1's stretching", wrong(rotate=_unstretched)),
        *(Fault(f"the norm's eps is {eps:g}", wrong(rms_norm=_with_eps(eps))) for eps in (0.0, 1e-8, 1e-6, 1e-5)),
        Fault("the norm subtracts the mean (LayerNorm)", wrong(rms_norm=_layer_norm)),
        Fault("the MLP's activation is GELU", wrong(swiglu=lambda gate, up: _gelu(gate) * up)),
        Fault("gate and up are exchanged", wrong(swiglu=lambda gate, up: right.swiglu(up, gate))),
        Fault("products round their inputs to TF32", wrong(linear=_rounded(_Nearest, 10))),
        Fault("products cut their inputs to TF32", wrong(linear=_rounded(_Cut, 10))),
        Fault("products round their inputs to bf16", wrong(linear=_rounded(_Nearest, 7))),
        Fault("ignored targets are counted", wrong(token_losses=_all_counted)),
        Fault("AdamW's decay is added to the gradient (L2)", wrong(adamw=_coupled_decay)),
        Fault("AdamW's decay is left out", wrong(adamw=_no_decay)),
        Fault("AdamW's bias correction is left out", wrong(adamw=_uncorrected)),
        Fault("AdamW's eps is inside the root", wrong(adamw=_eps_inside)),
    ]


def changed(fault: Fault) -> str:
    """The formula that the fault puts another in the place of."""
    (name,) = (f.name for f in fields(Formulas) if getattr(fault.formulas, f.name) is not f.default)
    return name


def _unscaled(query: Tensor, key: Tensor) -> Tensor:
    return right.scores(query, key) * math.sqrt(query.shape[-1])


def _interleaved_heads(heads: Tensor, group: int) -> Tensor:
    return heads.repeat(1, 1, group, 1)


def _with_base(base: float) -> Callable[[Tensor, ModelSpec], Tensor]:
    return lambda x, model: right.rotate(x, model.replace(rope_theta=base))


def _unstretched(x: Tensor, model: ModelSpec) -> Tensor:
    return right.rotate(x, model.replace(rope_scaling=None))


def _neighbours(x: Tensor, model: ModelSpec) -> Tensor:
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    first, second = right.rotate(halves, model).chunk(2, -1)
    return torch.stack((first, second), -1).flatten(-2)


def _with_eps(eps: float) -> Callable[[Tensor, Tensor, float], Tensor]:
    return lambda x, weight, given: right.rms_norm(x, weight, eps)


def _layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return right.rms_norm(x - x.mean(-1, keepdim=True), weight, eps)


def _gelu(gate: Tensor) -> Tensor:
    return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2


def _to_bits(x: Tensor, bits: int, *, nearest: bool) -> Tensor:
    """x with a fraction of so many bits."""
    fraction, exponent = torch.frexp(x)  # the fraction is below 1 and at least 1/2
    scaled = torch.ldexp(fraction, torch.tensor(bits + 1))
    return torch.ldexp(scaled.round() if nearest else scaled.trunc(), exponent - bits - 1)


class _RoundedLinear(torch.autograd.Function):
    """Every product of forward and backward takes rounded inputs."""

    nearest: bool

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, weight: Tensor, bits: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bits = bits
        return _to_bits(x, bits, nearest=cls.nearest) @ _to_bits(weight, bits, nearest=cls.nearest).t()

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, grad = (_to_bits(t, ctx.bits, nearest=cls.nearest) for t in (*ctx.saved_tensors, grad))
        return grad @ weight, grad.t() @ x, None


class _Nearest(_RoundedLinear):
    nearest = True


class _Cut(_RoundedLinear):
    nearest = False


def _rounded(way: type[_RoundedLinear], bits: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: way.apply(x, weight, bits)


def _all_counted(logits: Tensor, targets: Tensor) -> Tensor:
    return right.token_losses(logits, targets.where(targets != IGNORED, 0))


def _coupled_decay(state: State, grad: Tensor, step: AdamWStep, count: int) -> State:
    return right.adamw(state, grad + step.weight_decay * state[0], replace(step, weight_decay=0.0), count)


def _no_decay(state: State, grad: Tensor, step: AdamWStep, count: int) -> State:
    return right.adamw(state, grad, replace(step, weight_decay=0.0), count)


def _uncorrected(state: State, grad: Tensor, step: AdamWStep, count: int) -> State:
    weight, first, second = state
    _, first, second = right.adamw(state, grad, step, count)
    return weight - step.lr * (first / (second.sqrt() + step.eps) + step.weight_decay * weight), first, second


def _eps_inside(state: State, grad: Tensor, step: AdamWStep, count: int) -> State:
    weight = state[0]
    _, first, second = right.adamw(state, grad, step, count)
    beta1, beta2 = step.betas
    direction = first / (1 - beta1**count) / (second / (1 - beta2**count) + step.eps).sqrt()
    return weight - step.lr * (direction + step.weight_decay * weight), first, second
