"""Faults put into what the runtime computes, as a maker's library might have them: each is caught, and called by its
name."""

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install hethub[train]")

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hethub.kernels.device import Device
from hethub.runtime.model import layers, rope
from hethub.runtime.parity import subjects
from hethub.runtime.parity.check import check_device
from hethub.runtime.parity.formulas import Formulas
from hethub.runtime.parity.noise import Measured, worst
from hethub.runtime.parity.row import Row
from hethub.runtime.state import optimizer
from hethub.spec.job import TrainSpec
from hethub.spec.model import ModelSpec

CPU = Device(vendor="cpu")
MODEL = ModelSpec(
    name="small", layers=2, hidden=64, heads=8, kv_heads=2, ffn=96, vocab=160, max_seq_len=64, rope_theta=200000.0,
    norm_eps=1e-5,
)  # fmt: skip
TRAIN = TrainSpec(seq_len=24)
SDPA, ADAMW, LINEAR_OPS = F.scaled_dot_product_attention, optimizer.adamw, ("mm", "addmm", "linear")
Patch = pytest.MonkeyPatch


def checked(precision: str = "fp32", **options: Any) -> dict[str, Row]:
    return {row.what: row for row in check_device(MODEL, TrainSpec(seq_len=24, precision=precision), CPU, **options)}


def failed(rows: dict[str, Row]) -> dict[str, str]:
    return {what: row.reason for what, row in rows.items() if row.state == "fail"}


@pytest.mark.parametrize("masks_documents", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_a_device_that_computes_right_passes(precision: str, masks_documents: bool) -> None:
    rows = checked(precision, masks_documents=masks_documents)
    assert {row.state for what, row in rows.items() if what != "denormals"} == {"pass"}
    assert rows["denormals"].state in ("pass", "note")
    assert {"layer", "head", "optimizer step", "rounding"} <= rows.keys()


def test_llama_3_1s_stretching_is_the_same_by_both_ways_to_write_it() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16}
    model = ModelSpec.model_validate({**MODEL.to_dict(), "rope_scaling": scaling})
    rows = {row.what: row for row in check_device(model, TrainSpec(seq_len=24, precision="fp64"), CPU)}
    assert rows["rotary embedding"].state == "pass"


@pytest.mark.parametrize("masks_documents", [False, True])
def test_windows_are_held_against_the_formulas(monkeypatch: Patch, masks_documents: bool) -> None:
    model, train = MODEL.replace(sliding_window=5), TrainSpec(seq_len=24, precision="fp64")

    def states() -> dict[str, str]:
        return {row.what: row.state for row in check_device(model, train, CPU, masks_documents=masks_documents)}

    assert states()["attention"] == states()["layer"] == "pass"
    windowed = layers._windowed
    monkeypatch.setattr(layers, "_windowed", lambda *t: windowed(*t[:3], t[3] + 1))
    assert states()["attention"] == states()["layer"] == "fail"


def test_a_window_longer_than_what_is_compared_is_made_as_much_shorter(monkeypatch: Patch) -> None:
    """128 tokens have no window of 200, and a device that knows none passed."""
    model, train = MODEL.replace(sliding_window=200, max_seq_len=1024), TrainSpec(seq_len=1024, precision="fp64")

    def states() -> set[str]:
        return {row.state for row in check_device(model, train, CPU) if row.what in ("attention", "layer")}

    assert states() == {"pass"}
    monkeypatch.setattr(layers, "_windowed", lambda *t: layers._causal(*t[:3]))
    assert states() == {"fail"}


class _Rounding(TorchDispatchMode):
    """Matrix products of fp32 take their inputs as `way` leaves them."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._way = way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in LINEAR_OPS and args[-1].dtype == torch.float32:
            kept = 1 if name == "addmm" else 0
            args = (*args[:kept], *(self._way(each) for each in args[kept:]))
        return func(*args, **(kwargs or {}))


def tf32(x: torch.Tensor) -> torch.Tensor:
    """To nearest of 10 fraction bits, by the bits of the number."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def unscaled(patch: Patch) -> None:
    patch.setattr(F, "scaled_dot_product_attention", lambda *t, **options: SDPA(*t, scale=1.0, **options))


