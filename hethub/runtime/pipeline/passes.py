"""A microbatch's way through layers, forward and back, every layer an autograd graph of its own.

Between two layers nothing but a detached tensor passes, so what happens there (weights fetched, freed, reduced; inputs
kept elsewhere; a layer run again) are statements of a loop.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hethub.runtime.memory.activation_offload import Kept, OffloadedLayer, OffloadedTensors
from hethub.runtime.model.layers import LlamaLayer
from hethub.runtime.model.stage import MicrobatchInput, Stage
from hethub.runtime.pipeline.itinerary import Itinerary
from hethub.runtime.state.parameter import Parameter, deferring
from hethub.spec.layout.execution import Kind
from hethub.spec.ranges import Range


@dataclass
class _Through:
    """A layer that a microbatch has passed: the ends of its graph, or its input alone where it will be run again."""

    source: Tensor | Kept | OffloadedTensors
    result: Tensor | None = None

    def prefetch(self) -> None:
        """Starts bringing what its backward needs, where that is in host memory."""
        if not isinstance(self.source, Tensor):
            self.source.prefetch()


@dataclass
class _OffloadedGraph:
    """A layer that a microbatch has passed whose graph keeps its tensors in host memory, and none of its ends."""

    offloaded: OffloadedLayer
    result: GradientEdge
    gradients: list[Tensor]  # receives the input's

    def prefetch(self) -> None:
        self.offloaded.prefetch()

    def backward(self, grad: Tensor | None) -> Tensor:
        torch.autograd.backward(self.result, grad)
        return self.gradients.pop()


class _Inlet(torch.autograd.Function):
    """A layer's input, which its graph does not keep alive; the gradient goes to `gradients`.

    `anchor` is any tensor that requires a gradient: it makes autograd come here.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.gradients.append(grad)
        return None, None, None


class _Products(NamedTuple):
    """A layer's deferred gradients: a left @ right to be added to each parameter's, which come in turn."""

    parameters: list[Parameter]
    factors: Kept | OffloadedTensors


class MicrobatchPass:
    """One microbatch between its forward and its backward through the layers `layers` of a stage.

    Where backward defers the weights' gradients, the microbatch goes on holding what they are made of until
    `run_wgrad`: for each matrix of a layer its input and the gradient of its output. Per token that is both norms'
    results, attention's and SwiGLU's (2 hidden + query + ffn columns), and gradients of 2 hidden + query + 2 key-value
    + 2 ffn columns. Norms and embedding are done at once, the head in its forward.
    """

    def __init__(
        self, stage: Stage, itinerary: Itinerary, layers: Range, data: MicrobatchInput, loss_scale: float
    ) -> None:
        self._stage, self._itinerary, self._layers = stage, itinerary, range(*layers)
        self._data, self._loss_scale = data, loss_scale
        self._tokens = stage.token_layout(data)
        self._embedded: GradientEdge | None = None
        self._through: list[_Through | _OffloadedGraph] = []
        self._head: tuple[Tensor, Tensor] | None = None  # the head's input and loss
        self._deferred_wgrad: list[_Products] = []  # per layer, the last one first
        self._following: MicrobatchPass | None = None

    def forward(self, x: Tensor | None) -> Tensor:
        """Hidden states (batch * seq, hidden) behind the layers, or the loss behind the model's last (0-d), detached.

        `x` is what the layers before gave; None where tokens are embedded.
        """
        for layer in self._layers:
            self._itinerary.enter(Kind.FORWARD, layer)
            if x is None:
                x = self._stage.embed(self._data)
                self._embedded = get_gradient_edge(x)
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
            self._through.append(_Through(self._itinerary.zero_manager.keep(x)))
            return result
        if (offloaded := self._itinerary.zero_manager.offload()) is not None:
            return self._offloaded_forward(run, x, offloaded)
        result = run(x.requires_grad_(), self._tokens)
        self._through.append(_Through(x, result))
        return result

    def _offloaded_forward(self, run: LlamaLayer, x: Tensor, offloaded: OffloadedLayer) -> Tensor:
        gradients: list[Tensor] = []
        anchor = torch.empty(0, device=x.device, requires_grad=True)
        with offloaded.saving():
            result = run(_Inlet.apply(anchor, x, gradients), self._tokens)
        self._through.append(_OffloadedGraph(offloaded, get_gradient_edge(result), gradients))
        return result

    def prefetch(self) -> None:
        """Starts bringing what the next backward needs first, where that is in host memory."""
        if self._through:
            self._through[-1].prefetch()

    def backward(
        self, grad: Tensor | None, *, defers_wgrad: bool = False, following: "MicrobatchPass | None" = None
    ) -> Tensor | None:
        """The gradient of what `forward` was given, from that of its result (None: the loss's is 1).

        None where tokens were embedded. `following` is the microbatch that goes backward next, if one does.
        """
        self._following = following
        for layer in reversed(self._layers):
            self._itinerary.enter(Kind.BACKWARD, layer)
            if self._head is not None:
                grad, self._head = _backward(*self._head, grad), None
            if defers_wgrad:
                grad = self._input_backward(layer, grad)
            else:
                grad = self._layer_backward(layer, grad)
            if self._embedded is not None and layer == self._layers[0]:
                torch.autograd.backward(self._embedded, grad)
                self._embedded = grad = None
            self._itinerary.leave(Kind.BACKWARD, layer)
        return grad

    def _input_backward(self, layer: int, grad: Tensor | None) -> Tensor:
        """`_layer_backward`, but the products for weight gradients are kept for later."""
        with deferring(self._stage.layers[layer].matrices) as products:
            grad = self._layer_backward(layer, grad)
        factors = [factor for _, *both in products for factor in both]
        kept = self._itinerary.zero_manager.keep(*factors)
        self._deferred_wgrad.append(_Products([parameter for parameter, *_ in products], kept))
        return grad

    def run_wgrad(self) -> None:
        """Adds the weights' gradients that `backward` has deferred, layer by layer in its order."""
        for layer in reversed(self._layers):
            self._itinerary.enter(Kind.WEIGHT, layer)
            parameters, kept = self._deferred_wgrad.pop(0)
            factors = kept.tensors
            for parameter, left, right in zip(parameters, factors[::2], factors[1::2], strict=True):
                parameter.add_product(left, right)
            self._itinerary.leave(Kind.WEIGHT, layer)

    def _layer_backward(self, layer: int, grad: Tensor | None) -> Tensor:
        through = self._through.pop()
        if upcoming := self if self._through else self._following:
            upcoming.prefetch()
        if isinstance(through, _OffloadedGraph):
            return through.backward(grad)
        if isinstance(through.source, Tensor):
            assert through.result is not None
            return _backward(through.source, through.result, grad)
        (source,) = through.source.tensors
        return _backward(source.requires_grad_(), self._stage.layers[layer](source, self._tokens), grad)


def _backward(source: Tensor, result: Tensor, grad: Tensor | None) -> Tensor:
    """The gradient of `source` from that of `result`; the weights between note their own."""
    torch.autograd.backward(result, grad)
    assert source.grad is not None
    return source.grad
