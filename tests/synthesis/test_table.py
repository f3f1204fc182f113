"""Every entry of the table, checked with numbers on torch's own sample inputs of the operator.

The samples have many shapes, most with dimensions of one size, which a rule that confuses them gets wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hethub.synthesis.graph import Graph, Operator, Ref, Tensor
from hethub.synthesis.pieces import OwnCall
from hethub.synthesis.rules import CARRIED_AS, PARTIAL, WHOLE, Rule, Rules
from hethub.synthesis.table import LABELS
from tests.synthesis.test_rules import check_rule

# Functions of torch whose forward or backward consists of the table's operators.
NAMES = {
    "addmm", "all", "amax", "amin", "any", "argmax", "argmin", "baddbmm", "bmm", "cat", "constant_pad_nd",
    "cumsum",
    "expand", "fill", "flip", "gather", "kthvalue", "log_softmax", "logsumexp", "masked_fill", "max", "min",
    "mm", "mv", "narrow", "new_full", "nn.functional.adaptive_avg_pool2d", "nn.functional.avg_pool2d",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose2d", "nn.functional.elu",
    "nn.functional.embedding", "nn.functional.glu", "nn.functional.group_norm", "nn.functional.hardshrink", "nn.functional.hardsigmoid",
    "nn.functional.hardswish", "nn.functional.hardtanh", "nn.functional.layer_norm", "nn.functional.leaky_relu",
    "nn.functional.logsigmoid", "nn.functional.max_pool2d", "nn.functional.mish", "nn.functional.nll_loss",
    "nn.functional.prelu", "nn.functional.softplus", "nn.functional.softshrink", "norm", "permute", "roll",
    "scatter", "scatter_add", "select", "softmax", "sort", "split", "split_with_sizes", "squeeze", "stack", "std",
    "sum", "t", "topk", "torch.ops.aten._safe_softmax.default", "transpose", "tril", "triu", "unbind",
    "unsqueeze", "var",
}  # fmt: skip
SAMPLES, CALLS = 12, 10  # of a function; of an operator, on unlike tensors


class Calls(TorchDispatchMode):
    """Calls of operators that may be cut, each as a graph of that one with the values of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[object, tuple[Graph, dict[int, torch.Tensor]]] = {}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function).removeprefix("aten.")
        if (name in LABELS or torch.Tag.pointwise in function.tags) and not function._schema.is_mutable:
            self._keep(str(function), args, kwargs or {}, result)
        return result

    def _keep(self, key: str, args: Any, kwargs: Any, result: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = list(result) if isinstance(result, (list, tuple)) else [result]
        values = [None if value is None else value.detach().clone() for value in (*given, *made)]
        place = iter(range(len(given)))
        own, named = tree_map_only(torch.Tensor, lambda _: Ref(next(place)), (args, kwargs))
        kind = key, str((own, named)), str([None if v is None else (v.shape, v.dtype) for v in values])
        if kind in self.found or self.counts[key] == CALLS:
            return
        self.counts[key] += 1
        tensors = [
            Tensor(name="", shape=() if v is None else tuple(v.shape), dtype=torch.bool if v is None else v.dtype)
            for v in values
        ]
        operator = Operator(
            name=key, key=key, args=own, kwargs=named, inputs=tuple(range(len(given))),
            outputs=tuple(None if value is None else len(given) + n for n, value in enumerate(made)),
            has_many_outputs=isinstance(result, (list, tuple)), module="", is_forward=True,
        )  # fmt: skip
        graph = Graph(
            tensors=tuple(tensors), operators=(operator,), parameters={}, buffers={}, constants={}, inputs=(), loss=0,
            gradients={}, updates={}, samples=1, default_dtype=torch.float32,
        )  # fmt: skip
        self.found[kind] = graph, {n: value for n, value in enumerate(values) if value is not None}


def samples() -> Iterator[Callable[[], Any]]:
    # Here, since it takes a second, which every process that collects tests would spend.
    from torch.testing._internal.common_methods_invocations import op_db

    for function in (f for f in op_db if f.name in NAMES and torch.float64 in f.dtypes):
        given = function.sample_inputs("cpu", torch.float64, requires_grad=function.supports_autograd)
        for one in islice(given, SAMPLES):
            yield lambda f=function, s=one: f(s.input, *s.args, **s.kwargs)  # type: ignore[misc]


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def others() -> Iterator[Callable[[], Any]]:
    """What torch's samples lack: masks as long as there are samples or heads, shifts, gradients by frequency, sums of whole
    numbers."""
    for mask in (double(4, 4), double(1, 1, 4, 4), double(4, 1, 4, 4), double(4, 4, 4, 4), None):
        mask = mask if mask is None else mask.detach()
        yield lambda m=mask: F.scaled_dot_product_attention(
            double(4, 4, 4, 8), double(4, 4, 4, 8), double(4, 4, 4, 8), m
        )  # type: ignore[misc]
    yield lambda: F.pad(double(4, 4, 4), (0, 0, 1, -1))
    yield lambda: F.embedding(torch.randint(5, (4, 4)), double(5, 4), scale_grad_by_freq=True)
    yield lambda: double(4, 4).flip(1) + double(4, 4).flip(-2)
    for dtype in (torch.int64, torch.int16):
        yield lambda d=dtype: double(4, 4).detach().sum(0, dtype=d)  # type: ignore[misc]
    yield lambda: torch.ops.aten.copy.default(double(4, 4).detach(), double(1, 4).detach())


@pytest.fixture(scope="module")
def calls() -> Calls:
    torch.manual_seed(0)
    found = Calls()
    for call in (*others(), *samples()):
        with found:
            results = [r for r in tree_leaves(call()) if isinstance(r, torch.Tensor) and r.requires_grad]
            if results:
                results[0].sum().backward()
    return found


def test_the_samples_know_every_entry(calls: Calls) -> None:
    assert not LABELS.keys() - {key.removeprefix("aten.") for key in calls.counts}


@torch.no_grad()
def test_every_rule_is_right_on_torchs_own_samples(calls: Calls) -> None:
    count = 0
    for graph, values in calls.found.values():
        (operator,) = graph.operators
        told = f"{operator.key} {operator.args} {[tuple(value.shape) for value in values.values()]}"
        try:
            rules = Rules(graph)
            for rule in rules.of[0][1:]:
                told = f"{told}: {rule}"
                summed = [t for t, state in zip(operator.made, rule.outputs, strict=True) if state == PARTIAL]
                assert not any(graph.tensors[tensor].dtype in CARRIED_AS for tensor in summed), "sums that Gloo refuses"
                count += check_rule(graph, rules, values, 0, rule)
        except Exception as error:
            raise AssertionError(f"{told}: {error}") from error
    assert count > 500


@torch.no_grad()
def test_no_operator_takes_an_order_of_memory_for_granted(calls: Calls) -> None:
    """What comes out of a collective lies in another order than on one device."""
    for graph, values in calls.found.values():
        (operator,) = graph.operators
        given = [values[tensor] for tensor in operator.inputs]
        turned = [value.mT.contiguous().mT if value.dim() > 1 else value for value in given]
        made = [values[tensor] for tensor in operator.made]
        rule = Rule((WHOLE,) * len(given), (WHOLE,) * len(made))
        found = OwnCall(operator, rule, [v.shape for v in made], [v.dtype for v in made], 1, 1)(turned)
        for one, other in zip(found, made, strict=True):
            torch.testing.assert_close(one, other, msg=lambda m, o=operator: f"{o.key} {o.args}: {m}")
