"""A tile's way through layers, forward and back, every layer an autograd graph of its own.

Between two layers nothing but a detached tensor passes, so what happens there (weights fetched, freed, reduced; inputs
kept elsewhere; a layer run again) are statements of a loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hethub.runtime.accounting import Kept
from hethub.runtime.pace import Pace
from hethub.runtime.residency import Residency
from hethub.runtime.stage import Stage, TileInput
from hethub.spec.ranges import Range
from hethub.spec.schedule import Kind

Visit = tuple[Kind, int]  # what is done in which layer of the stage


class Itinerary:
    """The order in which a rank visits its layers in a step; each next visit is announced while the present one runs."""

    def __init__(self, residency: Residency, visits: Sequence[Visit], pace: Pace) -> None:
        self.residency, self._visits, self._position, self._pace = residency, visits, 0, pace

    def start_step(self) -> None:
        self._position = 0

    def enter(self, kind: Kind, layer: int) -> None:
        """Makes a layer usable."""
        assert self._visits[self._position] == (kind, layer)
        self.residency.acquire(kind, layer)
        self._position += 1
        if self._position < len(self._visits):
            self.residency.prefetch(*self._visits[self._position])
        self._pace.enter(kind, layer)

    def leave(self, kind: Kind, layer: int) -> None:
        """Ends the visit."""
        self._pace.leave()
        self.residency.release(kind, layer)


@dataclass
class _Through:
    """A layer that a tile has passed: the ends of its graph, or its input alone where it will be run again."""

    source: Tensor | Kept
    result: Tensor | None = None


class TilePass:
    """One tile between its forward and its backward through the layers `layers` of a stage."""

    def __init__(self, stage: Stage, itinerary: Itinerary, layers: Range, data: TileInput, loss_scale: float) -> None:
        self._stage, self._itinerary, self._layers = stage, itinerary, range(*layers)
        self._data, self._loss_scale = data, loss_scale
        self._tokens = stage.token_layout(data)
        self._embedded: Tensor | None = None
        self._through: list[_Through] = []
        self._head: tuple[Tensor, Tensor] | None = None  # the head's input and loss

    def forward(self, x: Tensor | None) -> Tensor:
        """Hidden states (batch * seq, hidden) behind the layers, or the loss behind the model's last (0-d), detached.

        `x` is what the layers before gave; None where tokens are embedded.
        """
        for layer in self._layers:
            self._itinerary.enter(Kind.FORWARD, layer)
            if x is None:
                self._embedded = self._stage.embed(self._data)
                x = self._embedded
            x = self._layer_forward(layer, x.detach())
            if self._stage.is_end(layer):
                source = x.detach().requires_grad_()
                x = self._stage.loss(source, self._data, self._loss_scale)
                self._head = source, x
            self._itinerary.leave(Kind.FORWARD, layer)
        assert x is not None
        return x.detach()

    def _layer_forward(self, layer: int, x: Tensor) -> Tensor:
        run = self._stage.layers[layer]
        if self._stage.recompute == "full":
            with torch.no_grad():
                result = run(x, self._tokens)
            self._through.append(_Through(self._itinerary.residency.keep(x)))
            return result
        result = run(x.requires_grad_(), self._tokens)
        self._through.append(_Through(x, result))
        return result

    def backward(self, grad: Tensor | None) -> Tensor | None:
        """The gradient of what `forward` was given, from that of its result (None: the loss's is 1).

        None where tokens were embedded.
        """
        for layer in reversed(self._layers):
            self._itinerary.enter(Kind.BACKWARD, layer)
            if self._head is not None:
                grad, self._head = _backward(*self._head, grad), None
            grad = self._layer_backward(layer, grad)
            if self._embedded is not None and layer == self._layers[0]:
                torch.autograd.backward(self._embedded, grad)
                self._embedded = grad = None
            self._itinerary.leave(Kind.BACKWARD, layer)
        return grad

    def _layer_backward(self, layer: int, grad: Tensor | None) -> Tensor:
        through = self._through.pop()
        if isinstance(through.source, Tensor):
            assert through.result is not None
            return _backward(through.source, through.result, grad)
        source = through.source.tensor.requires_grad_()
        return _backward(source, self._stage.layers[layer](source, self._tokens), grad)


def _backward(source: Tensor, result: Tensor, grad: Tensor | None) -> Tensor:
    """The gradient of `source` from that of `result`; the weights between note their own."""
    torch.autograd.backward(result, grad)
    assert source.grad is not None
    grad, source.grad = source.grad, None
    return grad
