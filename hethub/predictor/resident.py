"""Bytes of weights, gradients and optimizer state on a rank: what lives there for good, and what comes and goes.

A unit is what moves together where a rank does not hold all of its stage: a layer's matrices, with the embedding in the
first layer and the head in the last (hethub.spec.state). Norms always stay.
"""

from itertools import pairwise
from typing import NamedTuple

from hethub.predictor.software import Software
from hethub.spec.layout import Layout, Seat
from hethub.spec.ranges import Range
from hethub.spec.state import BUCKET_ELEMENTS


class Holdings(NamedTuple):
    """Elements of a stage that a rank with some share of heads, columns and vocabulary computes with."""

    units: tuple[float, ...]  # per layer of the stage
    norms: float
    apart: float  # an embedding tied to a head on another stage: held by both

    @property
    def total(self) -> float:
        return sum(self.units) + self.norms + self.apart

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
        if layout.head_is_apart and stage in (0, layout.num_stages - 1):
            apart = table
            units[0] -= table if stage == 0 else 0.0
        return Holdings(tuple(units), norms, apart)


class Moving(NamedTuple):
    """The most elements at hand at a time of units that come and go: of weights, and of gradients."""

    weights: float
    gradients: float

    @staticmethod
    def of(layout: Layout, seat: Seat, holdings: Holdings) -> "Moving":
        """Weights: a layer and the one fetched ahead; gradients: a layer and the one whose reduction is under way.

        Where all tiles pass a part before the next, a part's layers stay until its last tile has passed.
        """
        units, spec = list(holdings.units), layout.replica(seat.stage, seat.replica)
        if layout.model.tied_head and layout.num_stages == 1 and len(units) > 1:
            units[-1] += layout.model.vocab * layout.model.hidden / spec.tp
        if layout.plan.schedule not in ("layered", "ministages"):
            beside = [a + b for a, b in pairwise(units)] or [units[0]]
            again = [units[-1] + units[0]] if len(units) > 1 else []
            several = spec.samples > spec.micro_batch
            held = layout.in_flight[seat.stage][seat.replica] > 1
            return Moving(max(beside + again * held), max(beside + again * several))
        parts = [units[own.start : own.stop] for own in _own_parts(layout, seat.stage)]
        sums = [sum(part) for part in parts]
        ahead = [a[-1] + b[0] for a, b in pairwise(parts)]
        behind = [total + b[0] for total, b in zip(sums, parts[1:], strict=False)]
        return Moving(max(sums + ahead), max(sums + behind))


def _own_parts(layout: Layout, stage: int) -> list[Range]:
    """The stage's parts as ranges of its own layers."""
    found, start = [], 0
    for part in layout.parts(stage):
        found.append(Range(start, start + part.size))
        start += part.size
    return found


def resident_bytes(
    layout: Layout, seat: Seat, holdings: Holdings, software: Software, width: int
) -> tuple[dict[str, int], float]:
    """Bytes of weights, gradients and optimizer on the accelerator, and all that is offloaded to the host."""
    stage, wide = layout.stages[seat.stage], max(4, width)
    shards = len(stage.replicas) * software.context_parallel
    level = stage.zero if shards > 1 else min(stage.zero, 1)
    owned = _owned(layout, seat, holdings, shards)
    stay = holdings.norms + holdings.apart
    part = max(0.0, owned - stay / shards) if level else sum(holdings.units)  # of the units, for good
    # Other frameworks' buffers are in what was fitted on them.
    moves = software.gathers_ahead and (level >= 2 or "parameters" in stage.offload)
    moving = Moving.of(layout, seat, holdings) if moves else Moving(0.0, 0.0)
    weights, gradients, host = holdings.total, holdings.total, 0.0
    if "parameters" in stage.offload:
        weights, host = stay + moving.weights, width * (part if level == 3 else sum(holdings.units))
    elif level == 3:
        weights = part + stay + moving.weights
    if level >= 2:
        gradients = part + stay + moving.gradients
    state = owned * ((wide if width < 4 else 0) + 2 * wide)
    if "optimizer" in stage.offload:
        host += state
        state *= min(1.0, 2.0 * _bucket(layout, seat, holdings) / holdings.total)
    return {"weights": int(weights * width), "gradients": int(gradients * wide), "optimizer": int(state)}, host


def _owned(layout: Layout, seat: Seat, holdings: Holdings, shards: int) -> float:
    """Elements that the rank steps: all it holds, an equal part of them, or its share of the stage's."""
    stage = layout.stages[seat.stage]
    # A tied embedding is always cut, over the owners in the first stage.
    own, tied = holdings.total - holdings.apart, holdings.apart / shards if seat.stage == 0 else 0.0
    if stage.zero == 0:
        return own + tied
    if not stage.state_shares:
        return own / shards + tied
    named = stage.state_shares.get(seat.rank)
    if named is None:
        named = (1.0 - sum(stage.state_shares.values())) / (len(stage.ranks) - len(stage.state_shares))
    whole = Holdings.of(layout, seat.stage, 1.0)
    return named * (whole.total if seat.stage == 0 else whole.total - whole.apart)


def _bucket(layout: Layout, seat: Seat, holdings: Holdings) -> float:
    """Elements of the largest bucket: a unit's where units move, a chunk's matrices else, cut where it is full."""
    stage = layout.stages[seat.stage]
    moves = stage.zero >= 2 or "parameters" in stage.offload
    whole = (
        max(holdings.units)
        if moves
        else max(sum(holdings.units[p.start : p.stop]) for p in _own_parts(layout, seat.stage))
    )
    table = layout.model.vocab * layout.model.hidden
    largest = max(layout.model.hidden * layout.model.ffn, table if seat.stage in (0, layout.num_stages - 1) else 0)
    return min(whole, BUCKET_ELEMENTS + largest)
