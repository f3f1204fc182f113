"""Weights under ZeRO 3 or offload: a unit's are on the device only while its layer computes, gathered from their owners
or fetched from the host.

A unit is what comes and goes as one, as in FSDP (hethub.runtime.state.zero).
"""

from collections import Counter, deque
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.memory.host_arena import Fetch
from hethub.runtime.state.reduction import LocalPiece, Reducer
from hethub.runtime.state.storage import put, shaped, take


@dataclass
class _Present:
    """A unit's weights on the device, or on their way there.

    Pieces whose runs lie apart here come in tensors of their own; there is no buffer until they are on the device.
    """

    buffer: Tensor | None = None
    fetch: Fetch | None = None
    works: deque[tuple[Fetch | None, "dist.Work | None", LocalPiece, Tensor]] = field(default_factory=deque)
    is_complete: bool = False


class ZeroWeights:
    """The full weights of units, present from `start` to `free`.

    `gathers` counts how often each unit came since the start. `most_present` and `most_chunks` are the largest numbers
    of units, and of model chunks with such units, that were present or on their way at once.
    """

    def __init__(self, reducer: Reducer, meter: MemoryMeter) -> None:
        self._reducer, self._storage, self._meter = reducer, reducer.storage, meter
        self._present: dict[int, _Present] = {}
        self._chunk_of = {unit: layout.held[0][0].chunk for unit, layout in self._storage.unit_maps.items()}
        self.gathers: Counter[int] = Counter()
        self.most_present = 0
        self.most_chunks = 0

    def start(self, unit: int) -> None:
        """Begins to bring the unit's weights, unless they are here or on their way."""
        if unit in self._present:
            return
        storage = self._storage
        present = self._present[unit] = _Present()
        if storage.shards_weights:
            self._start_gather(unit, present)
        else:
            assert storage.arena is not None
            present.buffer = self._empty(storage.unit_maps[unit].numel)
            present.fetch = storage.arena.fetch(storage.offloaded_weights[unit], present.buffer)
        self.gathers[unit] += 1
        self.most_present = max(self.most_present, len(self._present))
        self.most_chunks = max(self.most_chunks, len({self._chunk_of[unit] for unit in self._present}))

    def _empty(self, numel: int) -> Tensor:
        buffer = torch.empty(numel, dtype=self._storage.dtype, device=self._storage.device)
        self._meter.take(buffer)
        return buffer

    def _start_gather(self, unit: int, present: _Present) -> None:
        owned, pieces, arena = self._storage.owned_weights[unit], self._reducer.units[unit], self._storage.arena
        if all(len(piece.weights) == 1 for piece in pieces):
            present.buffer = self._empty(self._storage.unit_maps[unit].numel)
        for piece in pieces:
            flat = self._empty(piece.piece.numel) if present.buffer is None else take(present.buffer, piece.weights)
            own, kept = flat[piece.own.start : piece.own.stop], owned[piece.home.start : piece.home.stop]
            fetch = None if arena is None else arena.fetch(kept, own)
            if fetch is None:
                own.copy_(kept)
            with nullcontext() if fetch is None else fetch.behind():
                present.works.append((fetch, piece.start_gather(flat), piece, flat))

    def finish(self, unit: int) -> None:
        """Returns when the unit's parameters have their weights."""
        present = self._present[unit]
        if present.is_complete:
            return
        if present.fetch is not None:
            present.fetch.wait()
        whole = self._storage.unit_maps[unit]
        if present.buffer is None:
            present.buffer = self._empty(whole.numel)
        while present.works:
            fetch, work, piece, flat = present.works.popleft()
            for awaited in (fetch, work):
                if awaited is not None:
                    awaited.wait()
            put(present.buffer, piece.weights, flat)
        present.is_complete = True
        for placed, _, view in whole.views(present.buffer):
            self._storage.parameters[placed.info.name].weight = shaped(view, placed)

    def free(self, unit: int) -> None:
        """Free a unit's weights, whose gather was waited for."""
        assert self._present[unit].is_complete  # a gather under way writes to its memory
        del self._present[unit]
        for placed, _ in self._storage.unit_maps[unit].held:
            # Not a view of the buffer, which would keep all of it.
            self._storage.parameters[placed.info.name].weight = self._storage.weights[:0]

    def spread(self, unit: int) -> None:
        """Sends the owners' new weights of an offloaded unit to all holders' host memory (below ZeRO 3)."""
        assert unit not in self._present
        storage, pieces = self._storage, self._reducer.units[unit]
        if not any(piece.gathers for piece in pieces):
            return  # this rank has stepped all that it holds
        assert storage.arena is not None
        buffer = storage.arena.fetch(storage.offloaded_weights[unit]).wait()
        self._meter.take(buffer)
        works = []
        for piece in pieces:
            flat = take(buffer, piece.weights)
            works.append((piece.start_gather(flat), piece, flat))
        for work, piece, flat in works:
            if work is not None:
                work.wait()
            put(buffer, piece.weights, flat)
        storage.arena.store(storage.offloaded_weights[unit], buffer).wait()
