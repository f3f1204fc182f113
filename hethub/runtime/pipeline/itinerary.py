"""The order in which a rank visits its layers, told to the ZeRO manager one visit ahead."""

from collections.abc import Sequence
from typing import NamedTuple

from hethub.runtime.pace import Pace
from hethub.runtime.state.zero import ZeroManager
from hethub.spec.layout.execution import Kind


class Visit(NamedTuple):
    """What is done in which layer of the stage, by how many microbatches in turn."""

    kind: Kind
    layer: int
    microbatches: int = 1
    ends_pass: bool = True  # no further layer must be entered before this one is released


class Itinerary:
    """The order in which a rank visits its layers in a step; each next visit is announced while the present one
    runs."""

    def __init__(self, zero_manager: ZeroManager, visits: Sequence[Visit], pace: Pace) -> None:
        self.zero_manager, self._visits, self._pace = zero_manager, visits, pace
        self._position = 0
        self._under_way: dict[tuple[Kind, int], int] = {}  # the microbatches that a visit still waits for
        self._through: list[tuple[Kind, int]] = []  # visits that are over, in a pass with layers yet to be entered

    def start_step(self) -> None:
        """Announces the first visit: its weights are updated and fetched while the rank waits for its first message."""
        assert not self._under_way
        self._position = 0
        self._announce()

    def enter(self, kind: Kind, layer: int) -> None:
        """Makes a layer usable for one microbatch."""
        if (kind, layer) not in self._under_way:
            visit = self._next(kind, layer)
            self._under_way[kind, layer] = visit.microbatches
            self.zero_manager.acquire(kind, layer)
            self._announce()
            self._release_through()
        self._pace.enter(kind, layer)

    def leave(self, kind: Kind, layer: int) -> None:
        """Ends a microbatch's use of the layer, and with the last microbatch the visit."""
        self._pace.leave()
        self.zero_manager.end_layer()
        self._under_way[kind, layer] -= 1
        if not self._under_way[kind, layer]:
            del self._under_way[kind, layer]
            self._through.append((kind, layer))
            self._release_through()

    def join(self, kind: Kind, layer: int) -> None:
        """Makes a visit without a microbatch, as its round asks for: the same calls in the same order as with one."""
        self._next(kind, layer)
        self.zero_manager.acquire(kind, layer)
        self._announce()
        self.zero_manager.release(kind, layer)

    def _release_through(self) -> None:
        """Releases what is through once all layers of its pass are entered.

        A replica with one microbatch would else release a layer before it acquires the next, one with more after: their
        collectives would be in two orders.
        """
        if self._visits[self._position - 1].ends_pass:
            for kind, layer in self._through:
                self.zero_manager.release(kind, layer)
            self._through.clear()

    def _next(self, kind: Kind, layer: int) -> Visit:
        visit = self._visits[self._position]
        assert visit[:2] == (kind, layer)
        self._position += 1
        return visit

    def _announce(self) -> None:
        if self._position < len(self._visits):
            self.zero_manager.prefetch(*self._visits[self._position][:2])
