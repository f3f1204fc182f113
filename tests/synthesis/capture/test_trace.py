"""The traced graph computes what the module computes; what cannot be cut is refused with its operator and module."""

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from hethub.spec.errors import BadInput
from hethub.synthesis.capture.trace import trace
from tests.synthesis.models import build


class Wrapped(nn.Module):
    """A module with one layer before it and a mean as its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(values)).mean()


class Branch(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2 if values.sum() > 0 else values


class Noise(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.rand_like(values)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return values * self.steps


class Overwrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values.mul_(2)
        return self.first(values).sum()


class Marked(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values[0] = 1.0
        return values


class Passed(nn.Module):
    """Its inner layer is given the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Marked(), nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(values)).mean()


class Picked(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values[values > 0]


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.last = values[0].detach()
        return values


class Leaky(nn.Module):
    """Draws by itself, from what its inner layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.rrelu(self.layer(values), training=True).mean()


class Bounded(nn.Module):
    """Torch shortens the rows of its table where it looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, max_norm=1.0)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.table(values.argmax(-1))


class Cond(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cond(values.sum() > 0, lambda v: v * 2, lambda v: v - 1, (values,))


class Windows(nn.Module):
    """Reads so many places in memory, of what is taken of the values."""

    def __init__(self, taken: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.taken = taken

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.taken(values).as_strided((3, 2, 2), (4, 1, 1))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Wrapped(Windows(torch.t)), ["'inner' reads", "as_strided", ".contiguous()"]),
        (Wrapped(Windows(lambda values: values[1:])), ["'inner' reads", "as_strided", ".contiguous()"]),
        (Wrapped(nn.Dropout(0.5)), ["inner", "random", "dropout"]),
        (Wrapped(nn.BatchNorm1d(4)), ["inner", "BatchNorm", "convert_sync_batchnorm", ".eval()"]),
        (
            Wrapped(nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True))),
            ["'inner.1' is InstanceNorm", "track_running_stats=False", ".eval()"],
        ),
        (Wrapped(nn.SyncBatchNorm(4)), ["'inner'", "fewer than two values", "larger batch"]),
        (Wrapped(Noise()), ["inner", "random", "aten.rand_like"]),
        (Wrapped(Branch()), ["depend", "torch.where", "test_trace.py", "in forward"]),
        (Wrapped(Picked()), ["depend", "aten.nonzero", "test_trace.py", "in forward"]),
        (Wrapped(Counter()), ["inner", "steps"]),
        (Wrapped(Replaced()), ["inner", "last"]),
        (Wrapped(Cond()), ["inner", "control flow"]),
        (Overwrite(), ["the module itself", "in place", "aten.mul_", "values"]),
        (Passed(), ["'inner'", "in place", "aten.fill_", "values"]),
        (Leaky(), ["'the module itself' draws", "aten.rrelu", "an input of forward"]),
        (Wrapped(Bounded()), ["'inner.table' changes", "'inner.table.weight'", "max_norm"]),
        (Wrapped(nn.LazyLinear(4)), ["'inner.weight' has no shape yet", "call the module once"]),
    ],
    ids=[
        "memory in another order",
        "memory of a part",
        "dropout",
        "batch norm",
        "instance norm",
        "batch norm of one sample",
        "noise",
        "branch",
        "mask",
        "buffer",
        "another buffer",
        "cond",
        "input",
        "piece of an input",
        "noise of the outermost",
        "bounded table",
        "lazy layer",
    ],
)
def test_what_cannot_be_cut_is_refused(module: nn.Module, words: list[str]) -> None:
    samples = 1 if "fewer than two values" in words else 6
    with pytest.raises(BadInput) as refusal:
        trace(module, (torch.randn(samples, 4),))
    for word in words:
        assert word in str(refusal.value)


def test_inputs_that_do_not_fit_the_module_are_told_in_one_paragraph(caplog: pytest.LogCaptureFixture) -> None:
    """torch's log of what it refused came before it, two hundred lines of tracebacks."""
    logging.getLogger("torch").addHandler(caplog.handler)
    with pytest.raises(
        BadInput,
        match=r"Wrapped cannot be traced with torch\.\w+ of \[6, 5\]: .*\[6, 5\] X \[4, 4\].*self\.first\(values\)",
    ):
        trace(Wrapped(nn.Identity()), (torch.randn(6, 5),))
    logging.getLogger("torch").removeHandler(caplog.handler)
    assert not caplog.records


def test_a_module_without_a_loss_is_refused() -> None:
    with pytest.raises(BadInput, match=r"loss alone.*Linear returned a tensor of 2 dimensions"):
        trace(nn.Linear(4, 4), (torch.randn(6, 4),))
    with pytest.raises(BadInput, match=r"loss alone.*Named returned dict; wrap it"):
        trace(Named(), (torch.randn(6, 4),))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(values).mean()}


