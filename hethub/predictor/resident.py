"""Bytes of weights, gradients and optimizer state on a rank: what lives there for good, and what comes and goes.

A unit is what moves together where a rank does not hold all of its stage: a layer's matrices, with the embedding in the
first layer and the head in the last (hethub.spec.state). Norms always stay.
"""

from itertools import pairwise
from typing import NamedTuple

from hethub.predictor.software import Software
from hethub.spec.layout import Layout, Seat
from hethub.spec.ranges import Range
from hethub.spec.state import BUCKET_ELEMENTS, both_ends_step


class Holdings(NamedTuple):
    """Elements of a stage that a rank with some share of heads, columns and vocabulary computes with."""

    units: tuple[float, ...]  # per layer of the stage
    tied: float  # an embedding that both ends of the stage use: a unit of its own
    norms: float
    apart: float  # an embedding tied to a head on another stage: held by both

    @property
    def total(self) -> float:
        return sum(self.units) + self.tied + self.norms + self.apart

    @staticmethod
    def of(layout: Layout, stage: int, share: float) -> "Holdings":
        model, num_layers = layout.model, layout.stages[stage].num_layers
        columns = (3 if model.is_gated else 2) * model.ffn
        kv = max(model.num_kv_heads * share, 1.0) * model.head_size * 2
        layer = model.hidden * (2 * model.heads * model.head_size * share + kv + columns * share)
        whole = model.hidden * (2 * model.head_size * (model.heads + model.num_kv_heads) + columns)
        norms = float(num_layers * (model.layer_parameters - whole))
        units, apart = [layer] * num_layers, 0.0
        table = model.vocab * model.hidden * share
        if stage == 0:
            units[0] += model.embedding_parameters * share
        if stage == layout.num_stages - 1:
            head = 0.0 if model.tied_head else table
            units[-1] += head
            norms += model.head_parameters * share - head
        if model.tied_head and stage == 0:
            units[0] -= table
        if layout.head_is_apart and stage in (0, layout.num_stages - 1):
            apart = table
        tied = table if model.tied_head and layout.num_stages == 1 else 0.0
        return Holdings(tuple(units), tied, norms, apart)


def own_parts(layout: Layout, stage: int) -> list[Range]:
    """The stage's parts as ranges of its own layers."""
    found, start = [], 0
    for part in layout.parts(stage):
        found.append(Range(start, start + part.size))
        start += part.size
    return found


class Resident(NamedTuple):
    """Elements and bytes of a rank's state that stay for the whole step, and whether the units' state comes and goes."""

    weights: float
    gradients: float
    moves_weights: bool
    moves_gradients: bool
    optimizer_bytes: float
    update_bytes: (
        float  # what the update brings from the host: two buckets' worth; or a unit's weights on their way there
    )
    host_bytes: float


def resident(layout: Layout, seat: Seat, holdings: Holdings, software: Software, width: int) -> Resident:
    """What stays on the accelerator, and all state that is offloaded to the host."""
    stage, wide = layout.stages[seat.stage], max(4, width)
    shards = len(stage.replicas) * software.context_parallel
    level = stage.zero if shards > 1 else min(stage.zero, 1)
    owned = _owned(layout, seat, holdings, shards, software)
    stay = holdings.norms + holdings.apart
    part = max(0.0, owned - stay / shards)  # of the units, where only owners keep them
    offloaded, host = "parameters" in stage.offload, 0.0
    weights, gradients = holdings.total, part + stay if level >= 2 else holdings.total
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
    update = brought * owned / holdings.total * _two_buckets(layout, seat, holdings)
    if offloaded and level < 3:
        update = max(update, width * max(holdings.units))
    # Other frameworks' buffers are in what was fitted on them.
    ours = software.gathers_ahead
    return Resident(weights, gradients, ours and (offloaded or level == 3), ours and level >= 2, state, update, host)


def _owned(layout: Layout, seat: Seat, holdings: Holdings, shards: int, software: Software) -> float:
    """Elements that the rank steps: all it holds, an equal part of them, or its share of the stage's."""
    stage = layout.stages[seat.stage]
    # A tied embedding is always cut, over the ranks of both ends unless one of them names shares.
    ends = [layout.stages[0], layout.stages[-1]]
    over_both = software.gathers_ahead and both_ends_step(layout)
    owners = sum(len(end.replicas) for end in ends) if over_both else shards
    own = holdings.total - holdings.apart
    tied = holdings.apart / owners if over_both or seat.stage == 0 else 0.0
    if stage.zero == 0:
        return own + tied
    if not stage.state_shares:
        return own / shards + tied
    named = stage.state_shares.get(seat.rank)
    if named is None:
        named = (1.0 - sum(stage.state_shares.values())) / (len(stage.ranks) - len(stage.state_shares))
    whole = Holdings.of(layout, seat.stage, 1.0)
    return named * (whole.total if seat.stage == 0 else whole.total - whole.apart)


def _two_buckets(layout: Layout, seat: Seat, holdings: Holdings) -> float:
    """Elements of the two largest neighbouring buckets: of units where these move, of a chunk's matrices else.

    A bucket is cut where it is full.
    """
    stage, model = layout.stages[seat.stage], layout.model
    table = model.vocab * model.hidden if seat.stage in (0, layout.num_stages - 1) else 0
    full = BUCKET_ELEMENTS + max(model.hidden * model.ffn, table)
    parts = [holdings.units[part.start : part.stop] for part in own_parts(layout, seat.stage)]
    parts[0] = (holdings.tied, *parts[0])
    if not layout.plan.steps_part_by_part:
        parts = [tuple(unit for part in parts for unit in part)]
    if stage.zero >= 2 or "parameters" in stage.offload:
        return max(a + b for part in parts for a, b in pairwise([min(unit, full) for unit in (0.0, *part)]))
    return min(2 * full, max(map(sum, parts)))
