"""Which element of which tensor a rank's state is: what makes a checkpoint independent of the plan.

Every parameter has three entries, each a one-dimensional tensor in stored order (cut dimension first, flattened):
`weights/NAME` in at least fp32 (the masters of half precisions), `exp_avg/NAME` and `exp_avg_sq/NAME`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hethub.kernels.device import Device
from hethub.runtime.optimizer import Optimizer, OwnedRun
from hethub.runtime.storage import FlatStorage
from hethub.spec.ranges import Range, overlap
from hethub.spec.state import PlacedTensor

WEIGHTS, FIRST_MOMENT, SECOND_MOMENT = "weights", "exp_avg", "exp_avg_sq"
KINDS = (WEIGHTS, FIRST_MOMENT, SECOND_MOMENT)

# A reader under another plan loads whole chunks, so their size bounds what it reads and holds in vain.
CHUNK_ELEMENTS = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Chunk:
    """`values` (n,) of the entry `key`, which has `numel` elements, from element `offset` on."""

    key: str
    numel: int
    offset: int
    values: Tensor


class Part(NamedTuple):
    """A run of local storage that lies in one tensor: `span` in the flattened stored tensor, `local` in storage."""

    placed: PlacedTensor
    span: Range
    local: Range


def entry(kind: str, name: str) -> str:
    """The key of one kind of a tensor's state."""
    return f"{kind}/{name}"


def parts(storage: FlatStorage, local: Range) -> Iterator[Part]:
    """A run of a rank's storage cut at the borders of tensors."""
    for placed, run in storage.held:
        here = storage.local(run)
        common = overlap(here, local)
        if common:
            yield Part(placed, common.shift(run.start - placed.span.start - here.start), common)


def state_of(optimizer: Optimizer, run: OwnedRun) -> dict[str, Tensor]:
    """The optimizer's own tensors for an owned run by kind, each with an element for every one of `run.local`."""
    return dict(zip(KINDS, (run.master.detach(), *optimizer.moments(run)), strict=True))


def owned_chunks(storage: FlatStorage, run: OwnedRun, values: Mapping[str, Tensor]) -> Iterator[Chunk]:
    """`values` (a tensor per kind, elements as in `run.local`) as views that a checkpoint knows by key and offset."""
    for part in parts(storage, run.local):
        start = part.local.start - run.local.start
        for kind, tensor in values.items():
            key, numel = entry(kind, part.placed.info.name), part.placed.info.numel
            yield Chunk(key, numel, part.span.start, tensor[start : start + part.span.size])


def held_chunks(storage: FlatStorage) -> Iterator[Chunk]:
    """All weights that a rank holds, its own and copies of others', as views."""
    for part in parts(storage, Range(0, storage.numel)):
        key, numel = entry(WEIGHTS, part.placed.info.name), part.placed.info.numel
        yield Chunk(key, numel, part.span.start, storage.weights[part.local.start : part.local.stop])


def cut(chunk: Chunk) -> Iterator[Chunk]:
    """The chunk in pieces of at most CHUNK_ELEMENTS."""
    for start in range(0, chunk.values.numel(), CHUNK_ELEMENTS):
        yield Chunk(chunk.key, chunk.numel, chunk.offset + start, chunk.values[start : start + CHUNK_ELEMENTS])


class Snapshot:
    """A copy in host memory of the state that this rank saves; `take` fills it, training may then go on.

    Without sharding the ranks of a group own the same elements; the one that counts them in the norm saves them.
    """

    def __init__(self, optimizer: Optimizer, device: Device) -> None:
        self.optimizer, self._device = optimizer, device
        self._runs = [run for run in optimizer.runs if run.counts]
        dtype = optimizer.storage.grads.dtype
        numel = sum(run.local.size for run in self._runs)
        self._buffers = {kind: device.host_buffer(numel * dtype.itemsize).view(dtype) for kind in KINDS}
        self.chunks = [piece for chunk in self._chunks() for piece in cut(chunk)]

    def _chunks(self) -> Iterator[Chunk]:
        for run, place in self._placed():
            values = {kind: buffer[place.start : place.stop] for kind, buffer in self._buffers.items()}
            yield from owned_chunks(self.optimizer.storage, run, values)

    def _placed(self) -> Iterator[tuple[OwnedRun, Range]]:
        """The saved runs and their places in the buffers."""
        position = 0
        for run in self._runs:
            yield run, Range(position, position + run.local.size)
            position += run.local.size

    def take(self) -> None:
        """Copies the state as it is now; returns when the copy is complete."""
        for run, place in self._placed():
            for kind, tensor in state_of(self.optimizer, run).items():
                self._buffers[kind][place.start : place.stop].copy_(tensor, non_blocking=True)
        self._device.synchronize()