class Marks(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("doubled"):
            return values * 2


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found = torch.fft.rfft(values) * torch.view_as_complex(self.filter)
        return torch.fft.irfft(found, n=values.shape[-1])


class Turned(nn.Module):
    """Torch's grid of an affine map takes the number of samples as it is."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        turns = torch.stack([values[:, :3], values[:, 1:]], 1)
        grid = nn.functional.affine_grid(turns, [values.shape[0], 1, 3, 3], align_corners=False)
        return nn.functional.grid_sample(values.view(-1, 1, 2, 2), grid, align_corners=False)


class Inverted(nn.Module):
    """Torch then looks whether the matrices had an inverse, by an operator that makes nothing."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(torch.eye(4, dtype=values.dtype) + values[:, :, None] * values[:, None])


@pytest.mark.parametrize(
    "inner",
    [Marks(), Spectrum(), Turned(), Inverted(), Windows(torch.square)],
    ids=["marks", "spectrum", "turned", "inverted", "windows"],
)
def test_what_torch_records_otherwise_than_it_computes_is_traced(inner: nn.Module) -> None:
    """And proved equal by the trace itself."""
    graph = trace(Wrapped(inner).double(), (torch.randn(6, 4, dtype=torch.float64),))
    assert not any(operator.key.startswith("profiler") for operator in graph.operators)
    if isinstance(inner, (Turned, Windows)):
        with pytest.raises(BadInput, match="trace it with example inputs of 5"):
            graph.at(5)
    else:
        assert graph.at(5).samples == 5


def test_batch_norm_that_keeps_its_statistics_is_traced() -> None:
    graph = trace(Wrapped(nn.BatchNorm1d(4).eval()), (torch.randn(6, 4),))
    assert "inner.running_mean" in graph.buffers


def test_tracing_leaves_the_module_as_it_was() -> None:
    module = nn.SyncBatchNorm.convert_sync_batchnorm(Wrapped(nn.BatchNorm1d(4)))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    graph = trace(module, (torch.randn(6, 4),))
    assert list(graph.updates) == ["inner.num_batches_tracked", "inner.running_mean", "inner.running_var"]
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert not any(inner._forward_hooks or inner._forward_pre_hooks for inner in module.modules())
    assert "forward" not in module.inner.__dict__


class Padded(nn.Module):
    """Its forward does otherwise with more than eight samples, and its loss speaks of their number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result = self.layer(values).square().sum()
        return result / values.shape[0] if values.shape[0] <= 8 else result


def test_a_number_of_samples_that_the_module_treats_otherwise_is_refused() -> None:
    graph = trace(Padded(), (torch.randn(6, 4),))
    assert graph.at(8).tensors[graph.inputs[0]].shape == (8, 4)
    for count in (9, 1):
        with pytest.raises(BadInput, match=f"does not hold for {count}"):
            graph.at(count)
    fixed = trace(Wrapped(nn.Unflatten(0, (2, 3))), (torch.randn(6, 4),))
    with pytest.raises(BadInput, match="trace it with example inputs of 8"):
        fixed.at(8)


@pytest.mark.parametrize("samples", [6, 3])
def test_the_graph_computes_the_modules_loss_and_gradients(samples: int) -> None:
    """Of another number of samples too, without tracing again."""
    module, inputs = build("bert")
    graph = trace(module, inputs).at(samples)
    inputs = tuple(value[:samples] for value in inputs)
    named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())} | dict(
        graph.constants
    )
    values = {t: named[n].detach() for n, t in (*graph.parameters.items(), *graph.buffers.items())}
    values.update(zip(graph.inputs, inputs, strict=True))
    for operator in graph.operators:
        results = operator.call([values[t] for t in operator.inputs])
        values.update({t: r for t, r in zip(operator.outputs, results, strict=True) if t is not None})
    loss = module(*inputs)
    loss.backward()
    torch.testing.assert_close(values[graph.loss], loss.detach(), rtol=1e-12, atol=0)
    assert len(graph.parameters) == len(list(module.parameters()))  # the tied head is one parameter
    for name, tensor in graph.gradients.items():
        assert tensor is not None
        torch.testing.assert_close(values[tensor], named[name].grad, rtol=1e-10, atol=1e-14)


def test_operators_carry_the_names_of_the_users_modules() -> None:
    module, inputs = build("vit")
    graph = trace(module, inputs)
    products = [o for o in graph.operators if "addmm" in o.key or "attention" in o.key]
    assert {o.module for o in products} == {
        *(f"encoder.layers.{n}.{part}" for n in (0, 1) for part in ("self_attn", "linear1", "linear2")),
        "head",
    }
    assert {o.module for o in graph.operators if not o.is_forward} >= {"encoder.layers.1.linear2", "patches"}
