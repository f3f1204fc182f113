"""Peak bytes of every rank by part, as the runtime allocates them; a plan over memory is refused before it runs."""

from typing import NamedTuple

from hethub.predictor.software import HETHUB, Software, element_bytes
from hethub.spec.errors import BadInput
from hethub.spec.layout import Layout, Seat

FRAMEWORK_BYTES = {"cpu": 0}  # counted by our own accounting on CPUs, which sees tensors only
FRAMEWORK_BYTES_ELSE = int(1.2 * 2**30)  # context, libraries' workspaces and communicators on an accelerator
LOSS_CHUNK_TOKENS = 1024  # cross-entropy is computed on this many tokens at a time


class RankMemory(NamedTuple):
    """Bytes of one rank at its peak: the sum, what the accelerator offers, and the parts."""

    rank: int
    accelerator: str
    bytes: int
    limit: int
    parts: dict[str, int]

    def fits(self, reserve: float) -> bool:
        return self.bytes <= self.limit * (1.0 - reserve)


def memory(layout: Layout, software: Software = HETHUB) -> list[RankMemory]:
    """The peak memory of every rank, in rank order; equal ranks are computed once."""
    known: dict[object, dict[str, int]] = {}
    result = []
    for seat in layout.seats:
        place = layout.cluster.places[seat.rank]
        key = _kind(layout, seat, place.accelerator.vendor)
        parts = known.get(key)
        if parts is None:
            parts = known[key] = _parts(layout, seat, software, place.accelerator.vendor)
        limit = place.accelerator.memory_bytes - int(place.node.reserved_memory_gb * 2**30)
        result.append(RankMemory(seat.rank, place.accelerator.name, sum(parts.values()), limit, parts))
    return result


def check_memory(layout: Layout, reserve: float = 0.06, software: Software = HETHUB) -> None:
    """Raises BadInput naming the rank that needs the most over its accelerator's memory, and what fills it."""
    over = [entry for entry in memory(layout, software) if not entry.fits(reserve)]
    if not over:
        return
    worst = max(over, key=lambda entry: entry.bytes / entry.limit)
    largest = max(worst.parts, key=lambda part: worst.parts[part])
    raise BadInput(
        f"rank {worst.rank} ({worst.accelerator}) would need {worst.bytes / 2**30:.2f} GiB of its {worst.limit / 2**30:.2f} GiB, of which "
        f"{reserve:.0%} stay free; {len(over)} of {len(layout.seats)} ranks are over. Most of it is {largest} "
        f"({worst.parts[largest] / 2**30:.2f} GiB): {_REMEDIES[largest]}."
    )


_REMEDIES = {
    "weights": "give the stage fewer layers or a higher tensor-parallel degree",
    "gradients": "give the stage fewer layers or a higher tensor-parallel degree",
    "optimizer": "set zero: 1 or give the stage fewer layers",
    "activations": "lower micro_batch or in_flight, or set recompute: full",
    "buffers": "lower micro_batch",
    "logits": "lower micro_batch or raise the last stage's tensor-parallel degree",
    "framework": "use an accelerator with more memory",
}


def _kind(layout: Layout, seat: Seat, vendor: str) -> object:
    spec = layout.replica(seat.stage, seat.replica)
    share = layout.stages[seat.stage].state_shares.get(seat.rank)
    position = 0 if spec.tensor_shares is None else seat.position
    return (seat.stage, spec.tp, spec.tensor_shares, position, spec.micro_batch, layout.in_flight[seat.stage][seat.replica], share, vendor)


