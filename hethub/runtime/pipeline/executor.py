"""Runs one rank's actions of a step: microbatches through the stage's model chunks, forward and back, and reductions."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from hethub.communicator import World
from hethub.runtime.model.stage import MicrobatchInput, Stage
from hethub.runtime.pace import Pace
from hethub.runtime.pipeline.itinerary import Itinerary, Visit
from hethub.runtime.pipeline.passes import MicrobatchPass
from hethub.runtime.pipeline.spans import SpanLog
from hethub.runtime.pipeline.transport import DIRECTIONS, WINDOW, Transport
from hethub.runtime.state.zero import ZeroManager
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.layout.execution import Action, Kind, actions
from hethub.spec.ranges import from_sizes
from hethub.spec.schedule.microbatches import MicrobatchRange


@dataclass
class _Step:
    """What a step has under way."""

    load: Callable[[MicrobatchRange], MicrobatchInput]
    loss_scale: float
    inputs: dict[MicrobatchRange, MicrobatchInput] = field(default_factory=dict)
    running: dict[tuple[int, MicrobatchRange], MicrobatchPass] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)


class Executor:
    """One rank's interpreter of the schedule. `run_step` executes all compute actions and reductions."""

    directions: Sequence[Kind] = DIRECTIONS  # in which it goes through the layers

    def __init__(
        self, layout: Layout, assignment: Assignment, world: World, stage: Stage, zero_manager: ZeroManager, pace: Pace
    ) -> None:
        self.layout, self.assignment, self.stage = layout, assignment, stage
        self.zero_manager, self.pace = zero_manager, pace
        self._by_chunk = layout.plan.steps_chunk_by_chunk
        self._actions = self._chosen(actions(layout, assignment.stage, assignment.replica))
        # Layers of each model chunk, counted in the stage.
        self._chunks = from_sizes(chunk.size for chunk in layout.chunks(assignment.stage))
        self._itinerary = Itinerary(zero_manager, self._visits(), pace)
        self._transport = Transport(layout, assignment, world, stage, self.directions)
        self.microbatches = layout.microbatches_of(assignment.stage, assignment.replica)
        self._splits_backward = layout.plan.defers_wgrad
        self.log = SpanLog(assignment.rank, world.device)

    def _chosen(self, listed: list[Action]) -> list[Action]:
        """What of the stage's actions is executed one by one."""
        return [action for action in listed if action.is_compute or self._by_chunk]

    def _layers(self, action: Action) -> range:
        """The layers of an action's chunk, in the order in which it passes them."""
        layers = range(*self._chunks[action.chunk])
        return layers if action.kind is Kind.FORWARD else layers[::-1]

    def _visits(self) -> list[Visit]:
        """The layers of all compute actions in order: microbatch by microbatch, or once for all microbatches that pass
        a chunk in turn."""
        in_turn = self.layout.passes_in_turn(self.assignment.stage)
        compute = enumerate(action for action in self._actions if action.is_compute)
        passes = groupby(compute, lambda at: at[1][:2] + at[1][3:] if in_turn else at[0])
        found = []
        for _, group in passes:
            acts = [action for _, action in group]
            layers = self._layers(acts[0])
            last = layers[-1]
            found += [Visit(acts[0].kind, layer, len(acts), not in_turn or layer == last) for layer in layers]
        return found

    def run_step(self, load: Callable[[MicrobatchRange], MicrobatchInput], loss_scale: float) -> Tensor:
        """Runs every microbatch of this rank and returns the loss it computed, 0-d (0.0 where the head is elsewhere).

        `load` gives a microbatch's data; the loss is summed over tokens and multiplied by `loss_scale`.
        """
        step = self._step = _Step(load, loss_scale)
        self.log.start_step()
        self.zero_manager.start_step(len(self.microbatches))
        self._itinerary.start_step()
        for index, action in enumerate(self._actions):
            self._transport.post_receives(self._actions[index : index + WINDOW])
            with self.log.timed(action), self.pace.action(action):
                self._run(action, self._next_backward(index))
        with self.timed(Kind.REDUCE):
            self.zero_manager.finish()
            self._transport.finish()
        return torch.stack(step.losses).sum() if step.losses else torch.zeros(())

    def timed(self, kind: Kind) -> AbstractContextManager[None]:
        """The span of what ends a step of the whole stage; one that steps chunk by chunk has those behind each
        chunk."""
        return nullcontext() if self._by_chunk else self.log.timed(Action(kind, self.assignment.stage))

    def _next_backward(self, index: int) -> MicrobatchPass | None:
        """The microbatch whose backward is the next action, where its forward is over."""
        following = self._actions[index + 1 : index + 2]
        if not following or following[0].kind is not Kind.BACKWARD or following[0].microbatch is None:
            return None
        return self._step.running.get((following[0].chunk, following[0].microbatch))

    def _run(self, action: Action, following: MicrobatchPass | None) -> None:
        microbatch, chunk = action.microbatch, action.chunk
        if not action.is_compute:
            self._update(action)
        elif microbatch is None:
            for layer in self._layers(action):
                self._itinerary.join(action.kind, layer)
        elif action.kind is Kind.FORWARD:
            if following is not None:
                following.prefetch()
            self._forward(chunk, microbatch)
        elif action.kind is Kind.BACKWARD:
            self._backward(chunk, microbatch, following)
        else:
            self._step.running.pop((chunk, microbatch)).run_wgrad()

    def _update(self, action: Action) -> None:
        """What is done for a chunk of the stage by itself, before the step is over."""
        stepping = self.zero_manager.stepping
        assert stepping is not None
        update = {
            Kind.REDUCE: self.zero_manager.finish_chunk,
            Kind.STEP: stepping.step_chunk,
            Kind.GATHER: stepping.gather_chunk,
        }
        update[action.kind](action.chunk)

    def _forward(self, chunk: int, microbatch: MicrobatchRange) -> None:
        source = self._transport.arrived(Kind.FORWARD, chunk, microbatch)
        step = self._step
        if microbatch not in step.inputs:
            step.inputs[microbatch] = step.load(microbatch)
        running = MicrobatchPass(
            self.stage, self._itinerary, self._chunks[chunk], step.inputs[microbatch], step.loss_scale
        )
        result = running.forward(source)
        if self.stage.is_end(self._chunks[chunk].stop - 1):
            step.losses.append(result)
        else:
            self._transport.hand_on(Kind.FORWARD, chunk, microbatch, result)
        step.running[chunk, microbatch] = running

    def _backward(self, chunk: int, microbatch: MicrobatchRange, following: MicrobatchPass | None) -> None:
        grad = self._transport.arrived(Kind.BACKWARD, chunk, microbatch)
        running = self._step.running[chunk, microbatch]
        grad = running.backward(grad, defers_wgrad=self._splits_backward, following=following)
        if not self._splits_backward:
            del self._step.running[chunk, microbatch]
        if grad is not None:
            self._transport.hand_on(Kind.BACKWARD, chunk, microbatch, grad)
        if chunk == 0:
            del self._step.inputs[microbatch]
