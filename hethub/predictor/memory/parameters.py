"""Parameters on a rank: what it holds of every layer and of the model's ends, and what of it the rank steps.

The layout says how heads, columns and vocabulary rows are cut (hethub.spec.layout.tensors). Norms, biases and learned
positions are whole on every rank. Families that the runtime does not train are counted alike.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from hethub.predictor.cost.software import Software
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.state import StateMap, both_ends_step
from hethub.spec.layout.tensors import tensor_parallel_shares
from hethub.spec.model import ModelSpec
from hethub.spec.plan import ReplicaSpec


class RankWidths(NamedTuple):
    """The numbers of query heads, KV heads, columns of the MLP and vocabulary rows that a rank holds."""

    query: int
    kv: int
    ffn: int
    vocab: int


@lru_cache(maxsize=1024)
def rank_widths(model: ModelSpec, tp: int, tensor_shares: tuple[float, ...] | None = None) -> tuple[RankWidths, ...]:
    """Return the widths of each rank of a replica, in order. Of equal ranks the first has what is left over."""
    return tuple(
        RankWidths(*(held.size for held in shares)) for shares in tensor_parallel_shares(model, tp, tensor_shares)
    )


def replica_widths(model: ModelSpec, replica: ReplicaSpec, software: Software) -> tuple[RankWidths, ...]:
    """Return the widths of each tensor-parallel rank of a replica. Its context-parallel ranks have the same."""
    return rank_widths(model, replica.tp // software.context_parallel, replica.tensor_shares)


class RankParameters(NamedTuple):
    """The parameters on a rank, by tensor. In a search the fields are arrays."""

    layer_matrices: Any
    layer_norms: Any  # and biases
    table: Any  # the rank's rows of the vocabulary: of the embedding, and of the head
    positions: Any
    final_norm: Any
    head: Any  # 0 where it is tied to the embedding

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(model: ModelSpec, widths: RankWidths) -> "RankParameters":
        whole = RankWidths(model.heads, model.num_kv_heads, model.ffn, model.vocab)
        table = widths.vocab * model.hidden
        return RankParameters(
            layer_matrices=_layer_matrices(model, widths),
            layer_norms=model.layer_parameters - _layer_matrices(model, whole),
            table=table,
            positions=model.embedding_parameters - model.vocab * model.hidden,
            final_norm=model.head_parameters - (0 if model.tied_head else model.vocab * model.hidden),
            head=0 if model.tied_head else table,
        )

    def of_layers(self, layers: Any, first: Any, last: Any) -> Any:
        """Return the parameters of `layers` layers, with the embedding if they are the model's first, and with final norm and
        head if they are its last."""
        ends = first * (self.table + self.positions) + last * (self.final_norm + self.head)
        return layers * (self.layer_matrices + self.layer_norms) + ends


def _layer_matrices(model: ModelSpec, widths: RankWidths) -> int:
    attention = 2 * (widths.query + widths.kv) * model.head_size
    return model.hidden * (attention + (3 if model.is_gated else 2) * widths.ffn)


class StageParameters(NamedTuple):
    """The parameters on a rank of a stage, by when they come and go."""

    units: tuple[int, ...]  # per layer of the stage: its matrices, and those of an end of the model beside it
    tied: int  # an embedding that both ends of the stage use: a unit of its own
    norms: int
    apart: int  # an embedding tied to a head on another stage: held by both

    @property
    def total(self) -> int:
        return sum(self.units) + self.tied + self.norms + self.apart

    @property
    def held(self) -> "Held":
        return Held(self.total - self.apart, self.apart)

    @staticmethod
    def of(layout: Layout, stage: int, widths: RankWidths) -> "StageParameters":
        first, last = stage == 0, stage == layout.num_stages - 1
        return _stage_parameters(layout.model, widths, layout.stages[stage].num_layers, first, last)


@lru_cache(maxsize=1024)
def _stage_parameters(
    model: ModelSpec, widths: RankWidths, num_layers: int, first: bool, last: bool
) -> StageParameters:
    """Return the parameters of any stage with `num_layers` layers in this place of the model."""
    rank = RankParameters.of(model, widths)
    units, norms = [rank.layer_matrices] * num_layers, num_layers * rank.layer_norms
    units[0] += first * (rank.positions + (0 if model.tied_head else rank.table))
    units[-1] += last * rank.head
    norms += last * rank.final_norm
    table = rank.table if model.tied_head else 0
    return StageParameters(tuple(units), table if first and last else 0, norms, table if first != last else 0)


class Held(NamedTuple):
    """The parameters of one stage alone, and those of an embedding that is tied to a head on another stage."""

    own: float
    apart: float


def stepped(layout: Layout, software: Software, stage: int, rank: int, held: Held, whole: Held) -> float:
    """Return how many of the parameters that it holds a rank steps: all of them, an equal part, or its share of the stage's.

    `whole` is what the ranks of a replica hold together. Replicas of different degrees divide the state of the whole stage,
    so all ranks step equally much: any group of them holds at least its part of it together. Where uneven cuts are beside
    others, the state map says what each rank steps.
    """
    spec = layout.stages[stage]
    apart = _stepped_apart(layout, software, stage, held.apart)
    if not spec.zero:
        return held.own + apart
    if not spec.state_shares and spec.cut_alike:
        return held.own / (len(spec.replicas) * software.context_parallel) + apart
    if not spec.state_shares and any(replica.uneven_shares for replica in spec.replicas):
        (alone,) = rank_widths(layout.model, 1)
        return _owned_elements(layout)[rank] * sum(whole) / StageParameters.of(layout, stage, alone).total
    shared, apart = (whole.own, apart) if both_ends_step(layout) else (whole.own + (stage == 0) * whole.apart, 0.0)
    if not spec.state_shares:
        return shared / len(spec.ranks) + apart
    return spec.every_state_share[rank] * shared


@lru_cache(maxsize=8)
def _owned_elements(layout: Layout) -> Mapping[int, int]:
    """Return what each rank steps according to the state map. For a large plan this takes a second."""
    return StateMap(layout).owned_elements


def _stepped_apart(layout: Layout, software: Software, stage: int, apart: float) -> float:
    """Return how much a rank steps of an embedding that both ends hold. It is divided among the ranks of both ends, or if one
    of them names shares, among those of the embedding's stage. Other frameworks step both copies."""
    spec = layout.stages[stage]
    shards = len(spec.replicas) * software.context_parallel
    if not software.one_tied_copy:
        return apart / (shards if spec.zero else 1)
    if both_ends_step(layout):
        return apart / sum(len(layout.stages[end].replicas) for end in (0, -1))
    return apart / shards if stage == 0 else 0.0
