"""The moment of a step at which a rank holds most: full of microbatches, somewhere on the first backward's way down.

Going down, a backward frees what layers kept, while the gradients of a layer fill beside those of the layer above,
which are being reduced, and its weights lie beside those of the layer below, which are being fetched. Where a unit's
parts are joined (`Shard.joined`), its gradients lie beside the parts that they leave in when they are through, with no
other on the way. Its weights lie beside the parts that they came in, too, but before its gradients are there, which take
as much.
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
    """Bytes of activations, and elements of units at hand: of their weights and of their gradients."""

    activations: float
    weights: float
    gradients: float


def peak(shard: Shard, assignment: Assignment, microbatches: HeldActivations, moves: Moves) -> Moment:
    """The moment with the most bytes; nothing counted there of what stays for good."""
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
    """The moments that can be a rank's peak."""
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
    """A microbatch on its way down; `again`: another went before it, whose last reduction (a tied embedding's, where
    there is one) is still under way; `joined`: the part of a unit that is joined in copies."""
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
    """Chunk by chunk, all microbatches of one before the next: what those behind have kept is gone."""
    by_chunk = microbatches.freed_by_chunk
    kept = [microbatches.activations - freed for freed in accumulate(by_chunk[:0:-1], initial=0.0)][::-1]
    for chunk, passed, gone, weights, gradients in descents:
        freed = passed * microbatches.freed_by_layer + gone * by_chunk[chunk]
        yield Moment(kept[chunk] - freed, weights, gradients)
