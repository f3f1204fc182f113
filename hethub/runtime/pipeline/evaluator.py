"""Runs one rank's forwards of a plan alone: the loss of samples that are not trained on."""

from collections.abc import Callable

import torch
from torch import Tensor

from hethub.runtime.model.stage import MicrobatchInput
from hethub.runtime.pipeline.executor import Executor
from hethub.runtime.pipeline.transport import WINDOW
from hethub.spec.layout.execution import Action, Kind
from hethub.spec.schedule.microbatches import MicrobatchRange


class Evaluator(Executor):
    """The forwards of a schedule in its order. Its ZeRO manager trains nothing: gradients are neither made nor kept."""

    directions = (Kind.FORWARD,)

    def _chosen(self, listed: list[Action]) -> list[Action]:
        return [action for action in listed if action.kind is Kind.FORWARD]

    @torch.no_grad()
    def run(self, load: Callable[[MicrobatchRange], MicrobatchInput]) -> float:
        """The summed token losses of this rank's microbatches (0.0 where the head is elsewhere)."""
        losses: list[Tensor] = []
        self._itinerary.start_step()
        for index, action in enumerate(self._actions):
            self._transport.post_receives(self._actions[index : index + WINDOW])
            if action.microbatch is None:
                for layer in self._layers(action):
                    self._itinerary.join(action.kind, layer)
            else:
                losses += self._pass(action.chunk, action.microbatch, load(action.microbatch))
        self._transport.finish()
        return float(torch.stack(losses).sum()) if losses else 0.0

    def _pass(self, chunk: int, microbatch: MicrobatchRange, data: MicrobatchInput) -> list[Tensor]:
        """Takes a microbatch through a chunk; the loss where the model ends there."""
        x = self._transport.arrived(Kind.FORWARD, chunk, microbatch)
        tokens, losses = self.stage.token_layout(data), []
        for layer in range(*self._chunks[chunk]):
            self._itinerary.enter(Kind.FORWARD, layer)
            x = self.stage.embed(data) if x is None else x
            x = self.stage.layers[layer](x, tokens)
            if self.stage.is_end(layer):
                losses.append(self.stage.held_out_loss(x, data))
            self._itinerary.leave(Kind.FORWARD, layer)
        if not losses:
            assert x is not None
            self._transport.hand_on(Kind.FORWARD, chunk, microbatch, x)
        return losses
