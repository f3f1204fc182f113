"""The same Llama as plain PyTorch modules: the peer that speed is compared with, and nothing of hethub in it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hethub.spec.model import ModelSpec


class Block(nn.Module):
    """One layer: attention and SwiGLU MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        hidden, head, kv = model.hidden, model.head_size, model.num_kv_heads
        self.head, self.grouped = head, kv != model.heads
        self.attention_norm = nn.RMSNorm(hidden, eps=model.norm_eps)
        self.mlp_norm = nn.RMSNorm(hidden, eps=model.norm_eps)
        self.q = nn.Linear(hidden, model.heads * head, bias=False)
        self.k = nn.Linear(hidden, kv * head, bias=False)
        self.v = nn.Linear(hidden, kv * head, bias=False)
        self.o = nn.Linear(model.heads * head, hidden, bias=False)
        self.gate = nn.Linear(hidden, model.ffn, bias=False)
        self.up = nn.Linear(hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        normed = self.attention_norm(x)
        q, k, v = (p(normed).view(batch, seq, -1, self.head).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, seq, -1))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class PlainLlama(nn.Module):
    """Layers [first, last) of the model, with embedding and head where they belong."""

    def __init__(self, model: ModelSpec, seq_len: int, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        last = model.layers if last is None else last
        self.embedding = nn.Embedding(model.vocab, model.hidden) if first == 0 else None
        self.blocks = nn.ModuleList(Block(model) for _ in range(first, last))
        self.norm = nn.RMSNorm(model.hidden, eps=model.norm_eps) if last == model.layers else None
        self.head = nn.Linear(model.hidden, model.vocab, bias=False) if last == model.layers else None
        if model.tied_head and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight
        inverse = 1.0 / model.rope_theta ** (torch.arange(0, model.head_size, 2) / model.head_size)
        angles = torch.outer(torch.arange(seq_len), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=model.init_std)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of (batch, seq, vocab) logits."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
