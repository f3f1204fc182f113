"""A job's Llama as a plain module that returns its loss, for programs: parameters have their Hugging Face names."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hethub.runtime.model.huggingface import open_weights
from hethub.runtime.model.initial import initial_value
from hethub.runtime.model.rope import rope_table
from hethub.spec.layout.tensors import stage_tensors
from hethub.spec.model import ModelSpec
from hethub.spec.ranges import Range


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class _Attention(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.head, self.groups = model.head_size, model.heads // model.num_kv_heads
        query, kv = model.heads * model.head_size, model.num_kv_heads * model.head_size
        self.q_proj = nn.Linear(model.hidden, query, bias=False)
        self.k_proj = nn.Linear(model.hidden, kv, bias=False)
        self.v_proj = nn.Linear(model.hidden, kv, bias=False)
        self.o_proj = nn.Linear(query, model.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x and result (batch, seq, hidden)."""
        heads = [part(x).unflatten(-1, (-1, self.head)) for part in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (_turn(heads[0], cos, sin), _turn(heads[1], cos, sin), heads[2])
        if self.groups > 1:
            key, value = (t.unsqueeze(3).expand(-1, -1, -1, self.groups, -1).flatten(2, 3) for t in (key, value))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (batch, seq, heads, head_dim) by its positions; cos and sin (seq, 1, head_dim)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class _MLP(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up_proj = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down_proj = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(model), _MLP(model)
        self.input_layernorm = _Norm(model.hidden, model.norm_eps)
        self.post_attention_layernorm = _Norm(model.hidden, model.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Body(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(_Layer(model) for _ in range(model.layers))
        self.norm = _Norm(model.hidden, model.norm_eps)


class Llama(nn.Module):
    """The mean loss over all targets of tokens (batch, seq), in torch's default type; `fill` gives it its values."""

    def __init__(self, model: ModelSpec, seq_len: int) -> None:
        super().__init__()
        self.model, self.lm_head = _Body(model), nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied_head:
            self.lm_head.weight = self.model.embed_tokens.weight
        cos, sin = rope_table(model, seq_len, torch.get_default_dtype(), torch.get_default_device())
        self.register_buffer("cos", cos.unsqueeze(1), persistent=False)
        self.register_buffer("sin", sin.unsqueeze(1), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.lm_head(self.model.norm(x)).flatten(0, 1), targets.flatten())


@torch.no_grad()
def fill(module: Llama, model: ModelSpec, seed: int, folder: Path | None) -> None:
    """The values that every plan of a job starts from: the Hugging Face folder's, or drawn from the seed."""
    weights = None if folder is None else open_weights(folder, model)
    for info in stage_tensors(model, (Range(0, model.layers),)):
        if weights is None:
            value = initial_value(info, model, seed)
        else:
            value = weights.read(info, Range(0, info.numel)).view(info.stored_shape)
        module.get_parameter(info.name).copy_(value.t() if info.split_dim == 1 else value)