def _parts(layout: Layout, seat: Seat, software: Software, vendor: str) -> dict[str, int]:
    stage = layout.stages[seat.stage]
    width = element_bytes(software.math_precision(layout.plan.precision))
    wide = max(4, width)
    parameters = _rank_parameters(layout, seat, software)
    shards = len(stage.replicas) * software.context_parallel
    resident = parameters / shards if stage.zero == 3 else parameters
    gradients = parameters / shards if stage.zero >= 2 else parameters
    master = wide if width < 4 else 0
    spec = layout.replica(seat.stage, seat.replica)
    activations = layout.in_flight[seat.stage][seat.replica] * _tile_activation_bytes(layout, seat, software, width)
    hidden = spec.micro_batch * layout.plan.seq_len * layout.model.hidden * width // software.context_parallel
    last = seat.stage == layout.num_stages - 1
    vocab = layout.model.vocab * _fraction(layout, seat, software)
    tokens = min(LOSS_CHUNK_TOKENS, spec.micro_batch * layout.plan.seq_len)
    return {
        "weights": int(resident * width),
        "gradients": int(gradients * wide),
        "optimizer": int(_owned_parameters(layout, seat, parameters, shards) * (master + 2 * wide)),
        "activations": int(activations),
        "buffers": int((4 if layout.num_stages > 1 else 1) * hidden),
        "logits": int(tokens * vocab * wide * 3) if last else 0,
        "framework": FRAMEWORK_BYTES.get(vendor, FRAMEWORK_BYTES_ELSE),
    }


def _fraction(layout: Layout, seat: Seat, software: Software) -> float:
    """The rank's fraction of heads, columns and vocabulary."""
    spec = layout.replica(seat.stage, seat.replica)
    if spec.tensor_shares is None:
        return software.context_parallel / spec.tp
    return spec.tensor_shares[seat.position] / sum(spec.tensor_shares)


def _rank_parameters(layout: Layout, seat: Seat, software: Software) -> float:
    """Parameters a rank holds; norms are on every rank, KV heads at least one."""
    model, stage, share = layout.model, layout.stages[seat.stage], _fraction(layout, seat, software)
    kv = max(model.num_kv_heads * share, 1.0) * model.head_size * 2
    matrices = model.hidden * (2 * model.heads * model.head_size * share + kv + (3 if model.is_gated else 2) * model.ffn * share)
    rest = model.layer_parameters - model.hidden * (
        2 * model.head_size * (model.heads + model.num_kv_heads) + (3 if model.is_gated else 2) * model.ffn
    )
    count = stage.num_layers * (matrices + rest)
    if seat.stage == 0:
        count += model.embedding_parameters * share
    if seat.stage == layout.num_stages - 1:
        count += model.head_parameters * share
        if layout.head_is_apart:
            count += model.vocab * model.hidden * share
    return count


def _owned_parameters(layout: Layout, seat: Seat, parameters: float, shards: int) -> float:
    """Parameters whose optimizer state the rank keeps."""
    stage = layout.stages[seat.stage]
    if stage.zero == 0:
        return parameters
    if not stage.state_shares:
        return parameters / shards
    whole = parameters * layout.replica(seat.stage, seat.replica).tp
    named = stage.state_shares.get(seat.rank)
    rest = (1.0 - sum(stage.state_shares.values())) / max(1, len(stage.ranks) - len(stage.state_shares))
    return whole * (rest if named is None else named)


def _tile_activation_bytes(layout: Layout, seat: Seat, software: Software, width: int) -> float:
    """Bytes that one tile keeps from its forward to its backward on this rank (method of arXiv 2205.05198, §4).

    Per token and layer: inputs of norms, products and the activation function; with `full` recompute the layer's
    input only, and one layer at a time in full.
    """
    model, stage, spec = layout.model, layout.stages[seat.stage], layout.replica(seat.stage, seat.replica)
    share = _fraction(layout, seat, software)
    tokens = spec.micro_batch * layout.plan.seq_len / software.context_parallel
    replicated = model.hidden * (share if software.sequence_parallel else 1.0)
    heads = (model.heads + 2 * model.num_kv_heads) * model.head_size * share
    columns = model.ffn * share * (4 if model.is_gated else 2)
    layer = tokens * width * (4 * replicated + heads + model.heads * model.head_size * share + columns)
    if not software.fused_attention and stage.recompute == "none":
        layer += 2.5 * width * model.heads * share * spec.micro_batch * layout.plan.seq_len**2 / software.context_parallel
    if stage.recompute == "full":
        return stage.num_layers * tokens * replicated * width + layer / max(1, layout.in_flight[seat.stage][seat.replica])
    return stage.num_layers * layer
