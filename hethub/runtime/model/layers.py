"""A Llama's layer on one rank's shards: norm, attention and MLP."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hethub.runtime.model.rope import rotate
from hethub.runtime.model.tensor_parallel import TensorGroup, column_parallel, row_parallel
from hethub.runtime.state.parameter import Parameter
from hethub.spec.plan import Recompute


class _RMSNorm(torch.autograd.Function):
    """x (tokens, hidden) over its root mean square, times the weight; statistics in at least fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (tokens, 1)
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return (wide * scale).to(x.dtype) * weight.weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        wide = grad.to(scale.dtype)
        ctx.weight.add((wide * normed).sum(0))
        wide = wide * ctx.weight.weight
        mean = torch.linalg.vecdot(wide, normed).unsqueeze(-1) / x.shape[-1]
        return wide.addcmul_(normed, mean, value=-1).mul_(scale).to(x.dtype), None, None


def rms_norm(x: Tensor, weight: Parameter, eps: float) -> Tensor:
    """x (tokens, hidden) normalised by its root mean square and scaled by `weight` (hidden,)."""
    return _RMSNorm.apply(x, weight, eps)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, saving only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        slope = silu.sub(silu * sigmoid).add_(sigmoid)  # sigmoid + silu (1 - sigmoid)
        return slope.mul_(up).mul_(grad), silu.mul_(grad)


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """What attention must know of the tokens of a microbatch: their arrangement, position tables and documents."""

    batch: int
    seq_len: int
    cos: Tensor  # (seq, head_dim)
    sin: Tensor
    mask: Tensor | None = None  # (batch, 1, seq, seq) bool; None: plain causal


@dataclass(frozen=True, kw_only=True)
class LlamaLayer:
    """One transformer layer: attention and SwiGLU MLP, each behind a norm and added to its input.

    Selective recompute is done here; full recompute by whoever runs the layer, from the input that is kept.
    """

    head_dim: int
    eps: float
    group: TensorGroup
    recompute: Recompute
    query: Parameter
    key: Parameter
    value: Parameter
    output: Parameter
    gate: Parameter
    up: Parameter
    down: Parameter
    attention_norm: Parameter
    mlp_norm: Parameter

    @property
    def matrices(self) -> tuple[Parameter, ...]:
        """All weights but the norms'."""
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down

    def __call__(self, x: Tensor, tokens: TokenLayout) -> Tensor:
        """x and result (tokens, hidden)."""
        x = x + self._attention(rms_norm(x, self.attention_norm, self.eps), tokens)
        return x + self._mlp(rms_norm(x, self.mlp_norm, self.eps))

    def _attention(self, x: Tensor, tokens: TokenLayout) -> Tensor:
        projected = column_parallel(x, self.group, (self.query, self.key, self.value))
        heads = (tokens.batch, tokens.seq_len, -1, self.head_dim)
        query, key, value = (t.view(heads) for t in projected)  # (batch, seq, heads, head_dim)
        query, key = rotate(query, tokens.cos, tokens.sin), rotate(key, tokens.cos, tokens.sin)
        if self.recompute == "selective":
            mixed = checkpoint(_mix, query, key, value, tokens.mask, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = _mix(query, key, value, tokens.mask)
        return row_parallel(mixed, self.group, self.output)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = column_parallel(x, self.group, (self.gate, self.up))
        return row_parallel(_SwiGLU.apply(gate, up), self.group, self.down)


def _mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of (batch, seq, heads, head_dim) inputs, as (batch * seq, heads * head_dim)."""
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )  # fmt: skip
    return mixed.transpose(1, 2).reshape(query.shape[0] * query.shape[1], -1)


def document_mask(segments: Tensor) -> Tensor:
    """Causal attention inside documents: (batch, 1, seq, seq) bool from segment ids (batch, seq)."""
    seq = segments.shape[1]
    same = segments.unsqueeze(2) == segments.unsqueeze(1)
    return same.logical_and_(torch.ones(seq, seq, dtype=torch.bool, device=segments.device).tril()).unsqueeze(1)
