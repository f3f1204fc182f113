"""Our backward functions against autograd of a plain implementation, in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hethub.kernels.bodies import choose
from hethub.runtime.model import layers, rope
from hethub.runtime.model import loss as loss_module
from hethub.runtime.model.layers import Documents, LlamaLayer, TokenLayout, rms_norm
from hethub.runtime.model.layers import _SwiGLU as SwiGLU
from hethub.runtime.model.loss import IGNORED, head_loss
from hethub.runtime.model.rope import rope_table, rotate
from hethub.runtime.model.tensor_parallel import TensorGroup, column_parallel, embed, row_parallel
from hethub.runtime.state.parameter import Parameter
from hethub.spec.ranges import Range
from tests.support import plain_llama as plain
from tests.support.layouts import MODEL
from tests.support.ranks import run_ranks

ALONE = TensorGroup(None)
EXACT = {"rtol": 1e-11, "atol": 1e-13}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameter(weight: Tensor, uses: int = 1) -> Parameter:
    """A parameter that expects one microbatch, its old gradient left as rubbish that must not be seen."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    own = Parameter("w", weight.clone(), torch.full_like(weight, 7.0, dtype=wide))
    own.uses = uses
    own.start_step(1, lambda done: None)
    return own


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result of a plain function, then the gradients of its random projection by every input."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    result = function(*leaves)
    (result * random(*result.shape, seed=99)).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def ours(function: Callable[[Tensor], Tensor], x: Tensor, *parameters: Parameter) -> list[Tensor]:
    """As `gradients`, for a function of ours whose weights note their own."""
    x = x.detach().clone().requires_grad_()
    result = function(x)
    (result * random(*result.shape, seed=99)).sum().backward()
    return [result.detach(), x.grad, *(own.grad for own in parameters)]


