"""Which element of which tensor a rank's state is: what makes a checkpoint independent of the plan.

Every parameter has three entries, each a one-dimensional tensor in stored order (cut dimension first, flattened):
`weights/NAME` in at least fp32 (the masters of half precisions), `exp_avg/NAME` and `exp_avg_sq/NAME`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hethub.kernels.device import Device
from hethub.runtime.state.optimizer import Optimizer, OwnedRun
from hethub.runtime.state.storage import FlatStorage
from hethub.spec.ranges import Range, from_sizes, overlap

WEIGHTS, FIRST_MOMENT, SECOND_MOMENT = "weights", "exp_avg", "exp_avg_sq"
KINDS = (WEIGHTS, FIRST_MOMENT, SECOND_MOMENT)

# A reader under another plan loads whole chunks, so their size bounds what it reads and holds in vain: this much, and of
# large models at most this part. Rank 0 plans and lists all chunks, 300,000 of them in a minute.
CHUNK_ELEMENTS = 4 * 2**20
PART_OF_MODEL = 4096


@dataclass(frozen=True, slots=True)
class Chunk:
    """`values` (n,) of the entry `key`, which has `numel` elements, from element `offset` on."""

    key: str
    numel: int
    offset: int
    values: Tensor


def entry(kind: str, name: str) -> str:
    """The key of one kind of a tensor's state."""
    return f"{kind}/{name}"


def state_of(run: OwnedRun) -> dict[str, Tensor]:
    """The optimizer's own tensors for an owned run by kind, each with an element for every one of the run's."""
    return dict(zip(KINDS, run.state, strict=True))


def owned_chunks(run: OwnedRun, values: Mapping[str, Tensor], wanted: Sequence[Range] | None = None) -> Iterator[Chunk]:
    """`values` (a tensor per kind, elements as in the run) as views that a checkpoint knows by key and offset; only what
    lies in the ranges `wanted` of the flat axis, where these are given."""
    for (placed, span), place in zip(run.axis, from_sizes(span.size for _, span in run.axis), strict=True):
        for part in [span] if wanted is None else [overlap(span, each) for each in wanted]:
            where = part.shift(place.start - span.start)
            for kind, tensor in values.items() if part else ():
                key, offset = entry(kind, placed.info.name), part.start - placed.span.start
                yield Chunk(key, placed.info.numel, offset, tensor[where.start : where.stop])


def held_chunks(storage: FlatStorage) -> Iterator[Chunk]:
    """All weights that a rank keeps, its own and copies of others', as views."""
    for placed, run, values in storage.persistent():
        yield Chunk(entry(WEIGHTS, placed.info.name), placed.info.numel, run.start - placed.span.start, values)


def most_elements(parameters: int) -> int:
    """The size of a chunk of a model with so many parameters: CHUNK_ELEMENTS, or doubled as often as it stays within
    PART_OF_MODEL of it."""
    most = CHUNK_ELEMENTS
    while 2 * most * PART_OF_MODEL <= parameters:
        most *= 2
    return most


def cut(chunk: Chunk, most: int) -> Iterator[Chunk]:
    """The chunk in pieces of at most `most` elements, each CHUNK_ELEMENTS, doubled so many times, but for a shorter last
    one: pinned memory comes in powers of two."""
    start, size, numel = 0, most, chunk.values.numel()
    while start < numel:
        while size > CHUNK_ELEMENTS and size > numel - start:
            size //= 2
        yield Chunk(chunk.key, chunk.numel, chunk.offset + start, chunk.values[start : start + size])
        start += size


def snapshot(optimizer: Optimizer, device: Device) -> list[Chunk]:
    """A copy in host memory of the state that this rank saves, complete on return: training may go on.

    Without sharding the ranks of a group own the same elements, and each saves a part of them. Each chunk has a storage of
    its own: of a part of a larger one DCP makes another copy, and keeps it until all is written.
    """
    chunks = []
    most = most_elements(optimizer.storage.state.layout.model.parameters)
    for run in optimizer.runs:
        for chunk in owned_chunks(run, state_of(run), run.saved):
            for piece in cut(chunk, most):
                copy = device.host_buffer(piece.values.nbytes).view(piece.values.dtype)
                copy.copy_(piece.values, non_blocking=True)
                chunks.append(replace(piece, values=copy))
    device.synchronize()
    return chunks
