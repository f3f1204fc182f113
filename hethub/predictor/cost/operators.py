"""What a transformer layer computes, operator by operator: products, bytes and kernels, for the share of one rank."""

from typing import NamedTuple

from hethub.predictor.cost.software import MathPrecision, Software, element_bytes
from hethub.spec.model import ModelSpec

ALIGNED = 64  # elements: matrix units are fed whole lines of memory (NVIDIA, Matrix Multiplication Background, A100)
UNFUSED_KERNELS = 6  # of attention beside the one that fused attention has


class Product(NamedTuple):
    """`times` matrix products of (rows x inner) by (inner x columns)."""

    rows: float
    columns: float
    inner: float
    times: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.times


class Work(NamedTuple):
    """Totals of one pass on one rank."""

    flops: float  # of matrix products
    narrow_flops: float  # the same, each over its harmonic dimension: 1/rows + 1/columns + 1/inner
    operand_bytes: float  # read and written at least once by the products
    attention_flops: float  # inside fused attention
    elementwise_bytes: float  # as counted; frameworks that work kernel by kernel move more
    kernels: int
    gradients: float = 0.0  # parameters whose gradient the pass accumulates
    logits: float = 0.0  # scores over the vocabulary that the loss reads and writes
    fused_bytes: float = 0.0  # moved by fused kernels: exactly what is counted
    wave_depth: float = 0.0  # summed depth of the products: FLOPs per element of a wave that is not full
    misaligned_flops: float = 0.0  # of products with a dimension that is no multiple of ALIGNED elements

    @staticmethod
    def of(
        products: tuple[Product, ...],
        width: int,
        attention_flops: float,
        elementwise_bytes: float,
        kernels: int,
        gradients: float = 0.0,
        logits: float = 0.0,
        fused_bytes: float = 0.0,
    ) -> "Work":
        flops = narrow = operands = depth = misaligned = 0.0
        for product in products:
            rows, columns, inner, times = product
            flops += product.flops
            narrow += product.flops * (1.0 / rows + 1.0 / columns + 1.0 / inner)
            depth += 2.0 * inner
            if columns % ALIGNED or inner % ALIGNED or rows % ALIGNED:
                misaligned += product.flops
            operands += times * (rows * inner + inner * columns + rows * columns)
        return Work(
            flops,
            narrow,
            operands * width,
            attention_flops,
            elementwise_bytes,
            kernels,
            gradients,
            logits,
            fused_bytes,
            depth,
            misaligned,
        )


class Shape(NamedTuple):
    """What one rank computes of a layer: samples and tokens per sample, and its fraction of heads and columns."""

    samples: float
    seq_len: int
    share: float  # 1 / TP where equal


def layer_work(model: ModelSpec, shape: Shape, precision: MathPrecision, software: Software) -> tuple[Work, Work]:
    """Forward and backward of one layer, without communication and recompute.

    Products backward are twice the forward's. Elementwise bytes count each tensor that the framework's kernels read or
    write: norms, rotary embedding, activation, residuals; unfused attention adds the passes over its scores.
    """
    tokens = shape.samples * shape.seq_len / software.context_parallel
    width = element_bytes(precision)
    forward = _projections(model, shape, tokens)
    backward = tuple(
        p for f in forward for p in (Product(f.rows, f.inner, f.columns), Product(f.inner, f.columns, f.rows))
    )
    attention, scores, score_bytes = _attention(model, shape, width, software)
    moved = tokens * _passes(model, shape, software) * width
    eager, fused = (0.0, moved) if software.fused_elementwise else (moved, 0.0)
    fused += score_bytes  # counted kernel by kernel
    kernels = (18 if software.fused_elementwise else 28) + (0 if software.fused_attention else UNFUSED_KERNELS)
    weights = sum(p.columns * p.inner for p in forward)
    return (
        Work.of((*forward, *scores), width, attention, eager, kernels, fused_bytes=fused),
        Work.of(
            (*backward, *scores, *scores),
            width,
            2.5 * attention,
            2.0 * eager,
            2 * kernels,
            weights,
            fused_bytes=2.0 * fused,
        ),
    )


def weight_work(model: ModelSpec, shape: Shape, precision: MathPrecision, software: Software) -> Work:
    """The products of a layer's backward that make its weights' gradients."""
    forward = _projections(model, shape, shape.samples * shape.seq_len / software.context_parallel)
    products = tuple(Product(f.inner, f.columns, f.rows) for f in forward)
    gradients = sum(p.columns * p.inner for p in forward)
    return Work.of(products, element_bytes(precision), 0.0, 0.0, len(products), gradients)


