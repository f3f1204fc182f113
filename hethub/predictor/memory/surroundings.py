"""What a rank's process holds beside the tensors that its plan names, and what lies in host memory for it.

On an accelerator: context, communicators' buffers, buffers of messages and logits, and a layer's activations on their
way to the host. On a CPU, where the process is all there is: what importing torch takes, blocks of shared memory, and
what a layer needs while it computes. Measured by `benchmarks/memory.py`.
"""

from hethub.predictor.cost.software import gradient_bytes
from hethub.predictor.memory.activations import kept_of_layer
from hethub.predictor.memory.shards import Shard
from hethub.spec.layout.bind import Assignment
from hethub.spec.layout.state import brought_elements
from hethub.spec.layout.tensors import LOSS_CHUNK_TOKENS

CONTEXT_BYTES = int(1.2 * 2**30)
COMMUNICATOR_BYTES = int(2.5 * 2**30)
PACKED_BYTES = 11 << 20  # of operands in an order of its own that MKL keeps, by one thread, as measured
PROCESS_BYTES = 256 << 20  # private memory of a process that has imported torch and hethub; libraries' pages are shared


def framework_bytes(*, on_cpu: bool) -> int:
    """What a rank takes before anything is built: its process on a CPU, its context on an accelerator."""
    return PROCESS_BYTES if on_cpu else CONTEXT_BYTES


def communicator_bytes(num_ranks: int, *, on_cpu: bool) -> int:
    """The vendor's communicators of an accelerator on an island of so many ranks. One alone has none: what it sends passes
    host memory (`hethub/communicator/groups/operations.py`)."""
    return 0 if on_cpu or num_ranks == 1 else COMMUNICATOR_BYTES


def surroundings(shard: Shard, assignment: Assignment, *, on_cpu: bool) -> dict[str, float]:
    """Bytes by part of what surrounds the counted tensors."""
    layout, software, width = shard.layout, shard.software, shard.width
    model, samples = layout.model, layout.largest_microbatch(assignment.stage, assignment.replica)
    island = layout.cluster.islands[layout.cluster.places[assignment.rank].island]
    tokens = samples * layout.plan.seq_len / software.context_parallel
    hidden = tokens * model.hidden * width
    tables = 2 * layout.plan.seq_len * model.head_size * width  # of positions
    held_tokens = min(tokens, LOSS_CHUNK_TOKENS) if software.chunked_loss else tokens
    logits = held_tokens * shard.widths.vocab * (assignment.stage == layout.num_stages - 1)
    return {
        "buffers": tables
        + (4 if layout.num_stages > 1 else 1) * hidden
        + (not on_cpu) * _leaving_bytes(shard, assignment),
        "logits": logits * (_loss_bytes(width) if on_cpu else software.loss_bytes),
        "temporaries": _temporaries(shard, tokens) if on_cpu else 0.0,
        "communicator": communicator_bytes(len(island), on_cpu=on_cpu),
        "framework": framework_bytes(on_cpu=on_cpu),
    }


def _leaving_bytes(shard: Shard, assignment: Assignment) -> float:
    """What a microbatch keeps of the layer before, on its way to the host beside that of the layer at work, while that of
    the layer which goes backward next is fetched already. On a CPU copies are done when they begin."""
    if "activations" not in shard.spec.offload:
        return 0.0
    microbatch = shard.layout.largest_microbatch(assignment.stage, assignment.replica)
    return microbatch * kept_of_layer(shard.kept, shard.spec.recompute, shard.software)


def _loss_bytes(width: int) -> int:
    """Bytes of a logit: its gradient is written over it, computed in fp32 at least."""
    return width if width >= 4 else width + 4


def _temporaries(shard: Shard, tokens: float) -> float:
    """A layer's intermediate results in backward: six of SwiGLU's width, of which three are its gradients, and four of the
    hidden state's. What the library of products keeps for itself stays."""
    return PACKED_BYTES + tokens * shard.width * (6 * shard.widths.ffn + 4 * shard.layout.model.hidden)


def checkpoint_bytes(shard: Shard, owned: float) -> float:
    """The copy that a checkpoint is written from: weight and moments, in fp32 at least, of all that a rank saves. Ranks
    that step the same save equal parts of it; what both ends of a tied head share is cut over them in any case."""
    replicas, own = len(shard.spec.replicas), shard.parameters.held.own
    saved = owned if shard.spec.zero else owned - own + own / replicas
    return 3 * gradient_bytes(shard.width) * saved


def pinned(shard: Shard, assignment: Assignment, owned: float, host: dict[str, float]) -> dict[str, float]:
    """What the host's parts take where they are pinned: torch rounds every buffer up to a power of two. Parts are rounded
    as their largest buffers are; a checkpoint's copy lies in pieces that are powers of two."""
    layout, units = shard.layout, shard.parameters.units
    tokens = layout.largest_microbatch(assignment.stage, assignment.replica) * layout.plan.seq_len
    sizes = {
        # A unit's, or what the rank keeps of it.
        "weights": host["weights"] * units[-1] / (sum(units) + shard.parameters.tied),
        "optimizer": gradient_bytes(shard.width) * min(brought_elements(), owned),
        "activations": shard.width * tokens * shard.widths.ffn,
    }
    return {part: size * _rounding(sizes.get(part, 0.0)) for part, size in host.items()}


def _rounding(num_bytes: float) -> float:
    """By how much a buffer of that size grows."""
    return (1 << (int(num_bytes) - 1).bit_length()) / int(num_bytes) if num_bytes > 1 else 1.0
