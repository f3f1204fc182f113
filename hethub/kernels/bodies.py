"""Bodies of a step's operations: pure functions of tensors that Inductor compiles, one program for each shape.

A body between two matrix products is a chain of small operations, each of which reads and writes whole tensors; compiled
it reads its inputs once and writes its results once. Devices run compiled bodies; a CPU runs them as they stand unless
it is asked to compile, which takes seconds for each shape.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from hethub.kernels.device import is_gpu

_log = logging.getLogger(__name__)


class _Choice:
    """What this process does with bodies: compile them (True), run them as they stand (False), or by device (None)."""

    compiles: bool | None = None


def choose(compiles: bool | None) -> None:
    """Compiles bodies in this process from here on, or runs them as they stand; None: compiles on devices."""
    _Choice.compiles = compiles


@contextmanager
def uncompiled() -> Iterator[None]:
    """In the block bodies run as they stand: for shapes that come once, a program takes longer to make than it saves."""
    before, _Choice.compiles = _Choice.compiles, False
    try:
        yield
    finally:
        _Choice.compiles = before


def compiles_on(device: torch.device) -> bool:
    """Whether bodies are compiled whose tensors lie there."""
    return is_gpu(device) if _Choice.compiles is None else _Choice.compiles


class Body:
    """A function of tensors and constants, the first of them a tensor; its results are new or write to their inputs.

    It holds no state and asks nothing of the host. A program is made for every combination of dtypes, shapes, strides
    and constants, at its first call. Where Inductor or its compiler does not work, one line says so and all bodies of
    the process run as they stand.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__doc__ = function, function.__doc__
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        if not compiles_on(args[0].device):
            return self.function(*args)
        key = tuple(
            (arg.device, arg.dtype, arg.shape, arg.stride()) if isinstance(arg, Tensor) else arg for arg in args
        )
        program = self._programs.get(key)
        if program is None:
            program = self._compile(args)
            if program is None:
                return self.function(*args)
            self._programs[key] = program
        found = tuple(program(*(arg for arg in args if isinstance(arg, Tensor))))
        return found[0] if len(found) == 1 else found

    def _compile(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        graph, tensors = traced(self.function, args)
        try:
            # Straight to Inductor: shapes are known from the key, so nothing of Dynamo's is needed to guard them.
            program: Callable[..., Any] = torch._inductor.compile(graph, tensors)
        except Exception as error:  # noqa: BLE001  Triton or a C++ compiler is missing, or too old for this torch
            _log.warning("Inductor does not work here, so a layer's small operations run one by one: %s", _line(error))
            choose(False)
            return None
        return program


def traced(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[GraphModule, list[Any]]:
    """The graph of `function` on tensors of these shapes, a list of results, and the tensors; nothing is computed."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second, which a run on CPUs need not wait

    tensors = [arg for arg in args if isinstance(arg, Tensor)]

    def on_tensors(*values: Tensor) -> tuple[Tensor, ...]:
        given = iter(values)
        found = function(*(next(given) if isinstance(arg, Tensor) else arg for arg in args))
        return found if isinstance(found, tuple) else (found,)

    with torch.no_grad():
        return make_fx(on_tensors, tracing_mode="fake")(*tensors), tensors


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
