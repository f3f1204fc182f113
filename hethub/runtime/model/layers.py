"""A Llama's layer on one rank's shards: norm, attention and MLP."""

from dataclasses import dataclass
from functools import cache
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hethub.kernels.bodies import Body
from hethub.kernels.device import is_gpu
from hethub.runtime.model.rope import rotate
from hethub.runtime.model.tensor_parallel import TensorGroup, column_parallel, row_parallel
from hethub.runtime.state.parameter import Parameter
from hethub.spec.plan import Recompute


@Body
def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x over its root mean square, times the weight, and the root's inverse (tokens, 1)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight, scale


@Body
def _added_and_normed(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + branch, and of it what `_normed` gives."""
    total = x + branch
    return total, *_normed.function(total, weight, eps)


@Body
def _norm_backward(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, grad_x: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, from that of the normed x and what x receives beside it."""
    normed = x.to(scale.dtype) * scale
    wide = grad.to(scale.dtype)
    grad_weight = (wide * normed).sum(0)
    wide = wide * weight
    mean = torch.linalg.vecdot(wide, normed).unsqueeze(-1) / x.shape[-1]
    found = wide.addcmul_(normed, mean, value=-1).mul_(scale).to(x.dtype)
    return found if grad_x is None else found.add_(grad_x), grad_weight


class _Norm(torch.autograd.Function):
    """x (tokens, hidden), with a branch added to it where one is given; and that over its root mean square, times the
    weight; statistics in at least fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor | None, weight: Parameter, eps: float) -> tuple[Tensor, Tensor]:
        if branch is None:
            total, (normed, scale) = x.view_as(x), _normed(x, weight.weight, eps)
        else:
            total, normed, scale = _added_and_normed(x, branch, weight.weight, eps)
        ctx.save_for_backward(total if branch is not None else x, scale)
        ctx.weight, ctx.has_branch = weight, branch is not None
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, scale = ctx.saved_tensors
        grad_x, grad_weight = _norm_backward(grad, x, scale, ctx.weight.weight, grad_total)
        ctx.weight.add(grad_weight)
        return grad_x, grad_x if ctx.has_branch else None, None, None


def rms_norm(x: Tensor, weight: Parameter, eps: float) -> Tensor:
    """x (tokens, hidden) normalised by its root mean square and scaled by `weight` (hidden,)."""
    return _Norm.apply(x, None, weight, eps)[1]


@Body
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


@Body
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    slope = silu.sub(silu * sigmoid).add_(sigmoid)  # sigmoid + silu (1 - sigmoid)
    return slope.mul_(up).mul_(grad), silu.mul_(grad)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, saving only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _swiglu_backward(grad, *ctx.saved_tensors)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a microbatch, one sample's behind the other's; attention stays inside each."""

    sizes: tuple[int, ...]  # tokens of each, known on the host
    starts: Tensor  # (documents + 1,) int32, on the device: the first token of each, then the number of tokens


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """What attention must know of the tokens of a microbatch: their arrangement, position tables and documents."""

    batch: int
    seq_len: int
    cos: Tensor  # (seq, head_dim)
    sin: Tensor
    documents: Documents | None = None  # None: every sample is one
    past: "KeyValues | None" = None  # of the tokens before these, where text is generated token by token


class KeyValues:
    """Keys and values of tokens that went before, by layer: each (batch, seq, heads, head_dim)."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Tensor, Tensor]] = {}

    def extended(self, layer: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all tokens so far, the layer's new ones behind the others."""
        if layer in self._of:
            before = self._of[layer]
            key, value = torch.cat((before[0], key), 1), torch.cat((before[1], value), 1)
        self._of[layer] = key, value
        return key, value


@dataclass(frozen=True, kw_only=True)
class LlamaLayer:
    """One transformer layer: attention and SwiGLU MLP, each behind a norm and added to its input.

    Selective recompute is done here; full recompute by whoever runs the layer, from the input that is kept.
    """

    head_dim: int
    window: int | None  # tokens that attention sees, the token itself among them; None: all before it
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
        x, normed = _Norm.apply(x, None, self.attention_norm, self.eps)
        x, normed = _Norm.apply(x, self._attention(normed, tokens), self.mlp_norm, self.eps)
        return x + self._mlp(normed)

    def _attention(self, x: Tensor, tokens: TokenLayout) -> Tensor:
        projected = column_parallel(x, self.group, (self.query, self.key, self.value))
        heads = (tokens.batch, tokens.seq_len, -1, self.head_dim)
        query, key, value = (t.view(heads) for t in projected)  # (batch, seq, heads, head_dim)
        query, key = rotate(query, key, tokens.cos, tokens.sin)
        if tokens.past is not None:
            key, value = tokens.past.extended(self.key.name, key, value)
        if self.recompute == "selective":
            mixed = checkpoint(
                _mix, query, key, value, tokens.documents, self.window, use_reentrant=False, preserve_rng_state=False
            )
        else:
            mixed = _mix(query, key, value, tokens.documents, self.window)
        return row_parallel(mixed, self.group, self.output)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = column_parallel(x, self.group, (self.gate, self.up))
        return row_parallel(_SwiGLU.apply(gate, up), self.group, self.down)


def _mix(query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, window: int | None = None) -> Tensor:
    """Causal attention of (batch, seq, heads, head_dim) inputs, as (batch * seq, heads * head_dim), to the last
    `window` tokens where that is fewer than all.

    Documents and windows take one kernel where there is one for sequences of unlike lengths, and else a call for each
    document or window; neither makes a mask of the whole sequence, nor computes what one would leave out.
    """
    batch, seq, keys = *query.shape[:2], key.shape[1]
    window = None if window is None or window >= keys else window
    whole = documents is None or len(documents.sizes) == batch
    if whole and window is None:
        return _causal(query, key, value)
    if window is not None and seq < keys:  # the last token alone
        return _causal(query, key[:, -window:], value[:, -window:])
    flat = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)  # (tokens, heads, head_dim)
    if _attends_to_unlike_lengths(query.device, query.dtype, query.shape[-1]):
        return _varlen(*flat, documents or _samples(batch, seq, query.device), window).flatten(1)
    if documents is None:
        return _windowed(query, key, value, window)
    each = zip(*(tensor.unsqueeze(0).split(documents.sizes, 1) for tensor in flat), strict=True)
    return torch.cat([_windowed(q, k, v, window) for q, k, v in each])


