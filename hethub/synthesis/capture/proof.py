"""Whether a traced graph is what its module does: both compute a few samples from the same weights, and are compared.

A trace sees operators on tensors, once. What else decides a result (hooks, Python's own state, weights that are read by
another way) it takes for a constant; whatever does so is found here by its effect.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from hethub.spec.errors import BadInput
from hethub.synthesis.graph import Graph, as_traced, is_by_samples, tensors_of

_log = logging.getLogger(__name__)

FEW = 2  # samples: one may be taken for a dimension that broadcasts


def prove(module: nn.Module, graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Raises BadInput where the graph's loss, gradients or buffers are not the module's own, or where the module keeps
    a state from call to call; nothing is compared where its tensors or the inputs have no values, or, with a warning,
    where the module as a whole has no room on its device."""
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    if any(type(value).__name__ == "FakeTensor" or value.is_meta for value in (*held.values(), *inputs)):
        return
    few = _few(graph, inputs)
    try:
        _prove(module, *few)
    except BadInput:
        raise
    except torch.OutOfMemoryError:
        _log.warning(
            "%s is not compared with its trace: its device has no room for the whole of it.", type(module).__name__
        )
    except Exception as error:
        if few[0] is graph:
            raise BadInput(
                f"{type(module).__name__} cannot be run on its own example inputs: {type(error).__name__}: {error}; give a batch that it"
                " takes, or inputs on the device 'meta', whose values nobody asks for."
            ) from error
        # Inputs that speak of each other, as a graph's edges of its nodes, cannot be cut short.
        prove(module, replace(graph, template=None), inputs)


def _few(graph: Graph, inputs: Sequence[torch.Tensor]) -> tuple[Graph, Sequence[torch.Tensor]]:
    if graph.template is None:
        return graph, inputs
    if any(value.device.type != "cpu" and _may_number(value, graph.samples_in(inputs)) for value in inputs):
        return graph, inputs  # a number of a sample that was cut off would end a device's process for good
    try:
        few = graph.at(FEW)
    except BadInput:
        return graph, inputs
    by_samples = [is_by_samples(graph.template.tensors[tensor]) for tensor in graph.inputs]
    return few, [value[:FEW] if cut else value for value, cut in zip(inputs, by_samples, strict=True)]


def _may_number(value: torch.Tensor, samples: int) -> bool:
    """Whether a tensor's entries could be numbers of samples."""
    whole = not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    return whole and value.numel() > 0 and int(value.max()) < samples


