"""Gradients under ZeRO 2 and 3: a unit's full gradient lives for one round; a rank keeps the part that it owns.

A unit is what comes and goes as one, as in FSDP (hethub.runtime.state.zero).
"""

from collections import Counter, deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.state.reduction import LocalPiece, Reducer
from hethub.runtime.state.storage import shaped, take


@dataclass
class _Reducing:
    """A unit's full gradient on its way to its owners: views of its buffer, or copies where runs lie apart."""

    unit: int
    works: list[tuple["dist.Work | None", LocalPiece, Tensor]]


class ZeroGradients:
    """The full gradients of units: one buffer that fills while the one before it is reduced.

    `open` waits until at most one unit is on its way, so two buffers exist at most beside those of units that fill
    over several visits (head, tied embedding) or microbatches (a model chunk that all of them pass in turn).
    `reductions` counts a step's reductions by unit.
    """

    def __init__(self, reducer: Reducer, meter: MemoryMeter) -> None:
        self._reducer, self._storage, self._meter = reducer, reducer.storage, meter
        self._open: dict[int, Tensor] = {}
        self._reducing: deque[_Reducing] = deque()
        self._landed: set[int] = set()
        self.reductions: Counter[int] = Counter()

    def start_step(self) -> None:
        """Forgets the sums of the step before."""
        self._landed.clear()
        self.reductions.clear()

    def open(self, unit: int) -> None:
        """Gives the unit's parameters a place for their gradients, unless they have one."""
        if unit in self._open:
            return
        self._land(left=1)
        layout = self._storage.unit_maps[unit]
        buffer = torch.empty(layout.numel, dtype=self._storage.grad_dtype, device=self._storage.device)
        self._meter.take(buffer)
        self._open[unit] = buffer
        for placed, _, view in layout.views(buffer):
            self._storage.parameters[placed.info.name].open(shaped(view, placed))

    def close(self, unit: int) -> None:
        """Starts the reduction of what this round added, zeros where that was nothing; two are under way at most."""
        pieces = self._reducer.units[unit]
        lies_apart = any(len(piece.grads) > 1 for piece in pieces)
        # Copies take their buffer's place, beside which they are for a moment: two units in all.
        self._land(left=0 if lies_apart else 1)
        buffer = self._open.pop(unit)
        for placed, _ in self._storage.unit_maps[unit].held:
            parameter = self._storage.parameters[placed.info.name]
            parameter.close()
            parameter.grad = self._storage.grads[:0]  # not a view of the buffer, which would keep all of it
        works = []
        for piece in pieces:
            flat = take(buffer, piece.grads, copied=lies_apart)
            self._meter.take(flat)
            works.append((piece.start_reduction(flat), piece, flat))
        self._reducing.append(_Reducing(unit, works))
        self.reductions[unit] += 1

    def finish(self) -> None:
        """Returns when no reduction is under way: the owned parts are sums."""
        self._land(left=0)

    def _land(self, left: int) -> None:
        """Waits for the oldest reductions until `left` are under way, and adds their results to what this rank owns."""
        while len(self._reducing) > left:
            reducing = self._reducing.popleft()
            owned = self._storage.owned_grads[reducing.unit]
            for work, piece, flat in reducing.works:
                if work is not None:
                    work.wait()
                home = owned[piece.home.start : piece.home.stop]
                own = flat[piece.own.start : piece.own.stop]
                home.add_(own) if reducing.unit in self._landed else home.copy_(own)
            self._landed.add(reducing.unit)