def _samples(batch: int, seq: int, device: torch.device) -> Documents:
    """Every sample as one document."""
    starts = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=device)
    return Documents(sizes=(seq,) * batch, starts=starts)


def _windowed(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """`_mix` for whole samples under a window: takes as many queries at a time as the window has tokens, with the keys they see."""
    batch, seq = query.shape[:2]
    if window is None or window >= seq:
        return _causal(query, key, value)
    found = []
    for start in range(0, seq, window):
        stop, first = min(start + window, seq), max(0, start - window + 1)
        seen = None
        if start:
            behind = torch.arange(start, stop, device=query.device).unsqueeze(1) - torch.arange(
                first, stop, device=query.device
            )
            seen = (behind >= 0) & (behind < window)
        part = _causal(query[:, start:stop], key[:, first:stop], value[:, first:stop], seen)
        found.append(part.view(batch, stop - start, -1))
    return torch.cat(found, 1).flatten(0, 1)


def _causal(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
    """`_mix` for whole samples. A query sees the keys that the mask `seen` (queries, keys) says, or without a mask all keys
    up to its own; a single query is the last token, which sees all keys.

    Where FlashAttention cannot be had on a device (fp32, V100 and T4, a mask), torch's other kernel that keeps no scores
    takes no grouped heads: they are repeated for it, or every score would be kept for backward.
    """
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    causal, grouped = seen is None and query.shape[1] > 1, query.shape[2] != key.shape[2]
    if grouped and is_gpu(query.device) and not _flashes(q, k, v, seen, causal):
        k, v = (heads.repeat_interleave(query.shape[2] // key.shape[2], 1) for heads in (k, v))
        grouped = False
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=grouped)
    return mixed.transpose(1, 2).reshape(query.shape[0] * query.shape[1], -1)


def _flashes(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, causal: bool) -> bool:
    """Whether torch would take FlashAttention for these grouped heads, (batch, heads, seq, head_dim) each."""
    asked = torch.backends.cuda.SDPAParams(query, key, value, seen, 0.0, causal, True)
    return torch.backends.cuda.can_use_flash_attention(asked)


def _varlen(query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None) -> Tensor:
    """Causal attention of (tokens, heads, head_dim) inputs inside documents, in one kernel."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = documents.starts, max(documents.sizes)
    before = -1 if window is None else window - 1
    gqa = query.shape[1] != key.shape[1]
    found = varlen_attn(query, key, value, starts, starts, longest, longest, window_size=(before, 0), enable_gqa=gqa)
    assert isinstance(found, Tensor)
    return found


@cache
def _attends_to_unlike_lengths(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch has that kernel there, with what models ask of it: FlashAttention's, for half precisions on devices
    that it knows; and whether it is right. ROCm's took -1, which stands for no bound, for a bound, and gave NaN without an
    error (pytorch 173469)."""
    try:
        # Whoever notes what the caller's graph keeps (a checkpoint above all, which runs it again) is not to see this one.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
            return all(_is_right(device, dtype, head_dim, window) for window in (None, 2))
    except (ImportError, RuntimeError, TypeError, ValueError):  # torch 2.11's knows no grouped heads: TypeError
        return False


def _is_right(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> bool:
    """Whether `_varlen` and its gradients are there what `_windowed` gives in at least fp32, but for rounding."""
    documents = Documents(sizes=(3, 2), starts=torch.tensor([0, 3, 5], dtype=torch.int32).to(device))
    shapes = [(5, heads, head_dim) for heads in (2, 1, 1)]
    drawn = [torch.arange(prod(shape)).add(turn).sin().view(shape) for turn, shape in enumerate(shapes)]
    query, key, value = (values.to(device, dtype).requires_grad_() for values in drawn)
    found = _varlen(query, key, value, documents, window)
    wide = [values.to(torch.promote_types(dtype, torch.float32)) for values in (query, key, value)]
    each = zip(*(values.unsqueeze(0).split(documents.sizes, 1) for values in wide), strict=True)
    expected = torch.cat([_windowed(q, k, v, window) for q, k, v in each]).view(found.shape)
    pairs = zip(
        *((of, *torch.autograd.grad(of.square().sum(), (query, key, value))) for of in (found, expected)), strict=True
    )
    near = sqrt(torch.finfo(dtype).eps)  # far above rounding, far below a key too many or too few
    return all(torch.allclose(own.to(right.dtype), right, rtol=near, atol=near) for own, right in pairs)