def unmasked(patch: Patch) -> None:
    def attend(*t: Any, **options: Any) -> torch.Tensor:
        return SDPA(*t, **{**options, "is_causal": False})

    patch.setattr(F, "scaled_dot_product_attention", attend)


def wrong_heads(patch: Patch) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        times = query.shape[1] // key.shape[1]
        return SDPA(query, key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1), is_causal=True)

    patch.setattr(F, "scaled_dot_product_attention", attend)


def wrong_base(patch: Patch) -> None:
    table = rope.rope_table
    patch.setattr(subjects, "rope_table", lambda model, *rest: table(model.replace(rope_theta=1e4), *rest))


def neighbours(patch: Patch) -> None:
    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        cos, sin = cos[:, :half].unsqueeze(1), sin[:, :half].unsqueeze(1)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)

    patch.setattr(rope, "_turn", turn)


def norm_of(eps: float | None) -> Callable[[Patch], None]:
    """A norm with another eps; None: one that subtracts the mean first."""

    def inject(patch: Patch) -> None:
        apply = layers._Norm.apply

        def centred(x: torch.Tensor, branch: Any, weight: Any, given: float) -> tuple[torch.Tensor, torch.Tensor]:
            total = x if branch is None else x + branch
            return total, apply(total - total.mean(-1, keepdim=True), None, weight, given)[1]

        with_eps = lambda x, branch, weight, given: apply(x, branch, weight, eps)  # noqa: E731
        patch.setattr(layers._Norm, "apply", centred if eps is None else with_eps)

    return inject


def gelu(patch: Patch) -> None:
    patch.setattr(layers._SwiGLU, "apply", lambda gate, up: F.gelu(gate) * up)


def exchanged(patch: Patch) -> None:
    apply = layers._SwiGLU.apply
    patch.setattr(layers._SwiGLU, "apply", lambda gate, up: apply(up, gate))


def coupled_decay(patch: Patch) -> None:
    def step(weights: Any, grads: Any, *rest: Any, weight_decay: float, **options: Any) -> None:
        grads = [grad + weight_decay * weight for grad, weight in zip(grads, weights, strict=True)]
        ADAMW(weights, grads, *rest, weight_decay=0.0, **options)

    patch.setattr(optimizer, "adamw", step)


def uncorrected(patch: Patch) -> None:
    def step(weights: Any, grads: Any, first: Any, second: Any, none: Any, updates: Any, **options: Any) -> None:
        for count in updates:
            count.fill_(1e6)  # as if the moments had long settled
        ADAMW(weights, grads, first, second, none, updates, **options)

    patch.setattr(optimizer, "adamw", step)


NAMED = {
    "missing 1/sqrt(d)": (unscaled, "attention", "not divided by sqrt(head_dim)"),
    "dropped mask": (unmasked, "attention", "mask is dropped"),
    "wrong heads": (wrong_heads, "attention", "wrong queries"),
    "wrong rotary base": (wrong_base, "rotary embedding", "base is 10,000"),
    "neighbours paired": (neighbours, "rotary embedding", "pairs neighbours"),
    "no eps": (norm_of(0.0), "norm", "eps is 0"),
    "wrong eps": (norm_of(1e-6), "norm", "eps is 1e-06"),
    "LayerNorm": (norm_of(None), "norm", "subtracts the mean"),
    "GELU": (gelu, "MLP activation", "is GELU"),
    "exchanged": (exchanged, "MLP activation", "exchanged"),
    "L2 decay": (coupled_decay, "optimizer step", "added to the gradient"),
    "no bias correction": (uncorrected, "optimizer step", "bias correction is left out"),
}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("inject", "what", "named"), NAMED.values(), ids=NAMED)
def test_a_fault_is_named(
    monkeypatch: Patch, inject: Callable[[Patch], None], what: str, named: str, precision: str
) -> None:
    inject(monkeypatch)
    rows = checked(precision)
    assert named in rows[what].reason
    assert rows[what].state == "fail"
    elsewhere = failed(rows).keys() - {what, "layer", "head"}
    assert not elsewhere
    if what != "optimizer step":
        assert what in rows["layer"].reason


