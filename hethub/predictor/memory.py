"""Peak bytes of every rank by part, as the runtime allocates them; a plan over memory is refused before it runs."""

from typing import NamedTuple

from hethub.predictor.constants import family
from hethub.predictor.software import HETHUB, Software, element_bytes
from hethub.spec.errors import BadInput
from hethub.spec.layout import Layout, Seat
from hethub.spec.tensors import LOSS_CHUNK_TOKENS

# On an accelerator memory is the allocator's peak: beside our tensors the context, the libraries' workspaces, and the
# buffers of communicators. On a CPU it is the runtime's count of the tensors it keeps (hethub.runtime.accounting).
CONTEXT_BYTES = int(1.2 * 2**30)
COMMUNICATOR_BYTES = int(2.5 * 2**30)
LOSS_BYTES_PER_LOGIT = 10  # half-precision logits, their fp32 copy, and its gradient


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
    for stage, stage_spec in enumerate(layout.stages):
        for replica, spec in enumerate(stage_spec.replicas):
            flight = layout.in_flight[stage][replica]
            for position, rank in enumerate(spec.ranks):
                place = layout.cluster.places[rank]
                accelerator, node = place.accelerator, place.node
                shares = (None if spec.tensor_shares is None else position, stage_spec.state_shares.get(rank))
                key = (stage, spec.tp, spec.tensor_shares, *shares, spec.micro_batch, flight, node.name)
                parts = known.get(key)
                if parts is None:
                    on_cpu = family(accelerator) == "cpu"
                    parts = known[key] = _parts(layout, Seat(rank, stage, replica, position), flight, software, on_cpu)
                limit = accelerator.memory_bytes - int(node.reserved_memory_gb * 2**30)
                result.append(RankMemory(rank, accelerator.name, sum(parts.values()), limit, parts))
    return sorted(result)


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


def _parts(layout: Layout, seat: Seat, flight: int, software: Software, on_cpu: bool) -> dict[str, int]:
    stage = layout.stages[seat.stage]
    width = element_bytes(software.math_precision(layout.plan.precision))
    wide = max(4, width)
    parameters = _rank_parameters(layout, seat, software)
    shards = len(stage.replicas) * software.context_parallel
    resident = parameters / shards if stage.zero == 3 else parameters
    gradients = parameters / shards if stage.zero >= 2 else parameters
    master = wide if width < 4 else 0
    spec = layout.replica(seat.stage, seat.replica)
    activations = flight * _tile_activation_bytes(layout, seat, flight, software, width)
    hidden = spec.micro_batch * layout.plan.seq_len * layout.model.hidden * width // software.context_parallel
    tokens = spec.micro_batch * layout.plan.seq_len / software.context_parallel
    held_tokens = min(tokens, LOSS_CHUNK_TOKENS) if software.chunked_loss else tokens
    logits = held_tokens * layout.model.vocab * _fraction(layout, seat, software)
    counted = 0 if on_cpu else 1
    last = seat.stage == layout.num_stages - 1
    return {
        "weights": int(resident * width),
        "gradients": int(gradients * wide),
        "optimizer": int(_owned_parameters(layout, seat, software) * (master + 2 * wide)),
        "activations": int(activations),
        "buffers": int(counted * (4 if layout.num_stages > 1 else 1) * hidden),
        "logits": int(counted * last * logits * LOSS_BYTES_PER_LOGIT),
        "framework": counted * (CONTEXT_BYTES + (COMMUNICATOR_BYTES if len(layout.seats) > 1 else 0)),
    }


def _fraction(layout: Layout, seat: Seat, software: Software) -> float:
    """The rank's fraction of heads, columns and vocabulary."""
    spec = layout.replica(seat.stage, seat.replica)
    if spec.tensor_shares is None:
        return software.context_parallel / spec.tp
    return spec.tensor_shares[seat.position] / sum(spec.tensor_shares)


