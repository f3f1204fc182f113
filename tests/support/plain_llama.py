"""A Llama in plain PyTorch, by autograd alone and in one dtype: what our own backward functions are held against."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hethub.runtime.model.initial import initial_value
from hethub.spec.layout.tensors import EMBEDDING, FINAL_NORM, HEAD, stage_tensors
from hethub.spec.model import ModelSpec
from hethub.spec.ranges import Range


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, theta: float = 10000.0) -> Tensor:
    """x (batch, seq, heads, head_dim) as complex pairs (i, i + half), each turned by its position's angle."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous())
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64).unsqueeze(1) * frequencies  # (seq, half)
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1).to(pairs.dtype)
    return torch.cat((turned.real, turned.imag), -1)


def attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Causal attention of (batch, seq, heads, head_dim), KV heads repeated; `allowed` (batch, seq, seq) narrows it."""
    seq, group = query.shape[1], query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    causal = torch.ones(seq, seq, dtype=torch.bool).tril()
    mask = causal if allowed is None else causal & allowed.unsqueeze(1)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*query.shape[:2], -1)


class PlainLlama(nn.Module):
    """The layers [start, stop) with our initial values; embeds tokens where it is first, gives logits where it is
    last."""

    def __init__(self, model: ModelSpec, layers: Range, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        for info in stage_tensors(model, (layers,)):
            value = initial_value(info, model, seed)
            value = value.t() if info.split_dim == 1 else value  # our storage has the cut dimension first
            self.register_parameter(info.name.replace(".", "/"), nn.Parameter(value.to(dtype).contiguous()))

    def weight(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "/"))

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Tokens (batch, seq) or hidden states (batch, seq, hidden) to hidden states or logits; `allowed` as `attention`
        takes it."""
        if self.layers.start == 0:
            x = self.weight(EMBEDDING)[x]
        for layer in range(*self.layers):
            x = self._layer(x, f"model.layers.{layer}.", allowed)
        if self.layers.stop < self.model.layers:
            return x
        head = EMBEDDING if self.model.tied_head else HEAD
        return rms_norm(x, self.weight(FINAL_NORM), self.model.norm_eps) @ self.weight(head).t()

    def _layer(self, x: Tensor, prefix: str, allowed: Tensor | None) -> Tensor:
        def linear(value: Tensor, name: str) -> Tensor:
            return value @ self.weight(f"{prefix}{name}.weight").t()

        eps, heads = self.model.norm_eps, (*x.shape[:2], -1, self.model.head_size)
        normed = rms_norm(x, self.weight(f"{prefix}input_layernorm.weight"), eps)
        query, key, value = (linear(normed, f"self_attn.{part}_proj").view(heads) for part in "qkv")
        theta = self.model.rope_theta
        x = x + linear(attention(rotate(query, theta), rotate(key, theta), value, allowed), "self_attn.o_proj")
        normed = rms_norm(x, self.weight(f"{prefix}post_attention_layernorm.weight"), eps)
        return x + linear(
            torch.nn.functional.silu(linear(normed, "mlp.gate_proj")) * linear(normed, "mlp.up_proj"), "mlp.down_proj"
        )


def transformers() -> Any:
    """Hugging Face's own Llamas, imported where a test runs: at the head of a file they would take two seconds of each of
    pytest's workers, which all collect every file."""
    return pytest.importorskip("transformers", reason="needs transformers: pip install 'hethub[test]'")
