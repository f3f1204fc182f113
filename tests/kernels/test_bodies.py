"""Bodies: one program for each shape, a fallback that is named; and what a layer's kernels are on a device, counted
where there is none."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.scheduler import Scheduler
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hethub.kernels import bodies
from hethub.kernels.bodies import Body, choose, traced, uncompiled
from hethub.runtime.model import layers, loss, rope
from hethub.runtime.model.stage import llama_layer
from hethub.runtime.model.tensor_parallel import TensorGroup
from hethub.runtime.state.parameter import Parameter
from hethub.spec.layout.tensors import model_tensors
from hethub.spec.model import ModelSpec


@pytest.fixture(autouse=True)
def by_device() -> Any:
    yield
    choose(None)


def twice_and_sum(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    x.mul_(factor)
    return x + 1, x.sum()


def test_a_cpu_runs_bodies_as_they_stand_unless_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, tensors: made.append(tensors) or graph)
    body, x = Body(twice_and_sum), torch.ones(3, dtype=torch.float64)
    assert_close(body(x, 2.0), (torch.full_like(x, 3.0), torch.tensor(6.0, dtype=torch.float64)))
    assert not made
    choose(True)
    assert_close(body(x, 2.0), (torch.full_like(x, 5.0), torch.tensor(12.0, dtype=torch.float64)))
    assert_close(x, torch.full_like(x, 4.0))  # written in place, once
    body(x, 2.0)
    assert len(made) == 1
    for other in (torch.ones(4, dtype=torch.float64), torch.ones(3), torch.ones(6, dtype=torch.float64)[::2]):
        body(other, 2.0)
    body(x, 0.5)
    assert len(made) == 5  # another size, dtype, stride, constant
    assert_close(x, torch.full_like(x, 4.0))


def test_bodies_are_compiled_again_behind_what_runs_them_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, tensors: made.append(tensors) or graph)
    choose(True)
    body, x = Body(lambda x: x + 1), torch.ones(3)
    with uncompiled():
        assert_close(body(x), x + 1)
    assert not made
    assert_close(body(x), x + 1)  # one result, as the function gives it
    assert made


def test_without_a_compiler_one_line_says_so_and_everything_runs_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    choose(True)
    x = torch.ones(3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            Body(twice_and_sum)(x, 2.0)
    assert_close(x, torch.full_like(x, 4.0))
    (record,) = [record for record in caplog.records if record.name.startswith("hethub")]
    assert "Inductor does not work here" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert not bodies.compiles_on(x.device)


def test_the_line_is_the_first_that_says_anything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("\n  no compiler\nfound")

    monkeypatch.setattr(torch._inductor, "compile", fail)
    choose(True)
    Body(twice_and_sum)(torch.ones(3), 2.0)
    assert caplog.messages[-1].endswith(": no compiler")


ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")


class _Counted(Exception):
    """Inductor has fused what it fuses; nothing needs to be generated."""


def kernels(monkeypatch: pytest.MonkeyPatch, body: Body, *args: Any) -> list[int]:
    """The bytes that each kernel of a body moves when Inductor fuses for Triton, which devices of both makers run."""
    found: list[int] = []

    def count(scheduler: Scheduler) -> None:
        moved = [node.get_read_write_buffers_sizes() for node in scheduler.nodes]
        found.extend(size for size in moved if size)  # of a view: none
        raise _Counted

    with monkeypatch.context() as patch, config.patch(cpu_backend="triton", fx_graph_cache=False):
        patch.setattr(Scheduler, "codegen", count)
        with pytest.raises(Exception, match="_Counted"):
            torch._inductor.compile(*traced(body.function, args))
    return found


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


class Launches(TorchDispatchMode):
    """Counts what a device would launch: each operation that is no view, and of a body the kernels it is fused to."""

    def __init__(self, kernels_of: Callable[..., list[int]]) -> None:
        super().__init__()
        self.kernels_of, self.launched = kernels_of, Counter[str]()
        self.moved, self.least = 0, 0  # bytes that bodies move, and that one kernel each would

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in function._schema.returns)
        name = function._schema.name.removeprefix("aten::")
        if not is_view and not name.startswith("empty") and name not in ("promote_types", "_unsafe_view"):
            self.launched[name] += 1
        return function(*args, **(kwargs or {}))

    def run(self, body: Body, *args: Any) -> Any:
        with _disable_current_modes():
            sizes = self.kernels_of(body, *args)
            found = body.function(*args)
            results = found if isinstance(found, tuple) else (found,)
            self.least += sum(tensor.nbytes for tensor in (*args, *results) if isinstance(tensor, Tensor))
        self.launched["fused"] += len(sizes)
        self.moved += sum(sizes)
        return found


def test_a_layer_launches_at_most_40_kernels_forward_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any microbatch but the first, whose gradients are stored and not added. In fp32, where a weight's gradient is
    one matrix product everywhere; what half precision does instead, below."""
    launches = Launches(lambda body, *args: kernels(monkeypatch, body, *args))
    monkeypatch.setattr(Body, "__call__", lambda body, *args: launches.run(body, *args))
    model = ModelSpec(name="m", layers=1, hidden=128, heads=4, kv_heads=2, ffn=352, vocab=64, max_seq_len=64)

    def use(name: str) -> Parameter:
        (info,) = [tensor for tensor in model_tensors(model) if tensor.name == name]
        own = Parameter(name, torch.zeros(info.stored_shape), torch.zeros(info.stored_shape))
        own.uses = 1
        own.start_step(2, lambda done: None)
        own.close()
        return own

    layer = llama_layer(model, 0, use, TensorGroup(None))
    tables = rope.rope_table(model, 64, torch.float32, torch.device("cpu"))
    tokens = layers.TokenLayout(batch=2, seq_len=64, cos=tables[0], sin=tables[1])
    x, grad = torch.zeros(128, model.hidden, requires_grad=True), torch.ones(128, model.hidden)
    with launches:
        torch.autograd.backward(layer(x, tokens), grad)
    # Sums over many rows for few columns take a device two kernels: one more for each norm's weight.
    assert launches.launched.total() + 2 <= 40, launches.launched
    assert sum(launches.launched[name] for name in ATTENTION) == 2
    assert launches.launched["mm"] + launches.launched["addmm"] + launches.launched["addmm_"] == 3 * 7
    assert launches.moved <= 1.3 * launches.least


