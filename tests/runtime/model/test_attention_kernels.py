"""Which of torch's kernels attention takes: one that is there, knows what is asked of it and computes right."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hethub.runtime.model import layers
from hethub.runtime.model.layers import Documents
from tests.runtime.model.test_layers import DOCUMENTS, EXACT, gradients, random


def test_a_kernel_that_knows_no_grouped_heads_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch 2.11 raises TypeError."""

    def varlen_attn(query, key, value, starts, key_starts, longest, key_longest, *, window_size):  # type: ignore[no-untyped-def]
        raise AssertionError("never called")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    assert not layers._attends_to_unlike_lengths.__wrapped__(torch.device("cpu"), torch.bfloat16, 4)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None) -> Tensor:
    """What the kernel is to give."""
    each = zip(*(tensor.unsqueeze(0).split(documents.sizes, 1) for tensor in (query, key, value)), strict=True)
    return torch.cat([layers._windowed(q, k, v, window) for q, k, v in each]).view(query.shape)


def without_a_mask(query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None) -> Tensor:
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return layers.F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(0, 1)


KERNELS = {
    "right": (one_by_one, True),
    "NaN without a bound": (lambda *given: one_by_one(*given) * (math.nan if given[4] is None else 1), False),
    "no bound": (lambda *given: one_by_one(*given[:4], None), False),
    "a key too few": (lambda *given: one_by_one(*given[:4], given[4] and given[4] - 1), False),
    "no mask": (without_a_mask, False),
    "wrong gradient": (lambda q, k, *rest: one_by_one(q, k + (k - k.detach()), *rest), False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kernel", "is_taken"), KERNELS.values(), ids=KERNELS)
def test_a_kernel_that_computes_wrongly_is_not_taken(
    kernel: Callable[..., Tensor], is_taken: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROCm's gave NaN and no error where it was told by -1 that there is no bound."""
    monkeypatch.setattr(layers, "_varlen", kernel)
    assert layers._attends_to_unlike_lengths.__wrapped__(torch.device("cpu"), dtype, 64) == is_taken


def test_the_first_look_for_that_kernel_may_come_inside_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which runs attention again, without the look: it must not count what that had kept."""
    monkeypatch.setattr(layers, "_varlen", one_by_one)
    layers._attends_to_unlike_lengths.cache_clear()
    inputs = [random(2, 6, heads, 4, seed=heads) for heads in (4, 2, 2)]
    again, once = partial(layers.checkpoint, layers._mix, use_reentrant=False), layers._mix
    found = gradients(lambda *args: again(*args, DOCUMENTS), *inputs)
    expected = gradients(lambda *args: once(*args, DOCUMENTS), *inputs)
    layers._attends_to_unlike_lengths.cache_clear()
    assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("flashes", [True, False])
def test_grouped_heads_are_repeated_where_a_device_has_no_flash_attention(
    flashes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's memory-efficient kernel takes none; its plain formula keeps every score."""
    given = []
    attend = layers.F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        given.append((key.shape[1], options["enable_gqa"]))
        return attend(query, key, value, **options)

    results = []
    for on_device in (False, True):
        monkeypatch.setattr(layers, "is_gpu", lambda where, on_device=on_device: on_device)
        monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: flashes)
        monkeypatch.setattr(layers.F, "scaled_dot_product_attention", attention)
        inputs = [random(2, 6, heads, 4, seed=heads, dtype=torch.float32).requires_grad_() for heads in (4, 2, 2)]
        mixed = layers._causal(*inputs)
        mixed.square().sum().backward()
        results.append([mixed, *(x.grad for x in inputs)])
    assert given == [(2, True), (2, True) if flashes else (4, False)]
    for expected, found in zip(*results, strict=True):
        assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("window", [None, 2])
def test_a_device_attends_to_all_documents_in_one_kernel(window: int | None) -> None:
    where = torch.device("cuda", 0)
    assert layers._attends_to_unlike_lengths(where, torch.bfloat16, 64)
    documents = Documents(sizes=DOCUMENTS.sizes, starts=DOCUMENTS.starts.to(where))
    query, key, value = (random(2, 6, heads, 64, seed=heads, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for ours, theirs in ((documents, DOCUMENTS), (None, None)):
        results = []
        for place, of in ((torch.device("cpu"), theirs), (where, ours)):
            inputs = [x.detach().to(place).requires_grad_() for x in (query, key, value)]
            mixed = layers._mix(*inputs, of, window)
            mixed.float().square().sum().backward()
            results.append([mixed, *(x.grad for x in inputs)])
        for expected, found in zip(*results, strict=True):
            assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)
