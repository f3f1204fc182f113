"""A Llama's formulas and AdamW's in plain PyTorch, sharing nothing with what trains: in fp64 on the CPU they are what
a device is held against.

Llama: Touvron et al., arXiv 2302.13971; rotary embedding: Su et al., arXiv 2104.09864, paired as Hugging Face stores
it; stretching: Llama 3.1's published code; AdamW: Loshchilov and Hutter, arXiv 1711.05101.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hethub.spec.layout.tensors import IGNORED
from hethub.spec.model import ModelSpec


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (tokens, in) through weight (out, in)."""
    return x @ weight.t()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (tokens, hidden) over its root mean square, times weight (hidden,)."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def frequencies(model: ModelSpec) -> Tensor:
    """Angle per position of each pair, (head_dim / 2,)."""
    half = model.head_size // 2
    plain = [model.rope_theta ** (-i / half) for i in range(half)]
    scaling = model.rope_scaling
    if scaling is None:
        return torch.tensor(plain, dtype=torch.float64)
    found = []
    for frequency in plain:
        turns = scaling.original_max_seq_len * frequency / (2 * math.pi)  # in the context of before
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(1.0, max(0.0, kept))
        found.append(frequency * (kept + (1 - kept) / scaling.factor))
    return torch.tensor(found, dtype=torch.float64)


def rotate(x: Tensor, model: ModelSpec, first_position: int = 0) -> Tensor:
    """x (batch, seq, heads, head_dim) as complex pairs (i, i + half), each turned by its position's angle."""
    half = x.shape[-1] // 2
    angles = torch.arange(first_position, first_position + x.shape[1], dtype=torch.float64).unsqueeze(1)
    turn = torch.polar(torch.ones((), dtype=torch.float64), angles * frequencies(model)).unsqueeze(1)
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat((turned.real, turned.imag), -1)


def scores(query: Tensor, key: Tensor) -> Tensor:
    """(batch, heads, seq, seq) of (batch, seq, heads, head_dim)."""
    return torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])


def spread_heads(heads: Tensor, group: int) -> Tensor:
    """Key or value heads (batch, seq, heads, head_dim), each for `group` query heads on end."""
    return heads.repeat_interleave(group, 2)


def allowed(seq: int) -> Tensor:
    """(seq, seq): which keys a query sees, itself and those before."""
    return torch.ones(seq, seq, dtype=torch.bool).tril()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy of logits (tokens, vocab); targets that are IGNORED count nothing."""
    counts = targets != IGNORED
    losses = logits.logsumexp(-1) - logits.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    return (losses * counts).sum()


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """What AdamW takes beside the tensors."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


State = tuple[Tensor, Tensor, Tensor]  # weight, first and second moment


def adamw(state: State, grad: Tensor, step: AdamWStep, count: int) -> State:
    """The state after update number `count` (from 1)."""
    weight, first, second = state
    (beta1, beta2) = step.betas
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad.square()
    direction = first / (1 - beta1**count) / ((second / (1 - beta2**count)).sqrt() + step.eps)
    return weight - step.lr * (direction + step.weight_decay * weight), first, second


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """All of them; a wrong one in the place of another is how a fault is described (see faults.py)."""

    linear: Callable[[Tensor, Tensor], Tensor] = linear
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotate: Callable[[Tensor, ModelSpec], Tensor] = rotate
    scores: Callable[[Tensor, Tensor], Tensor] = scores
    spread_heads: Callable[[Tensor, int], Tensor] = spread_heads
    allowed: Callable[[int], Tensor] = allowed
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    token_losses: Callable[[Tensor, Tensor], Tensor] = token_losses
    adamw: Callable[[State, Tensor, AdamWStep, int], State] = adamw

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """(batch * seq, heads * head_dim) of (batch, seq, heads, head_dim) inputs; `mask` (seq, seq) narrows what
        a query sees."""
        batch, seq, heads, _ = query.shape
        group = heads // key.shape[2]
        key, value = self.spread_heads(key, group), self.spread_heads(value, group)
        seen = self.allowed(seq) & mask
        weights = self.scores(query, key).masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch * seq, -1)
