"""Runs one rank's actions of a step: tiles through the parts of its stage, forward and back, and reductions."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from hethub.communicator import World
from hethub.runtime.model.stage import Stage, TileInput
from hethub.runtime.pace import Pace
from hethub.runtime.pipeline.passes import Itinerary, TilePass, Visit
from hethub.runtime.pipeline.spans import SpanLog
from hethub.runtime.pipeline.transport import WINDOW, Transport
from hethub.runtime.state.zero import Residency
from hethub.spec.layout.bind import Layout, Seat
from hethub.spec.layout.execution import Action, Kind, actions
from hethub.spec.ranges import from_sizes
from hethub.spec.schedule.microbatches import Tile


@dataclass
class _Step:
    """What a step has under way."""

    load: Callable[[Tile], TileInput]
    loss_scale: float
    inputs: dict[Tile, TileInput] = field(default_factory=dict)
    running: dict[tuple[int, Tile], TilePass] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)


class Executor:
    """One rank's interpreter of the schedule. `run_step` executes all compute actions and reductions."""

    def __init__(
        self, layout: Layout, seat: Seat, world: World, stage: Stage, residency: Residency, pace: Pace
    ) -> None:
        self.layout, self.seat, self.stage, self.residency, self.pace = layout, seat, stage, residency, pace
        self._by_part = layout.plan.steps_part_by_part
        listed = actions(layout, seat.stage, seat.replica)
        self._actions = [action for action in listed if action.is_compute or self._by_part]
        self._parts = from_sizes(part.size for part in layout.parts(seat.stage))  # layers, counted in the stage
        self._itinerary = Itinerary(residency, self._visits(), pace)
        self._transport = Transport(layout, seat, world, stage)
        self.tiles = layout.tiles_of(seat.stage, seat.replica)
        self._splits_backward = layout.plan.schedule == "zero_bubble"
        self.log = SpanLog(seat.rank)

    def _layers(self, action: Action) -> range:
        """The layers of an action's part, in the order in which it passes them."""
        layers = range(*self._parts[action.part])
        return layers if action.kind is Kind.FORWARD else layers[::-1]

    def _visits(self) -> list[Visit]:
        """The layers of all compute actions in order: tile by tile, or once for all tiles that pass a part in turn."""
        together = self.layout.plan.goes_part_by_part
        compute = enumerate(action for action in self._actions if action.is_compute)
        passes = groupby(compute, lambda at: at[1][:2] + at[1][3:] if together else at[0])
        found = []
        for _, group in passes:
            acts = [action for _, action in group]
            layers = self._layers(acts[0])
            last = layers[-1]
            found += [Visit(acts[0].kind, layer, len(acts), not together or layer == last) for layer in layers]
        return found

    def run_step(self, load: Callable[[Tile], TileInput], loss_scale: float) -> float:
        """Runs every tile of this rank and returns the loss it computed (0.0 where the head is elsewhere).

        `load` gives a tile's data; the loss is summed over tokens and multiplied by `loss_scale`.
        """
        step = self._step = _Step(load, loss_scale)
        self.log.start_step()
        self.residency.start_step(len(self.tiles))
        self._itinerary.start_step()
        for index, action in enumerate(self._actions):
            self._transport.post_receives(self._actions[index : index + WINDOW])
            with self.log.timed(action), self.pace.action(action):
                self._run(action, self._next_backward(index))
        with self.timed(Kind.REDUCE):
            self.residency.finish()
            self._transport.finish()
        return float(torch.stack(step.losses).sum()) if step.losses else 0.0

    def timed(self, kind: Kind) -> AbstractContextManager[None]:
        """The span of what ends a step of the whole stage; one that steps part by part has those behind each part."""
        return nullcontext() if self._by_part else self.log.timed(Action(kind, self.seat.stage))

    def _next_backward(self, index: int) -> TilePass | None:
        """The tile whose backward is the next action, where its forward is over."""
        following = self._actions[index + 1 : index + 2]
        if not following or following[0].kind is not Kind.BACKWARD or following[0].tile is None:
            return None
        return self._step.running.get((following[0].part, following[0].tile))

    def _run(self, action: Action, following: TilePass | None) -> None:
        tile, part = action.tile, action.part
        if not action.is_compute:
            self._update(action)
        elif tile is None:
            for layer in self._layers(action):
                self._itinerary.join(action.kind, layer)
        elif action.kind is Kind.FORWARD:
            if following is not None:
                following.prefetch()
            self._forward(part, tile)
        elif action.kind is Kind.BACKWARD:
            self._backward(part, tile, following)
        else:
            self._step.running.pop((part, tile)).run_weight_part()

    def _update(self, action: Action) -> None:
        """What is done for a part of the stage by itself, before the step is over."""
        stepping = self.residency.stepping
        assert stepping is not None
        update = {
            Kind.REDUCE: self.residency.finish_part, Kind.STEP: stepping.step_part, Kind.GATHER: stepping.gather_part,
        }  # fmt: skip
        update[action.kind](action.part)

    def _forward(self, part: int, tile: Tile) -> None:
        source = self._transport.arrived(Kind.FORWARD, part, tile)
        step = self._step
        if tile not in step.inputs:
            step.inputs[tile] = step.load(tile)
        running = TilePass(self.stage, self._itinerary, self._parts[part], step.inputs[tile], step.loss_scale)
        result = running.forward(source)
        if self.stage.is_end(self._parts[part].stop - 1):
            step.losses.append(result)
        else:
            self._transport.hand_on(Kind.FORWARD, part, tile, result)
        step.running[part, tile] = running

    def _backward(self, part: int, tile: Tile, following: TilePass | None) -> None:
        grad = self._transport.arrived(Kind.BACKWARD, part, tile)
        running = self._step.running[part, tile]
        grad = running.backward(grad, puts_weights_off=self._splits_backward, following=following)
        if not self._splits_backward:
            del self._step.running[part, tile]
        if grad is not None:
            self._transport.hand_on(Kind.BACKWARD, part, tile, grad)
        if part == 0:
            del self._step.inputs[tile]