@pytest.mark.parametrize(
    ("way", "named"),
    [(tf32, "round their inputs to TF32"), (lambda x: x.bfloat16().float(), "round their inputs to bf16")],
    ids=["TF32", "bf16"],
)
def test_products_of_fewer_bits_are_named(way: Callable[[torch.Tensor], torch.Tensor], named: str) -> None:
    with _Rounding(way):
        rows = checked("fp32")
    assert named in rows["projection"].reason
    assert named in rows["head"].reason
    assert rows["products take whole inputs"].state == "fail"
    assert rows["norm"].state == rows["optimizer step"].state == rows["sums are wide"].state == "pass"


class _NarrowSums(TorchDispatchMode):
    """Products of bf16 whose sums are kept in bf16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name != "aten::mm" or args[0].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        total = torch.zeros(args[0].shape[0], args[1].shape[1], dtype=torch.bfloat16)
        for k in range(args[0].shape[1]):
            total += args[0][:, k : k + 1] * args[1][k : k + 1]
        return total if "out" not in (kwargs or {}) else kwargs["out"].copy_(total)


def test_sums_of_fewer_bits_are_named() -> None:
    with _NarrowSums():
        rows = checked("bf16")
    assert failed(rows)["sums are wide"] == "sums of products are kept in fewer bits than fp32"


def lost_doubles(patch: Patch) -> None:
    """A gradient of the embedding that counts a token once, however often it comes."""

    def add_rows(self: Any, rows: torch.Tensor, values: torch.Tensor) -> None:
        self.grad[rows] = values.to(self.grad.dtype)

    patch.setattr("hethub.runtime.state.parameter.Parameter.add_rows", add_rows)


def short_backward(patch: Patch) -> None:
    """SwiGLU's backward without the slope of its sigmoid."""

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        return sigmoid * up * grad, gate * sigmoid * grad

    patch.setattr(layers._SwiGLU, "backward", staticmethod(backward))


@pytest.mark.parametrize(
    ("inject", "what", "output"),
    [(lost_doubles, "embedding", "gradient of weight"), (short_backward, "MLP activation", "gradient of gate")],
)
def test_a_fault_without_a_name_is_found_by_operator_and_output(
    monkeypatch: Patch, inject: Callable[[Patch], None], what: str, output: str
) -> None:
    inject(monkeypatch)
    rows = checked("bf16")
    assert failed(rows)[what] == f"furthest off: {output}"


def test_a_nan_is_no_small_error(monkeypatch: Patch) -> None:
    monkeypatch.setattr(layers._SwiGLU, "apply", lambda gate, up: F.silu(gate) * up * float("nan"))
    row = checked("fp32")["MLP activation"]
    assert (row.state, row.found) == ("fail", "inf noises")


def test_a_device_that_gives_other_results_each_time_does_not_pass(monkeypatch: Patch) -> None:
    """As one that reads memory before it is written. The noise was as large as the error: 0.7 noises."""
    monkeypatch.setattr(layers._SwiGLU, "apply", lambda gate, up: F.silu(gate) * up + torch.randn_like(gate))
    row = checked("bf16")["MLP activation"]
    assert (row.state, row.reason) == ("fail", "the same inputs gave other results a second time: result")


def test_an_infinity_among_moved_inputs_is_no_noise(monkeypatch: Patch) -> None:
    """It made the noise infinite, and any error small beside it."""
    apply, calls = layers._SwiGLU.apply, iter(range(4))
    monkeypatch.setattr(
        layers._SwiGLU, "apply", lambda gate, up: apply(gate, up) * (math.inf if next(calls, 0) == 3 else 1.0)
    )
    subject = next(
        each for each in subjects.subjects(MODEL, TRAIN, masks_documents=False) if each.name == "MLP activation"
    )
    assert worst(Measured(subject, torch.device("cpu")).errors(Formulas()))[1] == math.inf
