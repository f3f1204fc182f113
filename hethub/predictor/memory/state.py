"""Bytes of weights, gradients and optimizer state on a rank: what lives there for good, and what comes and goes.

A unit is what moves together where a rank does not hold all of its stage: a layer's matrices, with the embedding in the
first layer and the head in the last (hethub.spec.layout.state). Norms always stay.
"""

from typing import NamedTuple

from hethub.predictor.memory.shards import Holdings, Shard
from hethub.spec.layout.bind import Assignment
from hethub.spec.layout.state import both_ends_step


class Resident(NamedTuple):
    """Elements and bytes of a rank's state that stay for the whole step, and whether the units' state comes and
    goes."""

    weights: float
    gradients: float
    moves_weights: bool
    moves_gradients: bool
    optimizer_bytes: float
    update_bytes: (
        float  # what the update brings from the host: two buckets' worth; or a unit's weights on their way there
    )
    host_bytes: float


def resident(shard: Shard, assignment: Assignment) -> Resident:
    """What stays on the accelerator, and all state that is offloaded to the host."""
    stage, software, width, holdings = shard.spec, shard.software, shard.width, shard.holdings
    wide, total = max(4, width), shard.held_elements
    shards = len(stage.replicas) * software.context_parallel
    level = stage.zero if shards > 1 else min(stage.zero, 1)
    owned = _owned(shard, assignment, shards)
    stay = holdings.norms + holdings.apart
    part = max(0.0, owned - stay / shards)  # of the units, where only owners keep them
    offloaded, host = "parameters" in stage.offload, 0.0
    weights, gradients = total, part + stay if level >= 2 else total
    if offloaded:
        weights, host = stay, width * (part if level == 3 else sum(holdings.units) + holdings.tied)
    elif level == 3:
        weights = part + stay
    masters = wide if width < 4 else 0
    state, brought = owned * (masters + 2 * wide), 0.0
    if "optimizer" in stage.offload:
        host, state, brought = host + state, 0.0, masters + 2.0 * wide
    if offloaded and not masters:
        brought += width
    update = brought * owned / total * shard.bucket_elements if brought else 0.0
    if offloaded and level < 3:
        update = max(update, width * max(holdings.units))
    # Other frameworks' buffers are in what was fitted on them.
    ours = software.gathers_ahead
    return Resident(weights, gradients, ours and (offloaded or level == 3), ours and level >= 2, state, update, host)


def _owned(shard: Shard, assignment: Assignment, shards: int) -> float:
    """Elements that the rank steps: all it holds, an equal part of them, or its share of the stage's."""
    stage, apart = shard.spec, shard.holdings.apart
    # A tied embedding is always cut, over the ranks of both ends unless one of them names shares.
    ends = (shard.layout.stages[0], shard.layout.stages[-1])
    over_both = shard.software.gathers_ahead and both_ends_step(shard.layout)
    owners = sum(len(end.replicas) for end in ends) if over_both else shards
    own, tied = shard.held_elements - apart, apart / owners if over_both or assignment.stage == 0 else 0.0
    if stage.zero == 0:
        return own + tied
    if not stage.state_shares:
        return own / shards + tied
    named = stage.state_shares.get(assignment.rank)
    if named is None:
        named = (1.0 - sum(stage.state_shares.values())) / (len(stage.ranks) - len(stage.state_shares))
    whole = Holdings.of(shard.layout, assignment.stage, 1.0)
    return named * (whole.total if assignment.stage == 0 else whole.total - whole.apart)
