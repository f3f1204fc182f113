"""The step between islands, the same for host and device: partials leave, arrive, are added; totals may travel back.

A `Side` is where this rank computes: in host memory (`collectives`), or on its device (`device_side`), where partials are
encoded before they are copied to the host and arrivals are decoded and added, so that only what the wire carries
is copied. What goes where, and the order of additions, is the `Route`'s.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hethub.communicator.bridge.arithmetic import Reduction
from hethub.communicator.bridge.links import Stage, wait_for, wait_until_read
from hethub.communicator.bridge.routes import Route, Total
from hethub.communicator.counters import Leg, LegClock
from hethub.communicator.relays.relay import Incoming, Transfer
from hethub.spec.ranges import Range

Held = tuple[int, Range, torch.Tensor]
"""(rank, range, elements): a rank's piece of its island's partial, as all ranks see it."""
Start = Callable[[], Transfer]
"""What puts a message on the wire once it is copied to where its relay takes it from."""


class Side(Protocol):
    """Where this rank computes, for one chunk. Ranges are those of the collective's flat tensor."""

    copies: bool
    """Whether messages are copied to the host before they can be sent."""
    clock: LegClock

    def partial(self, piece: Range, only_reader: int | None) -> torch.Tensor:
        """The island's sum of the piece; `only_reader` is the other rank that alone will get it, if one does."""

    def place(self, piece: Range) -> torch.Tensor:
        """Where the total of the piece is written."""

    def send(self, message: torch.Tensor, peer: int, stage: Stage) -> Start:
        """Sends an encoded message, as far as that needs no waiting; the call does the rest."""

    def expect(self, num_elements: int, dtype: torch.dtype, peer: int, stage: Stage) -> Incoming:
        """Posts the receive of a message, which will be where this side computes."""

    def release(self) -> None:
        """The partials are not read any more."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One chunk's exchange for one rank.

    `residual` (fp32, of the flat tensor) carries a narrow wire's rounding errors from call to call.
    """

    route: Route
    side: Side
    reduction: Reduction
    residual: torch.Tensor | None = None

    def stages(self) -> Iterator[None]:
        """Run the exchange as `run_pipelined` asks for it: every receive is posted before the first yield."""
        route, side = self.route, self.side
        expected = [(rank, piece, self._expect(rank, piece, Stage.EXCHANGE)) for rank, piece in route.expected]
        returned = [(piece, self._expect(rank, piece, Stage.TOTAL)) for rank, piece in route.returned]
        if not side.copies:
            yield
        own, starts = self._send_partials()
        if side.copies:
            yield
        sends = [start() for start in starts]
        yield
        held = [*own, *((rank, piece, self._arrived(piece, message)) for rank, piece, message in expected)]
        wait = wait_for if route.expected or route.returned else wait_until_read
        with side.clock(Leg.WIRE):  # what the wire carries unchanged may be sent from where the total is written
            wait(sends)
        starts = [start for total in route.totals for start in self._make(total, held)]
        for *_, message in expected:
            message.release()
        side.release()
        if not route.returns:
            return
        if side.copies:
            yield
        sends = [start() for start in starts]
        yield
        for piece, message in returned:
            side.place(piece).copy_(self._arrived(piece, message))
            message.release()
        with side.clock(Leg.WIRE):
            wait_for(sends)

    def _expect(self, rank: int, piece: Range, stage: Stage) -> Incoming:
        wire = self.reduction.wire
        return self.side.expect(wire.num_elements(piece.size), wire.dtype, rank, stage)

    def _arrived(self, piece: Range, message: Incoming) -> torch.Tensor:
        """What the message stands for, in memory that is the relay's until the message's `release`."""
        with self.side.clock(Leg.WIRE):
            encoded = message.wait()
        with self.side.clock(Leg.ADD):
            return self.reduction.wire.decode(encoded, piece.size)

    def _send_partials(self) -> tuple[list[Held], list[Start]]:
        """What stays of this rank's partials, as all ranks see them; and the calls that send the others."""
        own, starts = [], []
        for partial in self.route.partials:
            whole = self.side.partial(partial.piece, partial.only_reader(self.route.rank))
            encoded: dict[Range, tuple[torch.Tensor, torch.Tensor]] = {}
            for reader, piece in partial.readers:
                if piece not in encoded:
                    encoded[piece] = self._encoded(at(whole, partial.piece, piece), piece)
                message, seen = encoded[piece]
                if reader == self.route.rank:
                    own.append((reader, piece, seen))
                else:
                    starts.append(self.side.send(message, reader, Stage.EXCHANGE))
        return own, starts

    def _encoded(self, partial: torch.Tensor, piece: Range) -> tuple[torch.Tensor, torch.Tensor]:
        """The message, and the partial as its readers see it.

        With error feedback, `residual` is what earlier calls rounded away here: it is added first, and what this call
        rounds away replaces it (1-bit SGD, Seide et al. 2014; Karimireddy et al. 2019 for why it converges).
        """
        wire = self.reduction.wire
        if wire.dtype == partial.dtype:
            return partial, partial
        with self.side.clock(Leg.ADD):
            residual = None if self.residual is None else self.residual[piece.start : piece.stop]
            wanted = partial if residual is None else partial + residual
            message = wire.encode(wanted)
            seen = wire.decode(message, piece.size)
            if residual is not None:
                residual.copy_(wanted - seen)
        return message, seen

    def _make(self, total: Total, held: Sequence[Held]) -> list[Start]:
        """Writes the total to its place, as its readers will see it; the calls that send it to them."""
        place = self.side.place(total.piece)
        with self.side.clock(Leg.ADD):
            self.reduction.total([_part_of(held, rank, total.piece) for rank in total.holders], place)
            message = self._settled(place, total.piece) if self.route.returns else place
        return [self.side.send(message, reader, Stage.TOTAL) for reader in total.readers]

    def _settled(self, total: torch.Tensor, piece: Range) -> torch.Tensor:
        """The message of a total, which becomes what the message says."""
        wire = self.reduction.wire
        if wire.dtype == total.dtype:
            return total
        message = wire.encode(total)
        seen = wire.decode(message, piece.size)
        if self.residual is not None:
            lost = (total - seen) * self.reduction.num_contributions
            self.residual[piece.start : piece.stop].add_(lost)
        total.copy_(seen)
        return message


def at(tensor: torch.Tensor, whole: Range, piece: Range) -> torch.Tensor:
    """The elements of `piece` in a tensor that holds `whole`."""
    return tensor[piece.start - whole.start : piece.stop - whole.start]


def _part_of(held: Sequence[Held], rank: int, piece: Range) -> torch.Tensor:
    """The rank's partial of the piece, out of the pieces held."""
    return next(at(tensor, whole, piece) for holder, whole, tensor in held if holder == rank and whole.contains(piece))
