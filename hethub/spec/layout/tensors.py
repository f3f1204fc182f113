"""The tensors of a Llama by their Hugging Face names, and how a replica's ranks share each of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hethub.spec.errors import BadInput
from hethub.spec.model import ModelSpec
from hethub.spec.plan import ReplicaSpec
from hethub.spec.ranges import Range, split, split_by_shares

Axis = Literal["query", "kv", "ffn", "vocab"]
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
IGNORED = -100  # a target that counts for nothing, as torch and Hugging Face have it
LOSS_CHUNK_TOKENS = 1024  # tokens whose logits the head holds at once


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One parameter: shape as Hugging Face has it (out, in), and the dimension that tensor parallelism cuts.

    We store every tensor with the cut dimension first, so any rank's shard is one run of the flattened tensor.
    """

    name: str
    shape: tuple[int, ...]
    split_dim: Literal[0, 1] | None = None
    axis: Axis | None = None
    unit: int = 1  # rows (or columns) per unit of the axis: head_dim for heads

    @property
    def numel(self) -> int:
        return self.shape[0] * (self.shape[1] if len(self.shape) > 1 else 1)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in storage: cut dimension first."""
        return self.shape[::-1] if self.split_dim == 1 else self.shape

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms."""
        return len(self.shape) > 1

    def held(self, shares: "RankShares") -> Range:
        """The run of the flattened stored tensor that a rank with `shares` holds."""
        if self.axis is None:
            return Range(0, self.numel)
        per_unit = self.unit * self.stored_shape[1]
        owned: Range = getattr(shares, self.axis)
        return Range(owned.start * per_unit, owned.stop * per_unit)


class RankShares(NamedTuple):
    """What one rank of a replica holds: ranges of query heads, KV heads, ffn columns and vocabulary rows."""

    query: Range
    kv: Range
    ffn: Range
    vocab: Range


def layer_tensors(model: ModelSpec, layer: int) -> Iterator[TensorInfo]:
    """The parameters of one layer, matrices first."""
    prefix, hidden, head = f"model.layers.{layer}.", model.hidden, model.head_size
    query, kv = model.heads * head, model.num_kv_heads * head
    yield TensorInfo(f"{prefix}self_attn.q_proj.weight", (query, hidden), 0, "query", head)
    yield TensorInfo(f"{prefix}self_attn.k_proj.weight", (kv, hidden), 0, "kv", head)
    yield TensorInfo(f"{prefix}self_attn.v_proj.weight", (kv, hidden), 0, "kv", head)
    yield TensorInfo(f"{prefix}self_attn.o_proj.weight", (hidden, query), 1, "query", head)
    yield TensorInfo(f"{prefix}mlp.gate_proj.weight", (model.ffn, hidden), 0, "ffn")
    yield TensorInfo(f"{prefix}mlp.up_proj.weight", (model.ffn, hidden), 0, "ffn")
    yield TensorInfo(f"{prefix}mlp.down_proj.weight", (hidden, model.ffn), 1, "ffn")
    yield TensorInfo(f"{prefix}input_layernorm.weight", (hidden,))
    yield TensorInfo(f"{prefix}post_attention_layernorm.weight", (hidden,))


def embedding_tensor(model: ModelSpec) -> TensorInfo:
    return TensorInfo(EMBEDDING, (model.vocab, model.hidden), 0, "vocab")


def head_tensor(model: ModelSpec) -> TensorInfo:
    return TensorInfo(HEAD, (model.vocab, model.hidden), 0, "vocab")


def final_norm_tensor(model: ModelSpec) -> TensorInfo:
    return TensorInfo(FINAL_NORM, (model.hidden,))


