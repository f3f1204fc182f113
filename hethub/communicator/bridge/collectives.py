"""Bridged collectives on host tensors: island reduce-scatter, exchange between islands, island all-gather.

Every rank relays its own part of the data, whatever the order of ranks and the sizes of islands. Two islands exchange
partials directly (one hop); three and more give each island a part of the data to own, so that an all-reduce of n
elements sends 2n(k-1) over all bridges, the least possible. Chunks overlap: while one is on the wire, the next is
reduced inside the island.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hethub.communicator.bridge.arithmetic import Reduction
from hethub.communicator.bridge.chunks import run_pipelined
from hethub.communicator.bridge.crossing import Assembled, Decoded, DeviceSide, Expected, HostSide, encode_pieces
from hethub.communicator.bridge.exchange import Exchange, Piece
from hethub.communicator.bridge.links import Links, Stage
from hethub.communicator.counters import Leg, LegClock
from hethub.communicator.joining.islands import Islands, carried_pieces, chunked, intersect, island_index
from hethub.communicator.relays.relay import Incoming, Transfer
from hethub.kernels.device import Device, Stream
from hethub.spec.ranges import Range, overlap, split


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes that change speed only, never a result."""

    chunk_bytes: int = 4 << 20
    unchunked_bytes: int = 2 << 20
    small_bytes: int = 256 << 10
    lag: int = 3

    @classmethod
    def over(cls, relay_names: set[str]) -> "Tuning":
        """For a group whose members reach each other over these relays.

        Inside one host there is no wire to keep busy: every chunk more is a switch between processes more (2+2 ranks on
        2 cores, 64 MiB: 80 ms in one chunk, 200 ms in 16).
        """
        return cls(chunk_bytes=64 << 20, unchunked_bytes=64 << 20, lag=1) if relay_names <= {"shm"} else cls()

    def num_chunks(self, num_bytes: int) -> int:
        return 1 if num_bytes <= self.unchunked_bytes else -(-num_bytes // self.chunk_bytes)


class Bridge:
    """The collectives of one group for its member `rank`; one call at a time, in the same order on all members."""

    def __init__(self, *, links: Links, islands: Islands, rank: int, size: int, tuning: Tuning) -> None:
        self._links = links
        self._islands = islands
        self._rank = rank
        self._size = size
        self._tuning = tuning
        self._home = island_index(islands, rank)
        self._neighbours = [other for other in islands[self._home] if other != rank]
        self.clock = LegClock()
        self._exchange = Exchange(links, islands, rank, self.clock)
        self._host = HostSide(links, self.clock)

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction, residual: torch.Tensor | None = None) -> None:
        """`flat` becomes the reduction over all members, the same bits everywhere.

        `residual` (fp32, as many elements) carries a narrow wire's rounding errors from call to call.
        """
        if not flat.numel():
            return
        if self.is_small(flat, reduction):
            self._all_reduce_small(flat, reduction)
            return
        stages = self._exchange_stages if len(self._islands) == 2 else self._owner_stages
        chunks = (stages(flat, piece, reduction, residual) for piece in self.chunks_of(flat))
        run_pipelined(chunks, self._tuning.lag)

    def reduce_scatter(
        self, flat: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor, reduction: Reduction
    ) -> None:
        """`out` becomes the reduction over all members of `flat[ranges[rank]]`; it may be that very memory."""
        first = ranges[self._rank].start
        num_chunks = self._tuning.num_chunks(sum(r.size for r in ranges) * flat.itemsize)
        chunks = (
            self._scatter_stages(flat, part, _sub(out, part[self._rank].shift(-first)), reduction)
            for part in chunked(ranges, num_chunks)
        )
        run_pipelined(chunks, self._tuning.lag)

    def all_gather(self, flat: torch.Tensor, ranges: Sequence[Range]) -> None:
        """Every member's `flat[ranges[member]]` is written to the same place of all members' `flat`."""
        num_chunks = self._tuning.num_chunks(sum(r.size for r in ranges) * flat.itemsize)
        run_pipelined((self._gather_stages(flat, part) for part in chunked(ranges, num_chunks)), self._tuning.lag)

    def exchange(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Sends `sent[rank]` to each rank in it and fills `received[rank]` from each; a rank's own is copied."""
        if self._rank in received:
            received[self._rank].copy_(sent[self._rank])
        arrivals = [
            self._links.receive(tensor, peer, Stage.DIRECT)
            for peer, tensor in received.items()
            if peer != self._rank and tensor.numel()
        ]
        # Each rank begins with its successor, so that not all send to the same rank at once.
        order = sorted(sent, key=lambda peer: (peer - self._rank) % self._size)
        sends = [
            self._links.send(sent[peer], peer, Stage.DIRECT)
            for peer in order
            if peer != self._rank and sent[peer].numel()
        ]
        with self.clock(Leg.WIRE):
            _wait(arrivals)
            _wait(sends)

    def _all_reduce_small(self, flat: torch.Tensor, reduction: Reduction) -> None:
        """One hop instead of three: everybody's input to everybody, added in the same order as large messages."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        incoming = {r: self._links.expect(flat.numel(), flat.dtype, r, Stage.SMALL) for r in others}
        sends = [self._links.send(flat, rank, Stage.SMALL) for rank in others]
        with self.clock(Leg.WIRE):
            inputs = {rank: message.wait() for rank, message in incoming.items()} | {self._rank: flat}
            _wait(sends)
        with self.clock(Leg.ADD):
            partials = []
            for island in self._islands:
                if len(island) == 1:
                    partials.append(inputs[island[0]])
                else:
                    partials.append(torch.empty_like(flat))
                    reduction.partial([inputs[rank] for rank in island], partials[-1])
            reduction.total(partials, flat)
        _release(list(incoming.values()))

    def _owner_stages(
        self, flat: torch.Tensor, whole: Range, reduction: Reduction, residual: torch.Tensor | None
    ) -> Iterator[None]:
        """All-reduce over three islands and more: island partials, totals by their owners, islands' all-gather."""
        parts = self._island_parts(whole)
        mine = parts[self._rank]
        sends = [self._links.send(_sub(flat, parts[p]), p, Stage.SCATTER) for p in self._neighbours if parts[p]]
        incoming = self._expect_pieces(_kept([mine]), flat.dtype)
        gathered = [self._links.receive(_sub(flat, parts[p]), p, Stage.GATHER) for p in self._neighbours if parts[p]]
        piece = Piece(parts=parts, side=self._host, reduction=reduction, residual=_part(residual, mine))

        def partial() -> torch.Tensor:
            own = _sub(flat, mine)
            return self._island_partial(flat, mine, incoming[0], reduction, own) if mine else own

        yield from self._exchange.run(piece, partial)
        sends += [self._links.send(_sub(flat, mine), p, Stage.GATHER) for p in self._neighbours if mine]
        yield
        with self.clock(Leg.ISLAND_GATHER):
            _wait(gathered)
            _wait(sends)

    def _exchange_stages(
        self, flat: torch.Tensor, whole: Range, reduction: Reduction, residual: torch.Tensor | None
    ) -> Iterator[None]:
        """All-reduce over two islands: both sides add the two partials in the same order."""
        parts = self._island_parts(whole)
        mine = parts[self._rank]
        sends = [self._links.send(_sub(flat, parts[p]), p, Stage.SCATTER) for p in self._neighbours if parts[p]]
        incoming = self._expect_pieces(_kept([mine]), flat.dtype)
        gathered = [self._links.receive(_sub(flat, parts[p]), p, Stage.GATHER) for p in self._neighbours if parts[p]]
        foreign = self._expect_carried(mine, [[part] for part in parts], reduction)
        yield
        peers = [(peer, common) for peer in self._others()[0] if (common := overlap(mine, parts[peer]))]
        lent = None
        if len(peers) == 1 and self._neighbours and reduction.wire.dtype == flat.dtype:
            lent = self._links.outgoing(mine.size, flat.dtype, peers[0][0])
            own = self._island_partial(flat, mine, incoming[0], reduction, lent.tensor)
            exchanged = [self._links.send_outgoing(lent, peers[0][0], Stage.EXCHANGE)]
        elif mine:
            partial = self._island_partial(flat, mine, incoming[0], reduction)
            pieces = [common.shift(-mine.start) for _, common in peers]
            messages, own = encode_pieces(partial, pieces, reduction.wire, _part(residual, mine))
            exchanged = [
                self._links.send(message, peer, Stage.EXCHANGE)
                for (peer, _), message in zip(peers, messages, strict=True)
            ]
        yield
        if mine:
            partials = self._in_island_order(own, [part.wait() for part in foreign])
            with self.clock(Leg.WIRE):
                _wait(exchanged)  # a rank alone in its island sends from `flat` itself, which the total overwrites
            with self.clock(Leg.ADD):
                reduction.total(partials, _sub(flat, mine))
            _release(foreign)
            if lent is not None:
                lent.release()
            sends += [self._links.send(_sub(flat, mine), p, Stage.GATHER) for p in self._neighbours]
        yield
        with self.clock(Leg.ISLAND_GATHER):
            _wait(gathered)
            _wait(sends)

    def exchange_partial(
        self,
        whole: Range,
        partial_of: Callable[[], torch.Tensor],
        reduction: Reduction,
        device: Device,
        stream: Stream,
    ) -> Iterator[None]:
        """`partial_of()`, this rank's part of its island's sum over `whole`, becomes that part of the total.

        For islands whose own legs run elsewhere (`native_legs`), on `device` and the current `stream`; the messages are
        those of a host all-reduce, so other islands may be made of CPUs.
        """
        side = DeviceSide(self._links, self.clock, device, stream)
        piece = Piece(parts=self._island_parts(whole), side=side, reduction=reduction)
        yield from self._exchange.run(piece, partial_of)

    @property
    def home(self) -> tuple[int, ...]:
        """The ranks of this rank's island, in the group's numbers."""
        return self._islands[self._home]

    @property
    def num_islands(self) -> int:
        return len(self._islands)

    @property
    def lag(self) -> int:
        return self._tuning.lag

    def chunks_of(self, flat: torch.Tensor) -> list[Range]:
        return split(flat.numel(), self._tuning.num_chunks(flat.nbytes))

    def part_of(self, whole: Range) -> Range:
        """This rank's part of `whole` inside its island."""
        return self._island_parts(whole)[self._rank]

    def is_small(self, tensor: torch.Tensor, reduction: Reduction) -> bool:
        """Whether an all-reduce of `tensor` goes to everybody in one hop."""
        return tensor.nbytes * self._size <= self._tuning.small_bytes and reduction.wire.dtype == tensor.dtype

    def _scatter_stages(
        self,
        flat: torch.Tensor,
        ranges: Sequence[Range],
        out: torch.Tensor,
        reduction: Reduction,
    ) -> Iterator[None]:
        """Reduce-scatter: island partials of foreign ranges travel to their owner through the ranks that carry them."""
        carried = carried_pieces(self._islands, ranges)
        mine = ranges[self._rank]
        sends = [
            self._links.send(_sub(flat, piece), peer, Stage.SCATTER)
            for peer in self._neighbours
            for piece in _kept([ranges[peer], *carried[peer]])
        ]
        incoming = dict(
            zip(
                _kept([mine, *carried[self._rank]]),
                self._expect_pieces(_kept([mine, *carried[self._rank]]), flat.dtype),
                strict=True,
            )
        )
        foreign = self._expect_carried(mine, carried, reduction)
        yield
        for piece in carried[self._rank]:
            partial = self._island_partial(flat, piece, incoming[piece], reduction)
            owners = [(o, common) for i in self._others() for o in i if (common := overlap(piece, ranges[o]))]
            owners.sort(key=lambda owner: owner[1])
            pieces = [common.shift(-piece.start) for _, common in owners]
            messages, _ = encode_pieces(partial, pieces, reduction.wire)
            for (owner, _), message in zip(owners, messages, strict=True):
                sends.append(self._links.send(message, owner, Stage.EXCHANGE))
        if mine:
            partial = self._island_partial(flat, mine, incoming[mine], reduction)
            whole = Range(0, mine.size)
            _, own = encode_pieces(partial, [whole], reduction.wire)
        yield
        if mine:
            arrived = [part.wait() for part in foreign]
            with self.clock(Leg.ADD):
                reduction.total(self._in_island_order(own, arrived), out)
            _release(foreign)
        yield
        with self.clock(Leg.WIRE):
            _wait(sends)

    def _gather_stages(self, flat: torch.Tensor, ranges: Sequence[Range]) -> Iterator[None]:
        """All-gather: every range crosses to each other island once, in parts, and is spread there."""
        carried = carried_pieces(self._islands, ranges)
        mine = ranges[self._rank]
        sends = [self._links.send(_sub(flat, mine), p, Stage.GATHER) for p in self._neighbours if mine]
        arrivals, spread = [], []
        for island in self._others():
            for peer in island:
                for piece in intersect(carried[peer], mine):
                    sends.append(self._links.send(_sub(flat, piece), peer, Stage.EXCHANGE))
                for piece in intersect(carried[self._rank], ranges[peer]):
                    arrivals.append(self._links.receive(_sub(flat, piece), peer, Stage.EXCHANGE))
        for peer in self._neighbours:
            if ranges[peer]:
                spread.append(self._links.receive(_sub(flat, ranges[peer]), peer, Stage.GATHER))
            spread += [self._links.receive(_sub(flat, piece), peer, Stage.SPREAD) for piece in carried[peer]]
        yield
        with self.clock(Leg.WIRE):
            _wait(arrivals)
        for peer in self._neighbours:
            sends += [self._links.send(_sub(flat, piece), peer, Stage.SPREAD) for piece in carried[self._rank]]
        yield
        with self.clock(Leg.ISLAND_GATHER):
            _wait(spread)
            _wait(sends)

    def _island_parts(self, whole: Range) -> list[Range]:
        """Per rank, its equal part of `whole` inside its island: every island covers all of it."""
        parts = [whole] * self._size
        for island in self._islands:
            part_size = -(-whole.size // len(island))  # what a native reduce-scatter gives: all equal but the last
            for place, rank in enumerate(island):
                start = min(whole.stop, whole.start + place * part_size)
                parts[rank] = Range(start, min(whole.stop, start + part_size))
        return parts

    def _others(self) -> list[tuple[int, ...]]:
        return [island for index, island in enumerate(self._islands) if index != self._home]

    def _expect_pieces(self, pieces: Sequence[Range], dtype: torch.dtype) -> list[dict[int, Incoming]]:
        """For each piece, the neighbours' contributions to it. Posted in the order the neighbours send."""
        expected: list[dict[int, Incoming]] = [{} for _ in pieces]
        for peer in self._neighbours:
            for place, piece in zip(expected, pieces, strict=True):
                if piece:
                    place[peer] = self._links.expect(piece.size, dtype, peer, Stage.SCATTER)
        return expected

    def _expect_carried(self, mine: Range, carried: Sequence[Sequence[Range]], reduction: Reduction) -> list[Expected]:
        """Per other island, its partial of `mine`: lent by the relay, decoded, or put together from several ranks."""
        wire = reduction.wire
        expected: list[Expected] = []
        for island in self._others() if mine else []:
            pieces = [(peer, piece) for peer in island for piece in intersect(carried[peer], mine)]
            pieces.sort(key=lambda item: item[1])
            if len(pieces) == 1 or wire.dtype != reduction.dtype:
                messages = [
                    (self._links.expect(wire.num_elements(piece.size), wire.dtype, peer, Stage.EXCHANGE), piece.size)
                    for peer, piece in pieces
                ]
                expected.append(Decoded(wire, messages, self.clock))
                continue
            whole = torch.empty(mine.size, dtype=wire.dtype)
            transfers = [
                self._links.receive(_sub(whole, piece.shift(-mine.start)), peer, Stage.EXCHANGE)
                for peer, piece in pieces
            ]
            expected.append(Assembled(whole, transfers, self.clock))
        return expected

    def _island_partial(
        self,
        flat: torch.Tensor,
        piece: Range,
        incoming: dict[int, Incoming],
        reduction: Reduction,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The island's sum of `flat[piece]`, in ascending rank order, rounded to the tensor's type; in `out` if
        given."""
        own = _sub(flat, piece)
        if not incoming:
            return own
        partial = torch.empty(piece.size, dtype=flat.dtype) if out is None else out
        order = self._islands[self._home]
        with self.clock(Leg.ISLAND_REDUCE):
            reduction.partial([own if rank == self._rank else incoming[rank].wait() for rank in order], partial)
        for message in incoming.values():
            message.release()
        return partial

    def _in_island_order(self, partial: torch.Tensor, foreign: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*foreign[: self._home], partial, *foreign[self._home :]]


def _sub(flat: torch.Tensor, piece: Range) -> torch.Tensor:
    return flat[piece.start : piece.stop]


def _part(residual: torch.Tensor | None, piece: Range) -> torch.Tensor | None:
    return None if residual is None else _sub(residual, piece)


def _kept(pieces: Sequence[Range]) -> list[Range]:
    return [piece for piece in pieces if piece]


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _release(messages: Sequence[Incoming | Expected]) -> None:
    for message in messages:
        message.release()
