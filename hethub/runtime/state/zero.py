"""ZeRO and offload as an executor meets them: which weights, gradients and activations are on the device, and when.

The executor says which layer it is about to enter, which comes next, and when it is through with one; the answer
depends on where the stage's state lives:

- ZeRO 0: weights and gradients of all layers stay; nothing happens here.
- ZeRO 1: they stay, too, but a step's first visit of a layer waits for the weights that other ranks have stepped.
- ZeRO 2: likewise, and gradients of a layer's matrices live in one full buffer (at least fp32) from `acquire` to the
  end of their reduction. Two such buffers at most, beside the head's, which fills from the last layer's forward on.
- ZeRO 3: weights likewise, in the run's precision, from `prefetch` to `release`: the layer that computes and the next.
- Offloaded parameters come and go like ZeRO 3's weights, from host memory.
- Offloaded activations are in host memory between a layer's forward and its backward: on the device are those of the
  layer at work and of the one after it; where copies go on by themselves, also of the one before, which are leaving.

Where all microbatches pass a chunk before the next (layered, ministages), the chunk's layers stay until its last
microbatch is through.

A unit is what comes and goes as one, as in FSDP: the matrices of a layer, with the embedding in the model's first layer
and the head in its last; tied in one stage, embedding and head are a unit of their own that both ends use. Norms stay,
and so does an embedding that is tied to the head of another stage.
"""

from collections import Counter

from torch import Tensor

from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.memory.activation_offload import Kept, OffloadedLayer, OffloadedTensors
from hethub.runtime.memory.host_arena import HostArena
from hethub.runtime.state.reduction import Reducer
from hethub.runtime.state.stepping import Stepping
from hethub.runtime.state.zero_gradients import ZeroGradients
from hethub.runtime.state.zero_weights import ZeroWeights
from hethub.spec.layout.execution import Kind
from hethub.spec.layout.state import chunk_of


class ZeroManager:
    """Brings one rank's weights and gradients to its executor, layer by layer, and lets them go.

    A layer's number counts the stage's layers in model order; the embedding goes with the first layer of the model,
    final norm and head with its last. All ranks of a stage make the same calls in the same order, those without a
    microbatch in a round too: what they do not add to counts as zeros.
    """

    def __init__(
        self,
        reducer: Reducer,
        meter: MemoryMeter,
        stepping: Stepping | None = None,
        arena: HostArena | None = None,
        *,
        trains: bool = True,
    ) -> None:
        self.reducer, self._meter, self.stepping = reducer, meter, stepping
        storage = reducer.storage
        self._state, self._stage = storage.state, storage.assignment.stage
        layout = self._state.layout
        self._spec = layout.stages[self._stage]
        self._closing = Kind.WEIGHT if layout.plan.defers_wgrad else Kind.BACKWARD
        self._arena = arena if "activations" in self._spec.offload else None
        self.weights = ZeroWeights(reducer, meter) if storage.moves_weights else None
        self.gradients = ZeroGradients(reducer, meter) if storage.shards_gradients and trains else None
        if stepping is not None:
            stepping.weights = self.weights
        self._visitors: Counter[int] = Counter()  # by unit, the visits under way that use its weights
        self._next: tuple[int, ...] = ()

    def _units(self, layer: int) -> tuple[int, ...]:
        return self._state.units_at(self._stage, layer)

    def _weights_for(self, kind: Kind, layer: int) -> tuple[int, ...]:
        """The units whose weights a visit computes with: a weight gradient needs none."""
        return () if self.weights is None or kind is Kind.WEIGHT else self._units(layer)

    def _gradients_for(self, kind: Kind, layer: int) -> tuple[int, ...]:
        """The units that a visit adds gradients to.

        The head's gradient is computed in its forward, the embedding's is never deferred.
        """
        layout, units = self._state.layout, self._units(layer)
        if self.gradients is None:
            return ()
        if kind is self._closing:
            return units
        if layout.head_is_apart:
            return ()
        if kind is Kind.FORWARD:
            is_end = self._stage == layout.num_stages - 1 and layer == self._spec.num_layers - 1
            return units[-1:] if is_end else ()
        return units[-1:] if self._stage == 0 and layer == 0 else ()

    def start_step(self, num_contributions: int) -> None:
        """Expects the gradients of `num_contributions` microbatches for every parameter that stays."""
        self.reducer.start_step(num_contributions)
        if self.gradients is not None:
            self.gradients.start_step()

    def acquire(self, kind: Kind, layer: int) -> None:
        """Returns when the layer's weights (backward: and gradient buffers) may be used, which `prefetch` has begun to
        bring."""
        self._next = ()
        self.reducer.finish_gather(layer)
        for unit in self._weights_for(kind, layer):
            assert self.weights is not None
            self.weights.finish(unit)
            self._visitors[unit] += 1
        for unit in self._gradients_for(kind, layer):
            assert self.gradients is not None
            self.gradients.open(unit)

    def prefetch(self, kind: Kind, layer: int) -> None:
        """Starts what the next `acquire`, of this layer, will wait for."""
        self._next = self._weights_for(kind, layer)
        if self.stepping is not None:
            self.stepping.catch_up(chunk_of(self._spec, layer))
        for unit in self._next:
            assert self.weights is not None
            self.weights.start(unit)

    def release(self, kind: Kind, layer: int) -> None:
        """Ends one visit of the layer; on the way back its contribution to the gradients is complete."""
        if self.gradients is not None and kind is self._closing:
            for unit in self._units(layer):
                if unit < self._spec.num_layers or layer == 0:  # both ends add to a tied embedding, the first one last
                    self.gradients.close(unit)
        for unit in self._weights_for(kind, layer):
            assert self.weights is not None
            self._visitors[unit] -= 1
            if not self._visitors[unit] and unit not in self._next:
                self.weights.free(unit)

    def end_layer(self) -> None:
        """Behind each microbatch's use of a layer: what has left the layer before for host memory is let go."""
        if self._arena is not None:
            self._arena.end_layer()

    def finish_chunk(self, chunk: int) -> None:
        """Do what `finish` does, for a chunk that is stepped by itself, and take up its part of the norm."""
        assert self.stepping is not None
        self.finish(chunk)
        self.stepping.chunk_reduced(chunk)

    def finish(self, chunk: int | None = None) -> None:
        """Returns when the reductions of a chunk, or all, are through: owned gradients are complete sums."""
        if self.gradients is not None:
            self.gradients.finish()
        self.reducer.finish(chunk)

    def keep(self, *tensors: Tensor) -> Kept | OffloadedTensors:
        """Keeps tensors between a microbatch's passes; `.tensors` gives them back, sooner after `.prefetch()`."""
        if self._arena is not None:
            return OffloadedTensors(tensors, self._arena, self._meter)
        return Kept(tuple(map(self._meter.keep, tensors)))

    def offload(self) -> OffloadedLayer | None:
        """Where a layer's graph keeps its tensors in host memory; None where they stay on the device."""
        return None if self._arena is None else OffloadedLayer(self._arena, self._meter)
