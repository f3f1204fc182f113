"""An all-reduce's step between islands: a rank's part of its island's partial becomes that part of the total.

Two islands swap their partials: one hop, and both add the same numbers in the same order. With three and more, every
island owns an equal share of each segment: partials travel to the owner, which adds them, and the total travels back.
Both directions take the narrow wire where one is chosen, and the owner keeps the total as the others receive it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hethub.communicator.bridge.arithmetic import Reduction
from hethub.communicator.bridge.crossing import Departing, Expected, Side
from hethub.communicator.bridge.links import Links, Stage
from hethub.communicator.counters import Leg, LegClock
from hethub.communicator.joining.islands import Islands, Segment, held_segments, island_index
from hethub.communicator.relays.relay import Transfer
from hethub.spec.ranges import Range, overlap


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of one chunk to be summed over islands: the part of every rank, this rank's residual and its side."""

    parts: Sequence[Range]
    side: Side
    reduction: Reduction
    residual: torch.Tensor | None = None


class Exchange:
    """The step for one member of a group; generators as `pipeline` runs them, messages posted before the first
    yield."""

    def __init__(self, links: Links, islands: Islands, rank: int, clock: LegClock) -> None:
        self._links = links
        self._islands = islands
        self._rank = rank
        self._home = island_index(islands, rank)
        self._clock = clock

    def run(self, piece: Piece, partial_of: Callable[[], torch.Tensor]) -> Iterator[None]:
        """`partial_of()` is asked for this rank's partial when it is needed; in the end that tensor is the total."""
        mine = piece.parts[self._rank]
        if not mine:
            partial_of()
        elif len(self._islands) == 2:
            yield from self._swap(piece, mine, partial_of)
        else:
            yield from self._by_owners(piece, mine, partial_of)

    def _swap(self, piece: Piece, mine: Range, partial_of: Callable[[], torch.Tensor]) -> Iterator[None]:
        wire = piece.reduction.wire
        (theirs,) = (island for index, island in enumerate(self._islands) if index != self._home)
        peers = [(peer, common) for peer in theirs if (common := overlap(mine, piece.parts[peer]))]
        foreign = [piece.side.expect(common.size, wire, peer, Stage.EXCHANGE) for peer, common in peers]
        yield
        partial = partial_of()
        places = [_at(partial, common, mine) for _, common in peers]
        with self._clock(Leg.ADD):
            own = [self._encoded(piece, place, common, mine) for place, (_, common) in zip(places, peers, strict=True)]
            departing = [piece.side.depart(message, peer) for (message, _), (peer, _) in zip(own, peers, strict=True)]
        yield
        sends = [
            self._links.send(each.message(), peer, Stage.EXCHANGE)
            for each, (peer, _) in zip(departing, peers, strict=True)
        ]
        yield
        arrived = [expected.wait() for expected in foreign]
        self._wait(sends)  # what the wire carries unchanged is sent from `partial` itself, which the total overwrites
        with self._clock(Leg.ADD):
            for place, (_, seen), other in zip(places, own, arrived, strict=True):
                piece.reduction.total([seen, other] if self._home == 0 else [other, seen], place)
        _release(foreign)

    def _by_owners(self, piece: Piece, mine: Range, partial_of: Callable[[], torch.Tensor]) -> Iterator[None]:
        segments = held_segments(self._islands, piece.parts, self._rank)
        partials = [self._expect_partials(piece, segment) for segment in segments]
        totals = [
            (share, piece.side.expect(share.size, piece.reduction.wire, holder, Stage.TOTAL))
            for segment in segments
            for holder, share in self._foreign_shares(segment)
        ]
        yield
        partial = partial_of()
        departing: list[tuple[int, Departing]] = []
        seen: list[torch.Tensor] = []
        with self._clock(Leg.ADD):
            for segment in segments:
                for holder, share in self._foreign_shares(segment):
                    message, _ = self._encoded(piece, _at(partial, share, mine), share, mine)
                    departing.append((holder, piece.side.depart(message, holder)))
                own = segment.shares[self._home]
                seen.append(self._encoded(piece, _at(partial, own, mine), own, mine)[1])
        yield
        sends = [self._links.send(each.message(), holder, Stage.EXCHANGE) for holder, each in departing]
        yield
        returning: list[tuple[int, Departing]] = []
        for segment, own_seen, expected in zip(segments, seen, partials, strict=True):
            total = self._total(piece, segment, mine, own_seen, expected, partial)
            if total is not None:
                others = (holder for holder in segment.holders if holder != self._rank)
                returning += [(holder, piece.side.depart(total, holder)) for holder in others]
        yield
        returned = [self._links.send(each.message(), holder, Stage.TOTAL) for holder, each in returning]
        self._wait(sends)  # they may be sent from `partial` itself, which the totals overwrite
        yield
        for share, arriving in totals:
            _at(partial, share, mine).copy_(arriving.wait())
            arriving.release()
        self._wait(returned)

    def _expect_partials(self, piece: Piece, segment: Segment) -> list[Expected]:
        """The other islands' partials of the share this rank's island owns."""
        own = segment.shares[self._home]
        holders = [holder for holder in segment.holders if holder != self._rank and own]
        return [piece.side.expect(own.size, piece.reduction.wire, holder, Stage.EXCHANGE) for holder in holders]

    def _total(
        self,
        piece: Piece,
        segment: Segment,
        mine: Range,
        own_seen: torch.Tensor,
        expected: Sequence[Expected],
        partial: torch.Tensor,
    ) -> torch.Tensor | None:
        """Writes the total of the share this rank owns into `partial`, as the others will see it; the message to
        them."""
        own = segment.shares[self._home]
        if not own:
            return None
        arrived = [each.wait() for each in expected]
        place = _at(partial, own, mine)
        with self._clock(Leg.ADD):
            piece.reduction.total([*arrived[: self._home], own_seen, *arrived[self._home :]], place)
            _release(expected)
            if piece.reduction.wire.dtype == place.dtype:
                return place
            message = piece.reduction.wire.encode(place)
            seen = piece.reduction.wire.decode(message, own.size)
            if piece.residual is not None:
                _at(piece.residual, own, mine).add_((place - seen) * piece.reduction.num_contributions)
            place.copy_(seen)
            return message

    def _encoded(
        self, piece: Piece, place: torch.Tensor, where: Range, mine: Range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The message for a piece of the partial, and the piece as its receivers see it."""
        wire = piece.reduction.wire
        if wire.dtype == place.dtype:
            return place, place
        residual = None if piece.residual is None else _at(piece.residual, where, mine)
        wanted = place if residual is None else place + residual
        message = wire.encode(wanted)
        seen = wire.decode(message, where.size)
        if residual is not None:
            residual.copy_(wanted - seen)
        return message, seen

    def _foreign_shares(self, segment: Segment) -> Iterator[tuple[int, Range]]:
        """(holder, share) of the other islands, empty shares left out."""
        for holder, share in zip(segment.holders, segment.shares, strict=True):
            if holder != self._rank and share:
                yield holder, share

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        with self._clock(Leg.WIRE):
            for transfer in transfers:
                transfer.wait()


def _at(tensor: torch.Tensor, piece: Range, mine: Range) -> torch.Tensor:
    """The elements of `piece` in a tensor that holds `mine`."""
    return tensor[piece.start - mine.start : piece.stop - mine.start]


def _release(messages: Sequence[Expected]) -> None:
    for message in messages:
        message.release()
