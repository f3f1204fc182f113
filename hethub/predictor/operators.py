"""What a transformer layer computes, operator by operator: products, bytes and kernels, for the share of one rank."""

from dataclasses import dataclass
from typing import NamedTuple

from hethub.predictor.software import MathPrecision, Software, element_bytes
from hethub.spec.model import ModelSpec


class Product(NamedTuple):
    """`times` matrix products of (rows x inner) by (inner x columns)."""

    rows: float
    columns: float
    inner: float
    times: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.times


@dataclass(frozen=True)
class Work:
    """Operators of one pass of one layer on one rank: products, fused-attention FLOPs, elementwise bytes, kernels."""

    products: tuple[Product, ...]
    attention_flops: float
    elementwise_bytes: float
    kernels: int


class Shape(NamedTuple):
    """What one rank computes of a layer: samples and tokens per sample, and its fractions of heads and columns."""

    samples: float
    seq_len: int
    share: float  # of heads and ffn columns: 1 / TP where equal
    tp: int


def layer_work(model: ModelSpec, shape: Shape, precision: MathPrecision, software: Software) -> tuple[Work, Work]:
    """Forward and backward of one layer, without communication and recompute.

    Products backward are twice the forward's. Elementwise bytes count each tensor that an unfused framework reads or
    writes: norms, rotary embedding, activation, residuals; unfused attention adds the passes over its scores.
    """
    tokens = shape.samples * shape.seq_len / software.context_parallel
    forward = _projections(model, shape, tokens)
    backward = tuple(p for f in forward for p in (Product(f.rows, f.inner, f.columns), Product(f.inner, f.columns, f.rows)))
    attention, scores, score_bytes = _attention(model, shape, precision, software)
    width = element_bytes(precision)
    cut = shape.share if software.sequence_parallel else 1.0
    llama = model.family == "llama"
    hidden_passes = 14 if llama else 10  # two norms, two residuals; RMSNorm computes in fp32
    query_passes = 8 if llama else 3  # RoPE, layout changes
    column_passes = 5 if model.is_gated else 3
    query = (model.heads + model.num_kv_heads) * model.head_size * shape.share
    inner = model.ffn * shape.share
    passes = hidden_passes * model.hidden * cut + query_passes * query + column_passes * inner
    moved = tokens * passes * width + score_bytes
    kernels = (26 if llama else 16) + (0 if software.fused_attention else 6)
    return (
        Work((*forward, *scores), attention, moved, kernels),
        Work((*backward, *scores, *scores), 2.5 * attention, 2.0 * moved, 2 * kernels),
    )


def _projections(model: ModelSpec, shape: Shape, tokens: float) -> tuple[Product, ...]:
    query = model.heads * model.head_size * shape.share
    kv = max(model.num_kv_heads * shape.share, 1.0) * model.head_size  # beyond one KV head per rank they are replicated
    inner = model.ffn * shape.share
    return (
        Product(tokens, query + 2 * kv, model.hidden),
        Product(tokens, model.hidden, query),
        Product(tokens, inner * (2 if model.is_gated else 1), model.hidden),
        Product(tokens, model.hidden, inner),
    )


def _attention(
    model: ModelSpec, shape: Shape, precision: MathPrecision, software: Software
) -> tuple[float, tuple[Product, ...], float]:
    """Fused FLOPs, or the two batched products and the bytes of the passes over their scores."""
    heads, seq, cp = model.heads * shape.share, shape.seq_len, software.context_parallel
    if software.fused_attention:
        causal = 1.0 if model.family == "bert" else 0.5
        return 4.0 * shape.samples * heads * model.head_size * seq * seq * causal / cp, (), 0.0
    pairs = shape.samples * heads
    products = (Product(seq / cp, seq, model.head_size, pairs), Product(seq / cp, model.head_size, seq, pairs))
    return 0.0, products, 6.0 * pairs * seq * seq / cp * element_bytes(precision)


def attention_share(model: ModelSpec, seq_len: int, software: Software) -> float:
    """The part of a layer's forward FLOPs inside attention proper: what selective recompute runs again."""
    attention = 4.0 * model.heads * model.head_size * seq_len * (0.5 if software.fused_attention else 1.0)
    return attention / (attention + 2.0 * model.layer_parameters)


def embedding_work(model: ModelSpec, tokens: float, precision: MathPrecision) -> tuple[Work, Work]:
    """Forward and backward of the token embedding on one rank."""
    moved = 2.0 * tokens * model.hidden * element_bytes(precision)
    return Work((), 0.0, moved, 3), Work((), 0.0, 2.0 * moved, 4)


def head_work(model: ModelSpec, tokens: float, share: float, precision: MathPrecision) -> tuple[Work, Work]:
    """Forward and backward of final norm, output matrix and cross-entropy in fp32 over `share` of the vocabulary."""
    columns = model.vocab * share
    forward = Product(tokens, columns, model.hidden)
    backward = (Product(tokens, model.hidden, columns), Product(model.hidden, columns, tokens))
    logits = tokens * columns * max(4, element_bytes(precision))
    return Work((forward,), 0.0, 5.0 * logits, 15), Work(backward, 0.0, 3.0 * logits, 20)


def model_flops(model: ModelSpec, samples: float, seq_len: int) -> float:
    """FLOPs the model needs for a step: 6 N per token, causal attention counted half, recompute excluded.

    N counts every matrix that multiplies a token; the embedding only looks up, unless it is the head as well.
    """
    lookups = model.embedding_parameters - (model.vocab * model.hidden if model.tied_head else 0)
    causal = 1.0 if model.family == "bert" else 0.5
    attention = 12.0 * model.layers * model.heads * model.head_size * seq_len * causal
    return samples * seq_len * (6.0 * (model.parameters - lookups) + attention)
