"""A training step as one graph: operators of forward and backward in the order they run, and the tensors between."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from hethub.spec.errors import BadInput

VIEW_KEYS = ("aten.view.default", "aten._unsafe_view.default")
SHORTEST = 8  # operators; shorter repetitions save nothing


@dataclass(frozen=True)
class Ref:
    """Stands in an operator's arguments for its input number `index`."""

    index: int


@dataclass(frozen=True)
class BySamples:
    """Stands in a template's shapes and arguments for a number that follows from the number of samples."""

    formula: Any  # sympy's, of one symbol
    number: type[int] | type[float]

    def of(self, samples: int) -> int | float:
        return self.number(_value(self.formula, samples))


@cache
def _value(formula: Any, samples: int) -> Any:
    return formula.subs(dict.fromkeys(formula.free_symbols, samples))


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensor:
    """A tensor of the step on one device: what every rank's pieces make up together."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """One call of an aten operator; tensors are numbers into the graph's list."""

    name: str
    key: str  # `aten.mm.default`
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]  # None: the operator was told not to make this one
    has_many_outputs: bool
    # The user's module that it belongs to; of a backward operator, the one whose values or parameters it reads.
    module: str
    is_forward: bool

    @property
    def target(self) -> Any:
        """The operator itself; plain data keep its name only, so that graphs travel between processes."""
        return overload(self.key)

    @cached_property
    def made(self) -> tuple[int, ...]:
        """The tensors that it makes."""
        return tuple(output for output in self.outputs if output is not None)

    def call(self, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        """The operator's outputs for these inputs, one entry per output."""
        return self.caller(self.args)(tensors)

    def caller(self, args: Sequence[Any]) -> Callable[[list[torch.Tensor]], tuple[Any, ...]]:
        """`call` with these arguments, of which it has settled where inputs stand: steps call an operator again and again."""
        # A piece that was moved may lie in memory in another order than on one device, where a view sufficed.
        target = overload("aten.reshape.default") if self.key in VIEW_KEYS else self.target
        alone = [(place, value.index) for place, value in enumerate(args) if isinstance(value, Ref)]
        within = [
            (place, value) for place, value in enumerate(args) if isinstance(value, (list, tuple)) and _refs(value)
        ]
        named, has_many = bool(_refs(self.kwargs)), self.has_many_outputs

        def call(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
            given, kwargs = list(args), self.kwargs
            for place, index in alone:
                given[place] = tensors[index]
            for place, value in within:
                given[place] = replaced(value, Ref, lambda ref: tensors[ref.index])
            if named:
                kwargs = replaced(kwargs, Ref, lambda ref: tensors[ref.index])
            result = target(*given, **kwargs)
            return tuple(result) if has_many else (result,)

        return call


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
    updates: Mapping[str, int]  # by the buffers that a step changes, what they hold after it
    samples: int  # that the shapes are those of
    default_dtype: torch.dtype  # torch's own while it was traced: the type of tensors made of numbers
    guards: tuple[Any, ...] = ()  # formulas that other numbers of samples must meet as well
    template: "Graph | None" = None  # the same with BySamples in its shapes and arguments

    def at(self, samples: int) -> "Graph":
        """The graph for another number of samples. Raises BadInput where the module does otherwise with so many."""
        template = self.template
        assert template is not None
        if samples != self.samples:
            self._check(template, samples)

        def told(value: Any) -> Any:
            return replaced(value, BySamples, lambda number: number.of(samples))

        return replace(
            template,
            tensors=tuple(replace(t, shape=told(t.shape)) for t in template.tensors),
            operators=tuple(replace(o, args=told(o.args), kwargs=told(o.kwargs)) for o in template.operators),
            samples=samples,
            template=template,
        )

    def _check(self, template: "Graph", samples: int) -> None:
        why = next((str(guard) for guard in self.guards if not _value(guard, samples)), None)
        if samples < 2:
            why = "one sample may be taken for a dimension that broadcasts"
        if not any(is_by_samples(template.tensors[tensor]) for tensor in self.inputs):
            why = "it speaks of that number itself"
        if why:
            raise BadInput(
                f"the module was traced with {self.samples} samples, which does not hold for {samples} ({why}); trace it with"
                f" example inputs of {samples}."
            )

    def samples_in(self, inputs: Sequence[torch.Tensor]) -> int:
        """Return how many samples these inputs have."""
        told = (self.template or self).tensors
        counts = (v.shape[0] for t, v in zip(self.inputs, inputs, strict=False) if is_by_samples(told[t]) and v.dim())
        return next(counts, self.samples)

    @cached_property
    def results(self) -> tuple[int, ...]:
        """What every rank has whole after a step: the loss, and what buffers hold then."""
        return self.loss, *self.updates.values()

    @cached_property
    def producers(self) -> dict[int, int]:
        """The operator that makes each tensor."""
        return {t: number for number, operator in enumerate(self.operators) for t in operator.made}

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """The operators that read each tensor, in order."""
        found: dict[int, list[int]] = {}
        for number, operator in enumerate(self.operators):
            for tensor in dict.fromkeys(operator.inputs):
                found.setdefault(tensor, []).append(number)
        return found

    @cached_property
    def stepped(self) -> dict[str, int]:
        """The parameters that an optimizer steps: it passes over those without a gradient."""
        return {name: tensor for name, tensor in self.parameters.items() if self.gradients[name] is not None}

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


@contextmanager
def as_traced(graph: Graph, device: torch.device) -> Iterator[None]:
    """The types of tensors are those of the trace, whatever the caller has set since: torch's default type is, and nothing is
    cast automatically, for casts of the trace are operators of the graph. Ranks would send each other other types else."""
    own = torch.get_default_dtype()
    torch.set_default_dtype(graph.default_dtype)
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(own)


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers, those that have several names under each of them."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def is_by_samples(tensor: Tensor) -> bool:
    """Whether a template's tensor has a piece for every sample."""
    return bool(tensor.shape) and isinstance(tensor.shape[0], BySamples)


def schema_of(target: Any) -> Any:
    """What torch declares of an operator: its arguments, by name; None of what is no single operator."""
    return getattr(target, "_schema", None)


def argument_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The argument called `name` of a call of an operator; `default` where it was not given."""
    names = [argument.name for argument in schema_of(target).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get(name, default)


@cache
def overload(key: str) -> Any:
    """The operator of torch called `key`."""
    found: Any = torch.ops
    for part in key.split("."):
        found = getattr(found, part)
    return found


def replaced(value: Any, kind: type, with_what: Callable[[Any], Any]) -> Any:
    """`value` with everything of a kind in its lists, tuples and mappings replaced."""
    if isinstance(value, kind):
        return with_what(value)
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(item, kind, with_what) for item in value)
    if isinstance(value, dict):
        return {key: replaced(item, kind, with_what) for key, item in value.items()}
    return value


def _refs(value: Any) -> list[Ref]:
    """The inputs that stand in an argument."""
    found: list[Ref] = []
    replaced(value, Ref, found.append)
    return found


def fingerprint(graph: Graph) -> str:
    """A text that differs where a program made for one graph would not fit another, or would compute with other numbers.
    It is the same on every device."""

    def given(o: Operator) -> Any:
        return replaced((o.args, dict(o.kwargs)), torch.device, lambda device: None)

    told = [f"{o.name} {o.key} {given(o)} {o.inputs} {o.outputs} {graph.shapes_out(o)}" for o in graph.operators]
    names = [f"{name} {tensor}" for name, tensor in graph.parameters.items()]
    return hashlib.sha256("\n".join([*told, *names]).encode()).hexdigest()[:16]


def repeated(graph: Graph) -> list[int]:
    """Return for each operator the earliest one that it repeats, which is itself if it repeats none.

    Layers are found by what they are: stretches of operators that repeat the stretch before them, with the same arguments
    and shapes.
    """
    first = list(range(len(graph.operators)))
    kinds = _kinds(graph)
    free = np.ones(len(kinds), dtype=bool)
    while (found := _longest(kinds, free)) is not None:
        start, period, length = found
        for place in range(start + period, start + period + length):
            first[place] = start + (place - start) % period
        free[start : start + period + length] = False
    return first


def repeated_parameters(graph: Graph, first: list[int]) -> dict[str, str]:
    """Return for each parameter the first one in the same place of operators that repeat each other, which is itself if there
    is none. The forward repeats its first layer, the backward, which begins at the end, its last."""
    names = {tensor: name for name, tensor in graph.parameters.items()}
    groups = {name: {name} for name in graph.parameters}
    for operator, earlier in zip(graph.operators, first, strict=True):
        for tensor, other in zip(operator.inputs, graph.operators[earlier].inputs, strict=True):
            if tensor in names and other in names:
                joined = groups[names[tensor]] | groups[names[other]]
                groups.update(dict.fromkeys(joined, joined))
    order = {name: number for number, name in enumerate(graph.parameters)}
    return {name: min(group, key=order.__getitem__) for name, group in groups.items()}


def _kinds(graph: Graph) -> np.ndarray:
    """Return a number for each operator. Operators that do the same to tensors of the same shapes have the same number."""
    numbers: dict[tuple[object, ...], int] = {}
    told = (
        (o.key, repr(o.args), repr(o.kwargs), o.is_forward, *graph.shapes_in(o), *graph.shapes_out(o))
        for o in graph.operators
    )
    return np.array([numbers.setdefault(kind, len(numbers)) for kind in told])


def _longest(kinds: np.ndarray, free: np.ndarray) -> tuple[int, int, int] | None:
    """Return the longest stretch in which everything is repeated after a period, at least once in whole: where the part that
    is repeated starts, the period, and the length."""
    best: tuple[int, int, int] | None = None
    for period in range(SHORTEST, len(kinds) // 2 + 1):
        alike = (kinds[period:] == kinds[:-period]) & free[period:] & free[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], alike.astype(np.int8), [0]))))
        lengths = edges[1::2] - edges[::2]
        if not lengths.size:
            continue
        place = int(lengths.argmax())
        length = int(lengths[place])
        if length >= period and (best is None or length > best[2]):
            best = int(edges[2 * place]), period, length
    return best