def stage_tensors(model: ModelSpec, chunks: tuple[Range, ...]) -> list[TensorInfo]:
    """The parameters that a stage's state counts: embedding with layer 0, head and final norm with the last layer.

    A tied head is the embedding, so it belongs to the stage of layer 0 alone. Matrices come in forward order, norms
    after all of them, so that a rank's shards of neighbouring matrices touch in its flat storage.
    """
    layers = [tensor for chunk in chunks for layer in range(*chunk) for tensor in layer_tensors(model, layer)]
    matrices = [tensor for tensor in layers if tensor.decays]
    norms = [tensor for tensor in layers if not tensor.decays]
    if chunks[0].start == 0:
        matrices.insert(0, embedding_tensor(model))
    if chunks[-1].stop == model.layers:
        norms.append(final_norm_tensor(model))
        if not model.tied_head:
            matrices.append(head_tensor(model))
    return matrices + norms


def model_tensors(model: ModelSpec) -> list[TensorInfo]:
    """All parameters of the model, each once."""
    return stage_tensors(model, (Range(0, model.layers),))


def tp_degrees(model: ModelSpec) -> list[int]:
    """The tensor-parallel degrees with equal shares that split heads by whole KV groups, or share KV heads evenly."""
    kv, heads = model.num_kv_heads, model.heads
    return [d for d in range(1, heads + 1) if kv % d == 0 or (d % kv == 0 and heads % d == 0)]


def rank_shares(model: ModelSpec, replica: ReplicaSpec, place: str) -> list[RankShares]:
    """What each rank of the replica holds, in the order of its ranks.

    With more ranks than KV heads (equal shares only), neighbouring ranks hold the same KV head and each a part of its
    queries. `place` names the replica in errors. Raises BadInput where heads do not divide.
    """
    _check_heads_divide(model, replica, place)
    result = tensor_parallel_shares(model, replica.tp, replica.tensor_shares)
    for rank, held in zip(replica.ranks, result, strict=True):
        if not all(held):
            raise BadInput(
                f"{place}: tensor_shares {list(replica.tensor_shares or (1,) * replica.tp)} leave rank {rank} without a part of the "
                f"{model.num_kv_heads} key-value heads, the ffn columns or the vocabulary; raise its share or take the rank out of the "
                "replica."
            )
    return result


def tensor_parallel_shares(model: ModelSpec, tp: int, tensor_shares: Sequence[float] | None) -> list[RankShares]:
    """Return `rank_shares` for any replica of `tp` ranks whose heads are known to divide."""
    kv_heads, shares = model.num_kv_heads, tensor_shares or (1,) * tp
    ffn, vocab = split_by_shares(model.ffn, shares, _unit(model.ffn, tp)), split_by_shares(model.vocab, shares)
    if tp > kv_heads:
        query = split(model.heads, tp)
        kv = [Range(i * kv_heads // tp, i * kv_heads // tp + 1) for i in range(tp)]
    else:
        kv = split_by_shares(kv_heads, shares)
        per_group = model.heads // kv_heads
        query = [Range(r.start * per_group, r.stop * per_group) for r in kv]
    return [RankShares(*each) for each in zip(query, kv, ffn, vocab, strict=True)]


def _check_heads_divide(model: ModelSpec, replica: ReplicaSpec, place: str) -> None:
    tp, kv_heads, shares = replica.tp, model.num_kv_heads, replica.tensor_shares
    if tp > kv_heads and shares is not None and len(set(shares)) > 1:
        raise BadInput(
            f"{place}: tensor_shares {list(shares)} give {tp} ranks uneven parts of {kv_heads} key-value heads; ranks that share a "
            f"head take equally many of its queries. Remove tensor_shares, or use at most {kv_heads} ranks."
        )
    if tp not in tp_degrees(model) and (shares is None or tp > kv_heads):
        uneven = "; or give tensor_shares for uneven heads" if tp < kv_heads else ""
        raise BadInput(
            f"{place}: TP {tp} does not divide the {kv_heads} key-value heads of model '{model.name}' ({model.heads} heads). "
            f"Degrees that work: {', '.join(map(str, tp_degrees(model)))}{uneven}."
        )


def _unit(total: int, parts: int) -> int:
    """Columns are dealt in eights where that leaves every part some: odd widths slow matrix products down."""
    return 8 if total % 8 == 0 and total // 8 >= 4 * parts else 1