def test_rms_norm() -> None:
    x, weight = random(7, 12), random(12, seed=1)
    own = parameter(weight)
    assert_close(
        ours(lambda x: rms_norm(x, own, 1e-3), x, own),
        gradients(lambda x, w: plain.rms_norm(x, w, 1e-3), x, weight),
        **EXACT,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_of_half_precision_has_fp32_statistics(dtype: torch.dtype) -> None:
    """Sums of squares overflow in fp16 (300 squared, 64 times) and lose all bits in bf16; normed, then cast, then
    scaled."""
    x, weight = 300 * random(5, 64).to(dtype), random(64, seed=1, dtype=dtype)
    result = rms_norm(x, parameter(weight), 1e-5)
    assert result.dtype == dtype
    wide = x.float()
    assert torch.equal(result, (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(dtype) * weight)


def test_swiglu() -> None:
    gate, up = random(6, 10), random(6, 10, seed=1)
    leaves = [value.clone().requires_grad_() for value in (gate, up)]
    result = SwiGLU.apply(*leaves)
    (result * random(6, 10, seed=99)).sum().backward()
    expected = gradients(lambda g, u: torch.nn.functional.silu(g) * u, gate, up)
    assert_close([result.detach(), *(leaf.grad for leaf in leaves)], expected, **EXACT)
    assert torch.autograd.gradcheck(SwiGLU.apply, leaves)


def test_rotate_turns_complex_pairs() -> None:
    x, key = random(2, 5, 3, 8), random(2, 5, 1, 8, seed=1)
    cos, sin = rope_table(MODEL.replace(head_dim=8), 5, torch.float64, torch.device("cpu"))
    assert_close(ours(lambda x: rotate(x, key, cos, sin)[0], x), gradients(plain.rotate, x), **EXACT)
    assert_close(ours(lambda key: rotate(x, key, cos, sin)[1], key), gradients(plain.rotate, key), **EXACT)
    assert_close(rotate(*rotate(x, key, cos, sin), cos, -sin), (x, key), **EXACT)


def test_products_and_embedding() -> None:
    x, first, second = random(6, 5), random(4, 5, seed=1), random(3, 5, seed=2)
    own = parameter(first), parameter(second)
    joined = ours(lambda x: torch.cat(column_parallel(x, ALONE, own), 1), x, *own)
    assert_close(joined, gradients(lambda x, a, b: torch.cat((x @ a.t(), x @ b.t()), 1), x, first, second), **EXACT)

    row = parameter(random(5, 4, seed=3))
    assert_close(
        ours(lambda x: row_parallel(x, ALONE, row), x, row),
        gradients(lambda x, w: x @ w, x, random(5, 4, seed=3)),
        **EXACT,
    )

    table, tokens = random(9, 4, seed=4), torch.tensor([3, 8, 3, 0, 3])
    rows = parameter(table)
    result = embed(tokens, 0, ALONE, rows)
    (result * random(5, 4, seed=99)).sum().backward()
    assert_close([result.detach(), rows.grad], gradients(lambda w: w[tokens], table), **EXACT)


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Tensor:
    logits = x @ weight.t()
    return scale * torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


TARGETS = torch.tensor([3, 16, IGNORED, 0, 3, IGNORED, 9])


@pytest.mark.parametrize("chunk_tokens", [1, 2, 7, 1024])
def test_head_loss_in_chunks(monkeypatch: pytest.MonkeyPatch, chunk_tokens: int) -> None:
    monkeypatch.setattr(loss_module, "LOSS_CHUNK_TOKENS", chunk_tokens)
    x, weight = 3 * random(7, 5), random(17, 5, seed=1)
    own = parameter(weight)
    completed = []
    own.start_step(1, completed.append)
    result = ours(lambda x: head_loss(x, TARGETS, 0, 0.25, ALONE, own), x, own)
    expected = gradients(lambda x, w: plain_loss(x, w, TARGETS, 0.25), x, weight)
    # The weight's gradient is added on the way forward, for the factor 1 that a loss gets from backward.
    expected[2] /= random(seed=99)
    assert_close(result, expected, **EXACT)
    assert completed == [own]  # once, with the last chunk


def test_a_microbatch_of_ignored_targets_costs_nothing() -> None:
    own = parameter(random(17, 5, seed=1))
    result, grad_x, grad_w = ours(lambda x: head_loss(x, TARGETS * 0 + IGNORED, 0, 1.0, ALONE, own), random(7, 5), own)
    assert result == 0
    assert not grad_x.any()
    assert not grad_w.any()


@pytest.mark.parametrize("size", [1e4, 1e300])
def test_head_loss_of_huge_logits_is_finite(size: float) -> None:
    own = parameter(torch.eye(4, dtype=torch.float64))
    result, grad_x, _ = ours(
        lambda x: head_loss(x, torch.tensor([1]), 0, 1.0, ALONE, own),
        torch.tensor([[size, 0, 0, 0]], dtype=torch.float64),
        own,
    )
    assert result == size
    assert torch.isfinite(grad_x).all()


def test_parameters_sum_over_microbatches_and_tell_when_complete() -> None:
    own = parameter(random(4, 3))
    own.uses = 2  # as a tied head: two places per microbatch
    for _ in range(2):  # the second step must not see the first one's gradient
        told = []
        own.start_step(2, told.append)
        left, right = random(4, 6, seed=1), random(6, 3, seed=2)
        own.add_product(left, right)
        own.add(random(4, 3, seed=3))
        own.add_rows(torch.tensor([1, 1]), random(2, 3, seed=4))
        assert not told
        own.add_product(left, right, completes=False)
        assert not told
        own.add_product(left, right)
        assert told == [own]
        expected = 3 * left @ right + random(4, 3, seed=3)
        expected[1] += random(2, 3, seed=4).sum(0)
        assert_close(own.grad, expected, **EXACT)


def test_gradients_of_bf16_weights_are_kept_in_fp32() -> None:
    own = parameter(random(2, 2, dtype=torch.bfloat16))
    own.start_step(2, lambda done: None)
    one = torch.ones(2, 2, dtype=torch.bfloat16)
    own.add(one)
    own.add(one / 512)  # lost next to 1 in bf16
    assert own.grad.dtype == torch.float32
    assert torch.equal(own.grad, torch.full((2, 2), 1 + 1 / 512))


# -- a whole layer -----------------------------------------------------------------------------------------------------

SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
DOCUMENTS = Documents(sizes=(2, 3, 1, 6), starts=torch.tensor([0, 2, 5, 6, 12], dtype=torch.int32))
SHAPES = {"query": (32, 32), "key": (16, 32), "value": (16, 32), "output": (32, 32), "gate": (48, 32), "up": (48, 32),
          "down": (48, 32), "attention_norm": (32,), "mlp_norm": (32,)}  # fmt: skip


def layer_weights() -> dict[str, Tensor]:
    return {name: random(*shape, seed=i) * 0.2 for i, (name, shape) in enumerate(SHAPES.items())}


def allowed(segments: Tensor | None, window: int | None, seq: int) -> Tensor:
    """(batch or 1, seq, seq): which keys a query may see, beside those behind it."""
    positions = torch.arange(seq)
    near = (positions.unsqueeze(1) - positions < (window or seq)).unsqueeze(0)
    return near if segments is None else near & (segments.unsqueeze(2) == segments.unsqueeze(1))


def our_layer(recompute: str, segments: Tensor | None, window: int | None = None) -> list[Tensor]:
    weights = {name: parameter(value) for name, value in layer_weights().items()}
    layer = LlamaLayer(head_dim=4, window=window, eps=1e-5, group=ALONE, recompute=recompute, **weights)  # type: ignore[arg-type]
    cos, sin = rope_table(MODEL, 6, torch.float64, torch.device("cpu"))
    tokens = TokenLayout(batch=2, seq_len=6, cos=cos, sin=sin, documents=None if segments is None else DOCUMENTS)
    return ours(lambda x: layer(x, tokens), random(12, 32, seed=50), *weights.values())


def plain_layer(x: Tensor, *values: Tensor, segments: Tensor | None, window: int | None = None) -> Tensor:
    w = dict(zip(SHAPES, values, strict=True))
    normed = plain.rms_norm(x, w["attention_norm"], 1e-5)
    query, key, value = ((normed @ w[name].t()).view(2, 6, -1, 4) for name in ("query", "key", "value"))
    mixed = plain.attention(plain.rotate(query), plain.rotate(key), value, allowed(segments, window, 6)).reshape(12, -1)
    x = x + mixed @ w["output"]
    normed = plain.rms_norm(x, w["mlp_norm"], 1e-5)
    return x + (torch.nn.functional.silu(normed @ w["gate"].t()) * (normed @ w["up"].t())) @ w["down"]


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["causal", "documents"])
def test_a_layer_equals_plain_autograd_and_recompute_changes_no_bit(
    segments: Tensor | None, window: int | None
) -> None:
    kept = our_layer("none", segments, window)
    expected = gradients(
        lambda *args: plain_layer(*args, segments=segments, window=window),
        random(12, 32, seed=50),
        *layer_weights().values(),
    )
    assert_close(kept, expected, rtol=1e-10, atol=1e-12)
    for recompute in ("selective", "full"):
        assert all(torch.equal(a, b) for a, b in zip(kept, our_layer(recompute, segments, window), strict=True))


@pytest.mark.parametrize("seq", [1, 5, 12, 13])
@pytest.mark.parametrize("window", [1, 3, 4, 12, 99])
def test_a_window_ends_wherever_the_sequence_does(seq: int, window: int) -> None:
    query, key, value = (random(2, seq, heads, 4, seed=heads) for heads in (4, 2, 2))
    whole = plain.attention(query, key, value, allowed(None, window, seq)).reshape(2 * seq, -1)
    assert_close(layers._mix(query, key, value, None, window), whole, **EXACT)
    token = layers._mix(query[:, -1:], key, value, None, window)  # as text is generated
    assert_close(token, whole.view(2, seq, -1)[:, -1], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cpu_attends_document_by_document(dtype: torch.dtype) -> None:
    """It has no kernel for sequences of unlike lengths; a device that has one takes it (test_gpu)."""
    assert not layers._attends_to_unlike_lengths(torch.device("cpu"), dtype, 4)
    query, key, value = (random(2, 6, heads, 4, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    mixed = layers._mix(query, key, value, DOCUMENTS)
    wide = query.double(), key.double(), value.double()
    whole = plain.attention(*wide, SEGMENTS.unsqueeze(2) == SEGMENTS.unsqueeze(1)).reshape(12, -1)
    assert_close(mixed.double(), whole, **(EXACT if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}))


@pytest.fixture
def compiled() -> Iterator[None]:
    choose(True)
    yield
    choose(None)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_a_layer_and_the_loss_equal_plain_autograd(compiled: None) -> None:
    expected = gradients(
        lambda *args: plain_layer(*args, segments=None), random(12, 32, seed=50), *layer_weights().values()
    )
    assert_close(our_layer("none", None), expected, rtol=1e-10, atol=1e-12)
    x, weight, own = 3 * random(7, 5), random(17, 5, seed=1), parameter(random(17, 5, seed=1))
    result = ours(lambda x: head_loss(x, TARGETS, 0, 0.25, ALONE, own), x, own)
    expected = gradients(lambda x, w: plain_loss(x, w, TARGETS, 0.25), x, weight)
    expected[2] /= random(seed=99)
    assert_close(result, expected, **EXACT)
    used = (layers._normed, layers._added_and_normed, layers._norm_backward, layers._swiglu, layers._swiglu_backward)
    used += (rope._turned, rope._turned_back, loss_module._statistics, loss_module._to_gradient)
    assert all(body._programs for body in used)


# -- shards over ranks -------------------------------------------------------------------------------------------------

VOCAB = [Range(0, 11), Range(11, 12), Range(12, 17)]


def sharded(world: Any) -> list[Tensor]:
    """Loss, embedding and both products on this rank's uneven shards: results, input gradients, own weight
    gradients."""
    group = TensorGroup(world.group((0, 1, 2)))
    part = VOCAB[world.rank]
    head, table = parameter(random(17, 5, seed=1)[slice(*part)]), parameter(random(17, 5, seed=1)[slice(*part)])
    results = ours(lambda x: head_loss(x, TARGETS, part.start, 0.25, group, head), 3 * random(7, 5), head)
    rows = embed(torch.tensor([3, 16, 11, 0, 3]), part.start, group, table)
    (rows * random(5, 5, seed=99)).sum().backward()
    column, row = parameter(random(17, 5, seed=1)[slice(*part)]), parameter(random(17, 4, seed=2)[slice(*part)])
    products = ours(
        lambda x: row_parallel(column_parallel(x, group, (column,))[0], group, row), random(6, 5, seed=3), column, row
    )
    return [*results, rows.detach(), table.grad, *products]


def test_uneven_shards_add_up_to_the_whole() -> None:
    outcome = run_ranks(3, sharded)
    weight = random(17, 5, seed=1)
    loss, grad_x, grad_w = gradients(lambda x, w: plain_loss(x, w, TARGETS, 0.25), 3 * random(7, 5), weight)
    rows, grad_table = gradients(lambda w: w[torch.tensor([3, 16, 11, 0, 3])], weight)
    product = gradients(lambda x, a, b: x @ a.t() @ b, random(6, 5, seed=3), weight, random(17, 4, seed=2))
    for part, own in zip(VOCAB, outcome, strict=True):
        cut = slice(*part)
        expected = [loss, grad_x, (grad_w / random(seed=99))[cut], rows, grad_table[cut]]
        expected += [product[0], product[1], product[2][cut], product[3][cut]]
        assert_close(own, expected, **EXACT)
