"""What a trace takes for a constant and is none is refused, or captured; the module stays as it was."""

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hethub.spec.errors import BadInput
from hethub.synthesis.capture.trace import trace
from hethub.synthesis.rules import Rules


class Net(nn.Module):
    """A layer, and a loss of what `change` makes of its output."""

    def __init__(self, kind: type[nn.Module] = nn.Identity, **options: Any) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(8, 8), kind(**options)

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.inner(self.layer(values)), target)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.deep, values, use_reentrant=False)


class Hidden(nn.Module):
    """Its weight is known by another way too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.tied = [self.layer.weight]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values) @ self.tied[0]


class Rectified(nn.BatchNorm1d):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(values))


class Schedule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return values if self.calls < 1000 else values * 0.5


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mean = values.detach().mean(0)
        self.seen = mean if self.seen is None else 0.9 * self.seen + 0.1 * mean
        return values - self.seen


class Reset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.steps.data = self.steps + 1
        return values + self.steps


class Layerdrop(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values if random.random() > 1e-6 else values * 0


class NumpyNoise(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * (1.0 + 1e-12 * np.random.rand())


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(8, dtype=torch.float64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(values.detach().mean(0))
        return values - self.average


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8, sparse=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.table(values.argmax(-1) % 4)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, 0.0), 1, enable_nested_tensor=False)
        self.register_buffer("mask", torch.zeros(6, 6))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.encoder(values[:6, None], mask=self.mask[: values.shape[0], : values.shape[0]])[:, 0]


def batch() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(6, 8, dtype=torch.float64, generator=draw) for _ in range(2))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Hidden, ["'inner.layer.weight'", "past the module's attributes"]),
        (Schedule, ["'inner.calls'", "from call to call"]),
        (Average, ["cannot be captured exactly", "without a state of its own"]),
        (Reset, ["'inner.steps'", "from call to call"]),
        (Layerdrop, ["Python's or numpy's random numbers"]),
        (NumpyNoise, ["Python's or numpy's random numbers"]),
        (InPlace, ["writes in place", "register it as a buffer"]),
        (Sparse, ["inner.table.weight", "sparse=False"]),
        (Encoder, ["is_causal=True or False"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_no_constant_is_refused(kind: type[nn.Module], words: list[str]) -> None:
    module = Net(kind).double()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(BadInput) as refusal:
        trace(module, batch())
    for word in words:
        assert word in str(refusal.value)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert getattr(module.inner, "calls", 0) == 0
    assert getattr(module.inner, "seen", None) is None


@pytest.mark.parametrize("kind", [Checkpointed, Rectified])
def test_what_can_be_captured_is_proved_equal(kind: type[nn.Module]) -> None:
    """Of weights that have moved: a checkpoint's second forward once took the initial ones for constants."""
    module = Net(kind, **({"num_features": 8} if kind is Rectified else {})).double()
    module.inner.eval() if kind is Rectified else None
    graph = trace(module, batch())
    assert not graph.constants
    assert len([o for o in graph.operators if o.key == "aten.relu.default"]) == (kind is Rectified)


def test_a_write_to_one_of_several_pieces_is_captured() -> None:
    """torch's GRU cell writes to pieces of what it has split; it was refused with an AttributeError of ours."""
    graph = trace(Net(nn.GRUCell, input_size=8, hidden_size=8).double(), batch())
    assert any(name.endswith("weight_hh") for name in graph.parameters)


class Shared(nn.Module):
    """One layer in three places, as ALBERT has it, with a frozen weight in it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8).requires_grad_(False))
        self.layers = nn.Sequential(layer, layer, layer)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(values)
        return out


def test_a_layer_in_several_places_is_one() -> None:
    """It was refused, as one that changes its own weight."""
    module = Net(Shared).double()
    before = dict(module.named_parameters(remove_duplicate=False))
    graph = trace(module, batch())
    assert [name for name in graph.parameters if "inner" in name] == [
        "inner.layers.0.0.weight",
        "inner.layers.0.0.bias",
    ]
    assert list(graph.buffers) == ["inner.layers.0.2.weight", "inner.layers.0.2.bias"]
    assert all(value is before[name] for name, value in module.named_parameters(remove_duplicate=False))


def test_a_hook_on_a_gradient_is_refused() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        module = Net().double()
        getattr(module.layer.weight, register)(lambda gradient: None)
        with pytest.raises(BadInput, match=r"'layer\.weight' has a hook"):
            trace(module, batch())


def test_an_unknown_fault_of_a_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a rule of ours for means that is wrong."""
    from hethub.synthesis.capture import trace as tracing

    wrong = {**tracing.DECOMPOSITIONS, torch.ops.aten.relu.default: lambda values: values.clamp(min=0.1)}
    monkeypatch.setattr(tracing, "DECOMPOSITIONS", wrong)
    with pytest.raises(BadInput, match="cannot be captured exactly"):
        trace(Net(nn.ReLU).double(), batch())


