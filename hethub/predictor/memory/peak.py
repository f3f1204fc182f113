"""Find the moment of a step at which a rank holds the most. It is full of microbatches then, somewhere in the first backward.

A backward goes through the layers from the last to the first and frees what they kept. At each layer, its gradients are
being filled while those of the layer above are being reduced, and its weights are there while those of the layer below are
being fetched. Where the parts of a unit are joined in copies (`Shard.joined`), its gradients are there a second time when
they are complete, in the parts in which they leave, and no others are being reduced. Its weights are there a second time
too, in the parts in which they came; but this is before its gradients are there, which take as much.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from hethub.predictor.cost.software import held_gradient_bytes
from hethub.predictor.memory.activations import HeldActivations
from hethub.predictor.memory.parameters import StageParameters
from hethub.predictor.memory.shards import Descent, Shard
from hethub.predictor.memory.state import Moves
from hethub.spec.layout.bind import Assignment


class Moment(NamedTuple):
    """What a rank holds at one moment: bytes of activations, and the elements of units that are there, of weights and of
    gradients."""

    activations: float
    weights: float
    gradients: float


def peak(shard: Shard, assignment: Assignment, microbatches: HeldActivations, moves: Moves) -> Moment:
    """Return the moment with the most bytes. What always stays on the device is not counted."""
    if not any(moves):
        return Moment(microbatches.activations, 0.0, 0.0)
    weights = shard.width * moves.weights
    gradients = held_gradient_bytes(shard.width, shard.software) * moves.gradients
    most = max(
        moments(shard, assignment, microbatches),
        key=lambda now: now.activations + now.weights * weights + now.gradients * gradients,
    )
    return Moment(most.activations, most.weights * moves.weights, most.gradients * moves.gradients)


def moments(shard: Shard, assignment: Assignment, microbatches: HeldActivations) -> Iterator[Moment]:
    """Yield the moments that can be a rank's peak."""
    layout = shard.layout
    joined = shard.joined(assignment.replica)
    if layout.plan.goes_chunk_by_chunk:
        descents = shard.descents + (shard.joining_descents(joined) if joined else ())
        return _chunk_by_chunk(descents, microbatches)
    actor = layout.actor_of(assignment.stage, assignment.replica)
    again = (
        layout.loads[assignment.stage][actor].num_microbatches > layout.in_flight[assignment.stage][assignment.replica]
    )
    return _layer_by_layer(shard.parameters, microbatches, again, joined)


def _layer_by_layer(
    held: StageParameters, microbatches: HeldActivations, again: bool, joined: float
) -> Iterator[Moment]:
    """Yield the moments of one microbatch's backward. `again` says that another one came before it, whose last reduction (that
    of a tied embedding, if there is one) is still under way. `joined` is the part of a unit that is joined in copies."""
    units, tied, top = held.units, held.tied, len(held.units) - 1
    for layer in range(top, -1, -1):
        above = units[layer + 1] if layer < top else (tied or units[0]) * again
        below = units[layer - 1] if layer else 0.0
        at_hand = tied if layer in (0, 1, top) else 0.0
        activations = microbatches.activations - (top - layer) * microbatches.freed_by_layer
        yield Moment(activations, units[layer] + below + at_hand, units[layer] + above + tied)
        if joined:
            left = (1 + joined) * units[layer] + tied
            yield Moment(activations - microbatches.freed_by_layer, units[layer] + below + at_hand, left)


def _chunk_by_chunk(descents: Iterable[Descent], microbatches: HeldActivations) -> Iterator[Moment]:
    """Yield the moments where all microbatches pass a chunk before the next one. What chunks that are done kept is freed."""
    by_chunk = microbatches.freed_by_chunk
    kept = [microbatches.activations - freed for freed in accumulate(by_chunk[:0:-1], initial=0.0)][::-1]
    for chunk, passed, gone, weights, gradients in descents:
        freed = passed * microbatches.freed_by_layer + gone * by_chunk[chunk]
        yield Moment(kept[chunk] - freed, weights, gradients)