def test_the_head_moves_its_logits_four_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16: read for the largest and the sum, read for the gradient and written over. (60 bytes a logit before.)"""
    tokens, vocab = 512, 2048
    logits, targets, each = half(tokens, vocab), torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens)
    statistics = kernels(monkeypatch, loss._statistics, logits, targets, None, 0)
    gradient = kernels(monkeypatch, loss._to_gradient, logits, targets, each, each, torch.ones(()), 0)
    assert len(statistics) == 1
    assert len(gradient) == 2  # of them one gathers a logit for each token: counted as if it read all
    assert sum(statistics) + sum(gradient) <= 4.1 * logits.nbytes


def test_gradients_of_half_precision_are_one_product_that_writes_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a product can: torch's meta device answers as an accelerator does, but has no numbers to be looked at. A CPU
    cannot, and adds in two steps."""
    monkeypatch.setattr(torch, "equal", lambda found, right: True)
    for device, expected in (("meta", ["mm", "addmm"]), ("cpu", ["mm", "copy_", "mm", "add_"])):
        left, right = (half(8, 4).to(device), half(4, 6).to(device))
        own = Parameter("w", half(8, 6).to(device), torch.zeros(8, 6, device=device))
        own.uses = 1
        own.add_product(left, right)  # asks the device what it can, once
        own.start_step(2, lambda done: None)
        launches = Launches(lambda body: [])
        with launches:
            own.add_product(left, right)
            own.add_product(left, right)
        assert sorted(launches.launched.elements()) == sorted(expected)
