"""A training step as one graph: operators of forward and backward in the order they run, and the tensors between."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

import torch

VIEW_KEYS = ("aten.view.default", "aten._unsafe_view.default")


@dataclass(frozen=True)
class Ref:
    """Stands in an operator's arguments for its input number `index`."""

    index: int


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of the step on one device: what every rank's pieces make up together."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One call of an aten operator; tensors are numbers into the graph's list."""

    name: str
    key: str  # `aten.mm.default`
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]  # None: the operator was told not to make this one
    has_many_outputs: bool
    module: (
        str  # the user's module that it belongs to; of a backward operator, the one whose values or parameters it reads
    )
    is_forward: bool

    @property
    def target(self) -> Any:
        """The operator itself; plain data keep its name only, so that graphs travel between processes."""
        return overload(self.key)

    @property
    def made(self) -> tuple[int, ...]:
        """The tensors that it makes."""
        return tuple(output for output in self.outputs if output is not None)

    def call(self, tensors: list[torch.Tensor], args: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """The operator's outputs for these inputs, one entry per output."""
        given = replace_refs(self.args if args is None else args, lambda ref: tensors[ref.index])
        # A piece that was moved may lie in memory in another order than on one device, where a view sufficed.
        target = overload("aten.reshape.default") if self.key in VIEW_KEYS else self.target
        result = target(*given, **replace_refs(dict(self.kwargs), lambda ref: tensors[ref.index]))
        return tuple(result) if self.has_many_outputs else (result,)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Forward and backward of a module that returns a loss."""

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    parameters: Mapping[str, int]  # by the module's own names; those that want a gradient
    buffers: Mapping[str, int]  # buffers, frozen parameters and constants
    constants: Mapping[str, torch.Tensor]  # the values of those buffers that are no part of the module
    inputs: tuple[int, ...]
    loss: int
    gradients: Mapping[str, int | None]  # None: the loss does not depend on the parameter

    @cached_property
    def producers(self) -> dict[int, int]:
        """By tensor, the operator that makes it."""
        return {t: number for number, operator in enumerate(self.operators) for t in operator.made}

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """By tensor, the operators that read it, in order."""
        found: dict[int, list[int]] = {}
        for number, operator in enumerate(self.operators):
            for tensor in dict.fromkeys(operator.inputs):
                found.setdefault(tensor, []).append(number)
        return found

    @cached_property
    def parameter_of_gradient(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, tensor in self.gradients.items():
            if tensor is not None:
                found.setdefault(tensor, []).append(name)
        return found

    def shapes_in(self, operator: Operator) -> list[tuple[int, ...]]:
        return [self.tensors[t].shape for t in operator.inputs]

    def shapes_out(self, operator: Operator) -> list[tuple[int, ...]]:
        return [self.tensors[t].shape for t in operator.made]


def schema_of(target: Any) -> Any:
    """What torch declares of an operator: its arguments, by name; None of what is no single operator."""
    return getattr(target, "_schema", None)


@cache
def overload(key: str) -> Any:
    """The operator of torch called `key`."""
    found: Any = torch.ops
    for part in key.split("."):
        found = getattr(found, part)
    return found


def replace_refs(value: Any, with_what: Callable[[Ref], Any]) -> Any:
    """`value` with every Ref in its lists, tuples and mappings replaced."""
    if isinstance(value, Ref):
        return with_what(value)
    if isinstance(value, (list, tuple)):
        return type(value)(replace_refs(item, with_what) for item in value)
    if isinstance(value, dict):
        return {key: replace_refs(item, with_what) for key, item in value.items()}
    return value
