"""One chunk in host memory: its island's sums over the island's own relays, messages sent from where they lie."""

from collections.abc import Sequence

import torch

from hethub.communicator.bridge.arithmetic import Reduction
from hethub.communicator.bridge.exchange import Start, at
from hethub.communicator.bridge.links import Links, Stage, wait_for
from hethub.communicator.bridge.routes import Route
from hethub.communicator.bridge.wire import Wire
from hethub.communicator.counters import Leg, LegClock
from hethub.communicator.relays.relay import Incoming, Outgoing
from hethub.spec.ranges import Range


class HostSide:
    """Posts the island's messages when it is made. The total is written to `out`, by default in place in `flat`."""

    copies = False

    def __init__(
        self,
        links: Links,
        clock: LegClock,
        island: Sequence[int],
        route: Route,
        reduction: Reduction,
        flat: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> None:
        self.clock = clock
        self._links = links
        self._island = island
        self._route = route
        self._reduction = reduction
        self._flat = flat
        self._out = out
        self._lent: dict[int, Outgoing] = {}
        neighbours = [rank for rank in island if rank != route.rank]
        self._sends = [
            links.send(self._own(piece), rank, Stage.SCATTER)
            for rank in neighbours
            for piece in route.held[rank]
            if piece
        ]
        self._incoming: dict[Range, dict[int, Incoming]] = {piece: {} for piece in route.held[route.rank] if piece}
        for rank in neighbours:
            for piece, incoming in self._incoming.items():
                incoming[rank] = links.expect(piece.size, flat.dtype, rank, Stage.SCATTER)

    def partial(self, piece: Range, only_reader: int | None) -> torch.Tensor:
        """The island's sum, in ascending rank order, rounded to the tensor's type.

        What one other rank gets as it is, is made in the memory that its relay lends for the message.
        """
        own, incoming = self._own(piece), self._incoming[piece]
        if not incoming:
            return own
        if only_reader is not None and self._reduction.wire.dtype == own.dtype:
            lent = self._links.outgoing(piece.size, own.dtype, only_reader)
            self._lent[lent.tensor.data_ptr()] = lent
            out = lent.tensor
        else:
            out = own if self._out is None else torch.empty_like(own)
        with self.clock(Leg.ISLAND_REDUCE):
            sources = [own if rank == self._route.rank else incoming[rank].wait() for rank in self._island]
            self._reduction.partial(sources, out)
        for message in incoming.values():
            message.release()
        return out

    def place(self, piece: Range) -> torch.Tensor:
        return self._own(piece) if self._out is None else at(self._out, self._route.mine, piece)

    def send(self, message: torch.Tensor, peer: int, stage: Stage) -> Start:
        lent = self._lent.get(message.data_ptr()) if stage == Stage.EXCHANGE else None
        links = self._links
        transfer = links.send(message, peer, stage) if lent is None else links.send_outgoing(lent, peer, stage)
        return lambda: transfer

    def expect(self, num_elements: int, wire: Wire, peer: int, stage: Stage) -> "Arriving":
        incoming = self._links.expect(wire.num_elements(num_elements), wire.dtype, peer, stage)
        return Arriving(incoming, wire, num_elements, self.clock)

    def release(self) -> None:
        for lent in self._lent.values():
            lent.release()

    def wait(self) -> None:
        """Returns when the island's messages have left `flat`."""
        wait_for(self._sends)

    def _own(self, piece: Range) -> torch.Tensor:
        return self._flat[piece.start : piece.stop]


class Arriving:
    """A message in the memory that its relay lends."""

    def __init__(self, incoming: Incoming, wire: Wire, num_elements: int, clock: LegClock) -> None:
        self._incoming = incoming
        self._wire = wire
        self._num_elements = num_elements
        self._clock = clock

    def wait(self) -> torch.Tensor:
        with self._clock(Leg.WIRE):
            message = self._incoming.wait()
        with self._clock(Leg.ADD):
            return self._wire.decode(message, self._num_elements)

    def release(self) -> None:
        self._incoming.release()