def _prove(module: nn.Module, graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    named = tensors_of(module)
    trained = [named[name] for name in graph.parameters]
    with as_it_was(module, with_values=True), _alone(), torch.enable_grad():
        drawn = _generators()
        module(*_clones(inputs))
        if _generators() != drawn:
            _refuse(module, "draws from Python's or numpy's random numbers, which a trace takes for constants")
        before = _state(module, graph)
        module(*_clones(inputs))  # what it sets up in its first call is there by now
        after = _state(module, graph)
        changed = next((name for name in after if before.get(name) != after[name]), None)
        if changed is not None:
            _refuse(module, f"changes '{changed}' from call to call, which a trace takes for a constant")
        _move(trained)  # so that what was taken of the initial weights is seen
        torch.clear_autocast_cache()  # a caller's autocast keeps casts of what they were
        values = {tensor: named[name].detach() for name, tensor in graph.parameters.items()}
        values |= {t: named[name].detach().clone() for name, t in graph.buffers.items() if name in named}
        values |= {graph.buffers[name]: value for name, value in graph.constants.items()}
        loss = module(*_clones(inputs))
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        with as_traced(graph, loss.device):  # as a step will run it
            found = _run(graph, values | dict(zip(graph.inputs, _clones(inputs), strict=True)))
        pairs = {"the loss": (found[graph.loss], loss.detach())}
        for (name, tensor), own in zip(graph.gradients.items(), gradients, strict=True):
            nothing = torch.zeros_like(named[name])
            pairs[f"the gradient of '{name}'"] = (
                nothing if tensor is None else found[tensor],
                nothing if own is None else own,
            )
        pairs |= {f"'{name}' after a step": (found[tensor], named[name]) for name, tensor in graph.updates.items()}
        scale = max(_largest(own) for _, own in pairs.values())
        for what, (made, own) in pairs.items():
            if not _close(made.detach(), own.detach(), scale):
                _refuse(module, f"does what no operator in its trace does: {what} is another")


def is_alike_in_eval(module: nn.Module, graph: Graph, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the module's loss, of a few samples, is the same after `.eval()`, which its graph does not know of."""
    few, named = _few(graph, inputs)[1], tensors_of(module)
    with as_it_was(module, with_values=True), _alone(), torch.no_grad():
        _move([named[name] for name in graph.parameters])  # a branch whose weights are nothing yet counts too
        try:
            try:
                before = module(*_clones(few))
            except Exception:  # noqa: BLE001  it may take no fewer samples, as in `prove`
                few = inputs
                before = module(*_clones(few))
        except torch.OutOfMemoryError:
            _log.warning("%s is not compared with its .eval(): its device has no room for it.", type(module).__name__)
            return True
        module.eval()
        try:
            after = module(*_clones(few))
        except Exception:  # noqa: BLE001  of the user's own code, so of any type
            return False
        return isinstance(after, torch.Tensor) and after.shape == before.shape and _close(after, before, 0.0)


def _refuse(module: nn.Module, what: str) -> None:
    raise BadInput(
        f"{type(module).__name__} cannot be captured exactly: its forward {what}. Keep it out of forward: only operators on"
        " the inputs, parameters and buffers, without hooks and without a state of its own, give the same on every rank."
    )


def _clones(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value.detach().clone() for value in inputs]


@torch.no_grad()
def _run(graph: Graph, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """What the graph makes of the values of its parameters, buffers and inputs: its results and gradients."""
    kept = {*graph.results, *graph.gradients.values()}
    for number, operator in enumerate(graph.operators):
        results = operator.call([values[tensor] for tensor in operator.inputs])
        values.update((t, r) for t, r in zip(operator.outputs, results, strict=True) if t is not None)
        for tensor in {*operator.inputs, *operator.made} - kept:
            if graph.consumers.get(tensor, [-1])[-1] <= number:
                del values[tensor]
    return values


@torch.no_grad()
def _move(trained: Sequence[torch.Tensor]) -> None:
    """Every parameter by about a tenth of what it is, or by a tenth where it is nothing."""
    draw = torch.Generator().manual_seed(0)
    for value in trained:
        noise = torch.randn(value.shape, generator=draw).to(value)
        size = value.abs().square().mean().sqrt() if value.numel() else value.sum()
        value.add_(noise * torch.where(size > 0, size, torch.ones_like(size)) * 0.1)


def _largest(value: torch.Tensor) -> float:
    finite = value.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.max()) if value.numel() else 0.0


def _close(made: torch.Tensor, own: torch.Tensor, scale: float) -> bool:
    """Whether they differ by rounding alone: by half of a type's digits of the largest entry, or, where all entries are
    rounding themselves, by a thousand times the last digit of the largest gradient."""
    if not own.is_floating_point() and not own.is_complex():
        return torch.equal(made, own)
    last = torch.finfo(own.dtype).eps
    alike = (made == own) | (made.isnan() & own.isnan())
    allowed = last**0.5 * _largest(own) + 1000 * last * scale
    return bool((alike | ((made - own).abs() <= allowed)).all())


def _generators() -> tuple[object, ...]:
    """Where Python's and numpy's random numbers are, to be compared."""
    name, words, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(words).tobytes(), rest


def _state(module: nn.Module, graph: Graph) -> dict[str, Any]:
    """What the modules hold, by name, in a form that compares by value; what a step is known to change is left out."""
    found: dict[str, Any] = {}
    for prefix, inner in module.named_modules():
        held = {**inner._parameters, **inner._buffers}
        for name, value in {**vars(inner), **held}.items():
            full = f"{prefix}.{name}" if prefix else name
            if full not in graph.updates and name not in ("_parameters", "_buffers"):
                found[full] = _place(value) if name in held else _told(value)
    return found


def _place(value: torch.Tensor | None) -> Any:
    """Where a tensor lies, and how often it was written to."""
    return None if value is None else (value.data_ptr(), value._version)


def _told(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return _place(value)
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().resolve_conj().cpu().reshape(-1)
        return value.shape, plain.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return [(key, _told(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [_told(part) for part in value]
    return value if isinstance(value, (int, float, complex, str, bytes, type(None))) else type(value).__name__


@contextmanager
def as_it_was(module: nn.Module, *, with_values: bool) -> Iterator[None]:
    """The module's attributes, the values in them, and Python's random numbers are afterwards what they were before."""
    undo: list[Callable[[], object]] = []
    seen: set[int] = set()
    for inner in module.modules():
        _keep(vars(inner), undo, seen, with_values)
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        with torch.no_grad():
            for step in undo:
                step()
        torch.clear_autocast_cache()  # of casts that it keeps of weights


def _keep(value: Any, undo: list[Callable[[], object]], seen: set[int], with_values: bool) -> None:
    """Adds how to bring back what `value` holds."""
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, torch.Tensor):
        if with_values:
            data, copy = value.data, value.detach().clone()

            def restore() -> None:
                value.data = data
                data.copy_(copy)

            undo.append(restore)
    elif isinstance(value, dict):
        items = dict(value)
        parts += items.values()

        def refill() -> None:
            value.clear()
            value.update(items)

        undo.append(refill)
    elif isinstance(value, list):
        parts += value
        undo.append(lambda: value.__setitem__(slice(None), parts))
    for part in parts:
        _keep(part, undo, seen, with_values)


@contextmanager
def _alone() -> Iterator[None]:
    """SyncBatchNorm asks no other rank: each has the whole batch here."""
    own = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = nn.modules.batchnorm._BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = own  # type: ignore[method-assign]
