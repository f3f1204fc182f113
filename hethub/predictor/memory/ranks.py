"""Peak bytes of every rank by what they are for, as the runtime allocates them; a plan over memory is refused before it runs."""

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from hethub.predictor.cost.constants import is_cpu
from hethub.predictor.cost.software import HETHUB, Software, element_bytes, gradient_bytes
from hethub.predictor.memory.activations import HeldActivations, held_microbatches
from hethub.predictor.memory.parameters import RankWidths, replica_widths
from hethub.predictor.memory.peak import Moment, moments
from hethub.predictor.memory.shards import Shard
from hethub.predictor.memory.state import Resident, resident
from hethub.spec.cluster import NodeSpec
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.layout.tensors import LOSS_CHUNK_TOKENS

# On an accelerator memory is the allocator's peak: beside our tensors the context, the libraries' workspaces, and the
# buffers of communicators. On a CPU it is the runtime's count of the tensors it keeps
# (hethub.runtime.memory.accounting).
CONTEXT_BYTES = int(1.2 * 2**30)
COMMUNICATOR_BYTES = int(2.5 * 2**30)
LOSS_BYTES_PER_LOGIT = 10  # half-precision logits, their fp32 copy, and its gradient


class RankMemory(NamedTuple):
    """Bytes of one rank at its peak: the sum, what the accelerator offers, the parts, and what lies in host memory."""

    rank: int
    accelerator: str
    bytes: int
    limit: int
    parts: dict[str, int]
    host_bytes: int = 0

    def fits(self, reserve: float) -> bool:
        return self.bytes <= self.limit * (1.0 - reserve)


def rank_memory(layout: Layout, software: Software = HETHUB) -> list[RankMemory]:
    """The peak memory of every rank, in rank order; equal ranks are computed once."""
    known: dict[object, tuple[dict[str, int], int, int]] = {}
    shards: dict[tuple[int, RankWidths], Shard] = {}
    nodes = {node.name: _Node.of(node) for node in layout.cluster.nodes}
    width = element_bytes(software.math_precision(layout.plan.precision))
    result, places = [], layout.cluster.places
    for stage, stage_spec in enumerate(layout.stages):
        named = stage_spec.state_shares
        for replica, spec in enumerate(stage_spec.replicas):
            load = (stage, spec.micro_batch, spec.samples, layout.in_flight[stage][replica])
            cut = replica_widths(layout.model, spec, software)
            for position, rank in enumerate(spec.ranks):
                node, widths = nodes[places[rank].node.name], cut[position % len(cut)]
                key = (load, widths, named.get(rank), node.on_cpu)
                if key not in known:
                    shard = shards.setdefault((stage, widths), Shard(layout, stage, widths, software, width))
                    parts, host = _parts(shard, Assignment(rank, stage, replica, position), node.on_cpu)
                    known[key] = parts, host, sum(parts.values())
                parts, host, whole = known[key]
                result.append(RankMemory(rank, node.accelerator, whole, node.limit, parts, host))
    return sorted(result, key=itemgetter(0))


class _Node(NamedTuple):
    """What a node's ranks have."""

    accelerator: str
    on_cpu: bool
    limit: int

    @staticmethod
    def of(node: NodeSpec) -> "_Node":
        limit = node.device.memory_bytes - int(node.reserved_memory_gb * 2**30)
        return _Node(node.device.name, is_cpu(node.device), limit)


def check_memory(layout: Layout, reserve: float = 0.06, software: Software = HETHUB) -> None:
    """Raises BadInput naming the rank that needs the most over its accelerator's memory, and what fills it, or the node
    whose host memory cannot take what its ranks offload."""
    used = rank_memory(layout, software)
    _check_hosts(layout, used)
    over = [entry for entry in used if not entry.fits(reserve)]
    if not over:
        return
    worst = max(over, key=lambda entry: entry.bytes / entry.limit)
    largest = max(worst.parts, key=lambda part: worst.parts[part])
    raise BadInput(
        f"rank {worst.rank} ({worst.accelerator}) would need {worst.bytes / 2**30:.2f} GiB of its {worst.limit / 2**30:.2f} GiB, of which "
        f"{reserve:.0%} stay free; {len(over)} of {len(layout.assignments)} ranks are over. Most of it is {largest} "
        f"({worst.parts[largest] / 2**30:.2f} GiB): {_REMEDIES[largest]}."
    )


def _check_hosts(layout: Layout, used: Sequence[RankMemory]) -> None:
    """Raises BadInput where the ranks of a machine offload more than its host memory, if that is known."""
    found = _overfull_host(layout, used)
    if found is not None:
        node, held = found
        raise BadInput(
            f"node '{node.name}': its ranks would offload {held / 2**30:.2f} GiB to host memory, of which it has "
            f"{node.host_memory_gb:g} GiB; offload less on its stages, or give host_memory_gb as it is."
        )


