"""The bytes of weights, gradients and optimizer state on a rank: what always stays there, and what comes and goes.

Where a rank does not hold all of its stage, a unit is what moves together: a layer's matrices, with the embedding in the
first layer and the head in the last (hethub.spec.layout.state). Norms always stay.
"""

from typing import NamedTuple

from hethub.predictor.cost.software import Software, gradient_bytes
from hethub.predictor.memory.parameters import Held, stepped
from hethub.predictor.memory.shards import Shard
from hethub.spec.layout.bind import Assignment, Layout


class Moves(NamedTuple):
    """Whether units' weights, and whether their gradients, come and go."""

    weights: bool
    gradients: bool


class Resident(NamedTuple):
    """A rank's state that stays during the whole step, in elements and bytes, and what updates and reductions add to it."""

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
    """Return the state that stays on the accelerator, and all state that is offloaded to the host."""
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
    """Return the bytes of copies of gradients whose parts are not contiguous. All of them are there when the last reduction
    starts (hethub.runtime.state.reduction). Units that come and go are joined one by one (hethub.predictor.memory.peak)."""
    if shard.spec.zero >= 2:
        return 0.0
    matrices = shard.parameters.total - shard.parameters.norms
    return gradient_bytes(shard.width) * shard.joined(assignment.replica) * matrices


def _block_bytes(shard: Shard) -> float:
    """Return the bytes of the shared memory in which replicas exchange parts of two buckets, one of which is read while the next
    is written (hethub.communicator.relays.shm). Two ranks map each block, so half of it counts. With equal parts this is
    all of a bucket except the rank's own part.

    Groups that do not shard state use the vendor's all-reduce, in place. A tied head is always exchanged in this way, as
    one bucket.
    """
    sharing = sum(len(shard.layout.stages[end].replicas) for end in (0, -1))
    elements, replicas = shard.parameters.held.apart * (1 - 1 / sharing), len(shard.spec.replicas)
    if shard.spec.zero:
        elements += shard.bucket_elements * (1 - 1 / replicas)
    return gradient_bytes(shard.width) * elements


def zero_level(layout: Layout, stage: int, software: Software) -> int:
    """Return the ZeRO level that the stage's ranks really have: at most 1 if there is one replica."""
    zero, replicas = layout.stages[stage].zero, len(layout.stages[stage].replicas)
    return zero if replicas * software.context_parallel > 1 else min(zero, 1)


def master_bytes(width: int) -> int:
    """Return the bytes of the wider copy of a parameter that the optimizer steps, 0 if weights are as wide."""
    return gradient_bytes(width) if width < 4 else 0


def optimizer_bytes(width: int) -> int:
    """Return the bytes of optimizer state for each parameter: both moments and the master copy."""
    return master_bytes(width) + 2 * gradient_bytes(width)