def attention_work(model: ModelSpec, shape: Shape, precision: MathPrecision, software: Software) -> Work:
    """Attention proper of a layer's forward, between its projections: what selective recompute runs again."""
    width = element_bytes(precision)
    attention, scores, score_bytes = _attention(model, shape, width, software)
    kernels = 1 if software.fused_attention else 1 + UNFUSED_KERNELS
    return Work.of(scores, width, attention, 0.0, kernels, fused_bytes=score_bytes)


def beside_sums(model: ModelSpec, shape: Shape, precision: MathPrecision, software: Software) -> tuple[Work, Work]:
    """The weights' gradients that a layer's backward computes beside its two sums over tensor-parallel ranks: those of
    the matrices cut by columns, before attention and before the activation."""
    forward = _projections(model, shape, shape.samples * shape.seq_len / software.context_parallel)

    def gradient(of: Product) -> Work:
        product = Product(of.inner, of.columns, of.rows)
        return Work.of((product,), element_bytes(precision), 0.0, 0.0, 1, of.columns * of.inner)

    return gradient(forward[0]), gradient(forward[2])


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


def _passes(model: ModelSpec, shape: Shape, software: Software) -> float:
    """Elements that the elementwise kernels of a forward read or write per token."""
    # Two norms, two residuals; RMSNorm computes in fp32.
    hidden = 14 if model.of_family.rms_norm and not software.fused_elementwise else 10
    query = 4 if software.fused_elementwise else 8 if model.of_family.rotary else 3  # RoPE, layout changes
    columns = (5 if model.is_gated else 3) if software.fused_activation else 18  # tanh-GELU kernel by kernel
    cut = shape.share if software.sequence_parallel else 1.0
    heads = (model.heads + model.num_kv_heads) * model.head_size * shape.share
    return hidden * model.hidden * cut + query * heads + columns * model.ffn * shape.share


def _attention(
    model: ModelSpec, shape: Shape, width: int, software: Software
) -> tuple[float, tuple[Product, ...], float]:
    """Fused FLOPs, or the two batched products and the bytes of the passes over their scores."""
    heads, seq, cp = model.heads * shape.share, shape.seq_len, software.context_parallel
    if software.fused_attention:
        return 4.0 * shape.samples * heads * model.head_size * seq * _seen(model, seq) / cp, (), 0.0
    pairs = shape.samples * heads
    products = (Product(seq / cp, seq, model.head_size, pairs), Product(seq / cp, model.head_size, seq, pairs))
    passes = 5.0 if software.fused_softmax else 12.0  # fused: softmax, dropout; else scale, mask, cast and copies too
    return 0.0, products, passes * pairs * seq * seq / cp * width


def _seen(model: ModelSpec, seq_len: int) -> float:
    """Keys that a query sees in the mean: causal attention sees half of the sequence, and fewer inside a window."""
    if not model.of_family.causal:
        return float(seq_len)
    window = min(model.sliding_window or seq_len, seq_len)
    return window - window * window / (2 * seq_len)


def embedding_work(model: ModelSpec, tokens: float, precision: MathPrecision) -> tuple[Work, Work]:
    """Forward and backward of the token embedding on one rank."""
    moved = 2.0 * tokens * model.hidden * element_bytes(precision)
    return Work.of((), 0, 0.0, moved, 3), Work.of((), 0, 0.0, 2.0 * moved, 4)


def head_work(model: ModelSpec, tokens: float, share: float, precision: MathPrecision) -> tuple[Work, Work]:
    """Forward and backward of final norm, output matrix and cross-entropy in fp32 over `share` of the vocabulary."""
    columns, width = model.vocab * share, element_bytes(precision)
    forward = Product(tokens, columns, model.hidden)
    backward = (Product(tokens, model.hidden, columns), Product(model.hidden, columns, tokens))
    logits = tokens * columns
    return (
        Work.of((forward,), width, 0.0, 0.0, 15, logits=logits),
        Work.of(backward, width, 0.0, 0.0, 20, columns * model.hidden, logits=logits),
    )


def head_passed_on(model: ModelSpec, tokens: float, precision: MathPrecision) -> Work:
    """What is left for the backward of a head whose loss made its gradients: to scale them and to pass the final norm."""
    return Work.of((), 0, 0.0, 5.0 * tokens * model.hidden * element_bytes(precision), 3)


def model_flops(model: ModelSpec, samples: float, seq_len: int) -> float:
    """FLOPs the model needs for a step: 6 N per token, attention by the keys that a query sees, recompute excluded.

    N counts every matrix that multiplies a token; the embedding only looks up, unless it is the head as well.
    """
    lookups = model.embedding_parameters - (model.vocab * model.hidden if model.tied_head else 0)
    attention = 12.0 * model.layers * model.heads * model.head_size * _seen(model, seq_len)
    return samples * seq_len * (6.0 * (model.parameters - lookups) + attention)