class Kept(nn.Module):
    """A plain tensor that is read twice, and one that is made in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.cache = torch.ones(8, dtype=torch.float64) * 2, None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.arange(8, dtype=values.dtype)
        return values * self.scale + self.scale.sin() + self.cache


def test_a_plain_tensor_may_be_read_twice() -> None:
    module = Net(Kept).double()
    graph = trace(module, batch())
    assert graph.constants
    assert module.inner.cache is None
    made = {tensor for operator in graph.operators for tensor in operator.made}
    made |= {*graph.inputs, *graph.parameters.values(), *graph.buffers.values()}
    assert made == set(range(len(graph.tensors)))


def test_a_half_module_sums_its_means_in_fp32() -> None:
    module = Net().half()
    values = torch.zeros(64, 8, dtype=torch.half), torch.full((64, 8), -200.0, dtype=torch.half)
    graph = trace(module, values)  # of 512 squares of 40,000
    assert {graph.tensors[o.made[0]].dtype for o in graph.operators if o.key == "aten.sum.default"} == {torch.float32}


def test_the_number_of_samples_is_free_where_torch_would_choose_a_kernel_by_it() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 8))
    whole = Net(nn.Identity)
    whole.layer = module  # type: ignore[assignment]
    graph = trace(whole, (torch.randn(16, 3, 8, 8), torch.randn(16, 8)))
    assert not graph.guards
    assert graph.at(5).samples == 5


class Leaving(nn.Module):
    """Python's way to end a program, which is no end of ours."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        raise SystemExit(0)


def test_what_is_no_module_or_no_batch_is_said() -> None:
    with pytest.raises(BadInput, match=r"cannot be traced.*SystemExit: 0"):
        trace(Net(Leaving), batch())
    with pytest.raises(BadInput, match=r"before torch\.compile"):
        trace(torch.compile(Net()), batch())
    with pytest.raises(BadInput, match=r"layer is compiled.*before torch\.compile"):
        trace(nn.Sequential(OrderedDict(layer=torch.jit.script(nn.Linear(8, 8)))), batch()[:1])
    with pytest.raises(BadInput, match="pass a tuple"):
        trace(Net(), batch()[0])  # type: ignore[arg-type]
    module = Embedded(nn.Embedding(4, 8))
    with pytest.raises(BadInput, match="cannot be run on its own example inputs"):
        trace(module, (torch.full((6,), 9),))


class Scattered(nn.Module):
    """A graph's edges as a sparse matrix."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(8, 4), kept
        edges = torch.eye(6).to_sparse()
        if kept == "buffer":
            self.register_buffer("edges", edges)
        elif kept == "attribute":
            self.edges = edges

    def forward(self, values: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        if self.kept == "nowhere":
            edges = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 2]]), torch.ones(2), (6, 6))
        return torch.sparse.mm(edges if self.kept in ("input", "nowhere") else self.edges, self.layer(values)).sum()


@pytest.mark.parametrize(
    ("kept", "what"),
    [
        ("buffer", "'edges' is sparse"),
        ("attribute", "a tensor of 'the module itself' is sparse"),
        ("nowhere", "a tensor of 'the module itself' is sparse"),
        ("input", "'input 1' is sparse"),
    ],
)
def test_sparse_tensors_are_refused(kept: str, what: str) -> None:
    edges = torch.eye(6)
    with pytest.raises(BadInput, match=f"{what}.*index_add"):
        trace(Scattered(kept), (torch.randn(6, 8), edges.to_sparse() if kept == "input" else edges))


class Embedded(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).square().mean()


def test_tensors_without_values_are_traced_and_not_compared() -> None:
    with torch.device("meta"):
        module = Net(Schedule)
    graph = trace(module, tuple(value.to("meta", torch.float32) for value in batch()))
    assert not Rules(graph).unknown


def test_a_module_without_room_for_the_whole_of_it_is_traced_with_a_warning(monkeypatch, caplog):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("hethub.synthesis.capture.proof._prove", full)
    assert trace(Net(), (torch.randn(4, 8), torch.randn(4, 8))).operators
    (warning,) = caplog.records
    assert "no room for the whole of it" in warning.getMessage()