def _rank_parameters(layout: Layout, seat: Seat, software: Software) -> float:
    """Parameters a rank holds; norms are on every rank, KV heads at least one."""
    return _stage_parameters(layout, seat.stage, _fraction(layout, seat, software))


def _stage_parameters(layout: Layout, index: int, share: float) -> float:
    """Parameters of a stage on a rank with `share` of the heads, columns and vocabulary."""
    model, stage = layout.model, layout.stages[index]
    columns = (3 if model.is_gated else 2) * model.ffn
    kv = max(model.num_kv_heads * share, 1.0) * model.head_size * 2
    matrices = model.hidden * (2 * model.heads * model.head_size * share + kv + columns * share)
    whole = model.hidden * (2 * model.head_size * (model.heads + model.num_kv_heads) + columns)
    count = stage.num_layers * (matrices + model.layer_parameters - whole)
    if index == 0:
        count += model.embedding_parameters * share
    if index == layout.num_stages - 1:
        count += model.head_parameters * share
        if layout.head_is_apart:
            count += model.vocab * model.hidden * share
    return count


def _owned_parameters(layout: Layout, seat: Seat, software: Software) -> float:
    """Parameters whose optimizer state the rank keeps: its named share of the stage's, or an equal part of the rest."""
    stage = layout.stages[seat.stage]
    if stage.zero == 0:
        return _rank_parameters(layout, seat, software)
    if (named := stage.state_shares.get(seat.rank)) is None:
        named = (1.0 - sum(stage.state_shares.values())) / (len(stage.ranks) - len(stage.state_shares))
    return named * _stage_parameters(layout, seat.stage, 1.0)


def _tile_activation_bytes(layout: Layout, seat: Seat, flight: int, software: Software, width: int) -> float:
    """Bytes that one tile keeps from its forward to its backward on this rank.

    With `full` recompute that is every layer's input, and one layer at a time in full.
    """
    model, stage, spec = layout.model, layout.stages[seat.stage], layout.replica(seat.stage, seat.replica)
    share = _fraction(layout, seat, software)
    tokens = spec.micro_batch * layout.plan.seq_len / software.context_parallel
    hidden = model.hidden * (share if software.sequence_parallel else 1.0)
    layer = tokens * _layer_bytes_per_token(layout, share, hidden, software, width)
    if not software.fused_attention and stage.recompute == "none":
        layer += (
            2.5 * width * model.heads * share * spec.micro_batch * layout.plan.seq_len**2 / software.context_parallel
        )
    ends = tokens * 9 if seat.stage == 0 else 0  # token ids and which of them are held
    one_input = tokens * hidden * width
    if stage.recompute == "full":  # the head is through before a layer is run again, and each layer has its own input
        return ends + stage.num_layers * one_input + (layer - one_input) / flight
    if seat.stage == layout.num_stages - 1:
        ends += 2 * one_input  # the final norm's input, the loss's gradient
    if stage.recompute == "selective" and software.selective_fraction is not None:
        layer *= KEPT_UNDER_SELECTIVE
    return ends + stage.num_layers * layer


KEPT_UNDER_SELECTIVE = 0.45  # of a layer's activations, where every second product is run again


def _layer_bytes_per_token(layout: Layout, share: float, hidden: float, software: Software, width: int) -> float:
    """What one layer keeps per token (method of arXiv 2205.05198, §4), for hethub's layers or an eager framework's.

    Ours: both norms' inputs and results, rotated queries and keys, values, attention's result, and for SwiGLU gate, up
    and their product; norms' scales and attention's log-sums in fp32.
    """
    model = layout.model
    query = model.heads * model.head_size * share
    kv = max(model.num_kv_heads * share, 1.0) * model.head_size
    columns = model.ffn * share * ((3 if software.stack == "hethub" else 4) if model.is_gated else 2)
    return width * (4 * hidden + 2 * query + 2 * kv + columns) + max(4, width) * (2 + model.heads * share)
