"""What a rank's process holds beside the tensors of its plan, on the device and in host memory.

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
    """Return what a rank takes before anything is built: its process on a CPU, its context on an accelerator."""
    return PROCESS_BYTES if on_cpu else CONTEXT_BYTES


def communicator_bytes(num_ranks: int, *, on_cpu: bool) -> int:
    """Return the bytes of the vendor's communicators on an accelerator of an island of `num_ranks`. A rank that is alone has
    none, since what it sends goes through host memory (`hethub/communicator/groups/operations.py`)."""
    return 0 if on_cpu or num_ranks == 1 else COMMUNICATOR_BYTES


def surroundings(shard: Shard, assignment: Assignment, *, on_cpu: bool) -> dict[str, float]:
    """Return the bytes of each part of what surrounds the counted tensors."""
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
    """Return the bytes of offloaded activations that are on the device at a time: those of the previous layer, on their way to
    the host, beside those of the layer at work, while those of the layer that goes backward next are being fetched. On a CPU
    copies end at once."""
    if "activations" not in shard.spec.offload:
        return 0.0
    microbatch = shard.layout.largest_microbatch(assignment.stage, assignment.replica)
    return microbatch * kept_of_layer(shard.kept, shard.spec.recompute, shard.software)


def _loss_bytes(width: int) -> int:
    """Return the bytes of a logit. It is computed in fp32 at least, and its gradient is written over it."""
    return width if width >= 4 else width + 4


def _temporaries(shard: Shard, tokens: float) -> float:
    """Return the bytes of a layer's intermediate results in the backward: six of SwiGLU's width, three of which are gradients,
    and four of the hidden state's width. What the library of matrix products keeps for itself is added."""
    return PACKED_BYTES + tokens * shard.width * (6 * shard.widths.ffn + 4 * shard.layout.model.hidden)


def checkpoint_bytes(shard: Shard, owned: float) -> float:
    """Return the bytes of the copy from which a checkpoint is written: weight and moments of what a rank saves, in fp32 at
    least. Ranks that step the same parameters save equal parts of them. What both ends of a tied head share is always
    divided among them."""
    replicas, own = len(shard.spec.replicas), shard.parameters.held.own
    saved = owned if shard.spec.zero else owned - own + own / replicas
    return 3 * gradient_bytes(shard.width) * saved


def pinned(shard: Shard, assignment: Assignment, owned: float, host: dict[str, float]) -> dict[str, float]:
    """Return what the parts in host memory take if they are pinned. Torch rounds each buffer up to a power of two. All of a part
    is rounded as its largest buffers are. A checkpoint's copy is in pieces that are powers of two."""
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
    """Return the factor by which a buffer of this size grows."""
    return (1 << (int(num_bytes) - 1).bit_length()) / int(num_bytes) if num_bytes > 1 else 1.0