def _overfull_host(layout: Layout, used: Sequence[RankMemory]) -> tuple[NodeSpec, int] | None:
    """The first node one of whose machines offloads more than its host memory, and the bytes; None where all fit."""
    places = layout.cluster.places
    by_machine: Counter[int] = Counter()
    for entry in used:
        by_machine[places[entry.rank].machine] += entry.host_bytes
    for entry in used:
        place = places[entry.rank]
        limit = place.node.host_memory_gb
        if entry.host_bytes and limit is not None and by_machine[place.machine] > limit * 2**30:
            return place.node, by_machine[place.machine]
    return None


def all_fit(layout: Layout, used: Sequence[RankMemory], reserve: float) -> bool:
    """Whether every rank leaves `reserve` of its accelerator's memory free, and every machine's host memory
    suffices."""
    return all(entry.fits(reserve) for entry in used) and hosts_fit(layout, used)


def hosts_fit(layout: Layout, used: Sequence[RankMemory]) -> bool:
    """Whether every machine's host memory, where it is known, takes what its ranks offload."""
    return _overfull_host(layout, used) is None


_REMEDIES = {
    "weights": "give the stage fewer layers or a higher tensor-parallel degree",
    "gradients": "give the stage fewer layers or a higher tensor-parallel degree",
    "optimizer": "set zero: 1 or give the stage fewer layers",
    "activations": "lower micro_batch or in_flight, or set recompute: full",
    "buffers": "lower micro_batch",
    "logits": "lower micro_batch or raise the last stage's tensor-parallel degree",
    "framework": "use an accelerator with more memory",
}


def _parts(shard: Shard, assignment: Assignment, on_cpu: bool) -> tuple[dict[str, int], int]:
    """Bytes by part on the accelerator, and those in host memory."""
    layout, software, width = shard.layout, shard.software, shard.width
    spec, model = layout.replica(assignment.stage, assignment.replica), layout.model
    state, sizes = resident(shard, assignment), [chunk.size for chunk in shard.chunks]
    microbatches, activations_host = held_microbatches(layout, assignment, shard.kept, sizes, software)
    peak = _peak(shard, assignment, microbatches, state)
    computing = peak.activations + width * peak.weights + gradient_bytes(width) * peak.gradients
    hidden = spec.micro_batch * layout.plan.seq_len * model.hidden * width // software.context_parallel
    tokens = spec.micro_batch * layout.plan.seq_len / software.context_parallel
    held_tokens = min(tokens, LOSS_CHUNK_TOKENS) if software.chunked_loss else tokens
    logits = held_tokens * shard.widths.vocab
    tables = 2 * layout.plan.seq_len * model.head_size * width  # of positions
    counted = 0 if on_cpu else 1
    last = assignment.stage == layout.num_stages - 1
    parts = {
        "weights": int(width * (state.weights + peak.weights)),
        "gradients": int(gradient_bytes(width) * (state.gradients + peak.gradients)),
        # The update comes when what computing needed is gone again.
        "optimizer": int(state.optimizer_bytes + max(0.0, state.update_bytes - computing)),
        "activations": int(peak.activations),
        "buffers": int(tables + counted * (4 if layout.num_stages > 1 else 1) * hidden),
        "logits": int(counted * last * logits * LOSS_BYTES_PER_LOGIT),
        "framework": framework_bytes(layout.cluster.size, on_cpu),
    }
    return parts, int(state.host_bytes + activations_host)


def framework_bytes(num_ranks: int, on_cpu: bool) -> int:
    """What context and communicators take of an accelerator in a job of so many ranks; one alone has no communicator."""
    return 0 if on_cpu else CONTEXT_BYTES + (COMMUNICATOR_BYTES if num_ranks > 1 else 0)


def _peak(shard: Shard, assignment: Assignment, microbatches: HeldActivations, state: Resident) -> Moment:
    """The moment with the most bytes; nothing counted there of what stays for good."""
    if not (state.moves_weights or state.moves_gradients):
        return Moment(microbatches.activations, 0.0, 0.0)
    weights, gradients = shard.width * state.moves_weights, gradient_bytes(shard.width) * state.moves_gradients
    most = max(
        moments(shard, assignment, microbatches),
        key=lambda now: now.activations + now.weights * weights + now.gradients * gradients,
    )
    return Moment(most.activations, most.weights * state.moves_weights, most.gradients * state.moves_gradients)
