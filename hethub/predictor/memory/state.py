"""Bytes of weights, gradients and optimizer state on a rank: what lives there for good, and what comes and goes.

A unit is what moves together where a rank does not hold all of its stage: a layer's matrices, with the embedding in the
first layer and the head in the last (hethub.spec.layout.state). Norms always stay.
"""

from typing import NamedTuple

from hethub.predictor.cost.software import Software, gradient_bytes
from hethub.predictor.memory.parameters import Held, stepped
from hethub.predictor.memory.shards import Shard
from hethub.spec.layout.bind import Assignment, Layout


class Moves(NamedTuple):
    """Whether the units' state comes and goes."""

    weights: bool
    gradients: bool


class Resident(NamedTuple):
    """Elements and bytes of a rank's state that stay for the whole step, and what its step and reductions bring."""

    weights: float
    gradients: float
    moves: Moves
    optimizer_bytes: float
    update_bytes: (
        float  # what the update brings from the host: three parts of it; or a unit's weights on their way there
    )
    owned: float  # elements that the rank steps
    host_weights_bytes: float
    host_optimizer_bytes: float
    joined_bytes: float  # copies of gradients that lie apart
    block_bytes: float  # of shared memory, on a CPU


def resident(shard: Shard, assignment: Assignment, *, on_cpu: bool) -> Resident:
    """What stays on the accelerator, and all state that is offloaded to the host."""
    stage, software, width, held = shard.spec, shard.software, shard.width, shard.parameters
    level = zero_level(shard.layout, assignment.stage, software)
    owned = stepped(shard.layout, software, assignment.stage, assignment.rank, held.held, shard.whole)
    stay = held.norms + held.apart
    units = Held(held.held.own - held.norms, 0.0), Held(shard.whole.own - held.norms, 0.0)
    kept = stepped(shard.layout, software, assignment.stage, assignment.rank, *units)  # where only owners keep them
    offloaded, host_weights, host_optimizer = "parameters" in stage.offload, 0.0, 0.0
    weights, gradients = float(held.total), kept + stay if level >= 2 else held.total
    if offloaded:
        weights, host_weights = stay, width * (kept if level == 3 else sum(held.units) + held.tied)
    elif level == 3:
        weights = kept + stay
    state, brought = owned * (optimizer_bytes(width) - width * software.master_remainders), 0.0
    if "optimizer" in stage.offload:
        host_optimizer, state, brought = state, 0.0, float(optimizer_bytes(width))
    if offloaded and not master_bytes(width):
        brought += width
    update = brought and brought * shard.brought_at_once(owned)
    if offloaded and level < 3:
        update = max(update, width * max(held.units) * (1 + shard.joined(assignment.replica)))
    # Other frameworks' buffers are in what was fitted on them.
    ours = software.gathers_ahead
    return Resident(
        weights,
        gradients,
        Moves(ours and (offloaded or level == 3), ours and level >= 2),
        state,
        update,
        owned,
        host_weights,
        host_optimizer,
        _joined_bytes(shard, assignment),
        _block_bytes(shard) if on_cpu else 0.0,
    )


def _joined_bytes(shard: Shard, assignment: Assignment) -> float:
    """Copies of gradients whose parts lie apart: all of them are there when the last reduction starts
    (hethub.runtime.state.reduction). What comes and goes is joined unit by unit (hethub.predictor.memory.peak)."""
    if shard.spec.zero >= 2:
        return 0.0
    matrices = shard.parameters.total - shard.parameters.norms
    return gradient_bytes(shard.width) * shard.joined(assignment.replica) * matrices


def _block_bytes(shard: Shard) -> float:
    """Blocks of memory in which replicas exchange parts of two buckets, one read while the next is written
    (hethub.communicator.relays.shm). Two ranks map each, so half of it counts: with equal parts, all of a bucket but the
    rank's own.

    Groups that share no state take the vendor's all-reduce, in place. A tied head's ends share theirs in any case, as one
    bucket.
    """
    sharing = sum(len(shard.layout.stages[end].replicas) for end in (0, -1))
    elements, replicas = shard.parameters.held.apart * (1 - 1 / sharing), len(shard.spec.replicas)
    if shard.spec.zero:
        elements += shard.bucket_elements * (1 - 1 / replicas)
    return gradient_bytes(shard.width) * elements


def zero_level(layout: Layout, stage: int, software: Software) -> int:
    """The ZeRO level that the stage's ranks really have: 1 at most where one replica holds all."""
    zero, replicas = layout.stages[stage].zero, len(layout.stages[stage].replicas)
    return zero if replicas * software.context_parallel > 1 else min(zero, 1)


def master_bytes(width: int) -> int:
    """Bytes of a parameter's wider copy that the optimizer steps; none where weights are as wide."""
    return gradient_bytes(width) if width < 4 else 0


def optimizer_bytes(width: int) -> int:
    """Bytes of optimizer state per parameter: both moments, and the master copy."""
    return master_bytes(width) + 2 * gradient_bytes(width)
