"""Bridged collectives: island reduce-scatter, exchange between islands, island all-gather.

This file runs them on host tensors, and `device_side` on a device's; what islands tell each other is the same
(`routes`, `exchange`). Chunks overlap: while one is on the wire, the next is reduced inside the island.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from hethub.communicator.bridge.arithmetic import Reduction
from hethub.communicator.bridge.chunks import Tuning, chunked, run_pipelined
from hethub.communicator.bridge.exchange import Exchange, Start, at
from hethub.communicator.bridge.links import Links, Stage, wait_for, wait_until_read
from hethub.communicator.bridge.routes import (
    GatherRoute,
    Route,
    all_reduce_route,
    gather_route,
    island_parts,
    reduce_scatter_route,
)
from hethub.communicator.counters import Leg, LegClock
from hethub.communicator.joining.islands import Islands, island_index
from hethub.communicator.relays.relay import Incoming, Outgoing, Transfer
from hethub.spec.ranges import Range, split

Messages = list[tuple[int, torch.Tensor]]
"""Elements that a rank is sent or sends."""


class Bridge:
    """The collectives of one group for its member `rank`; one call at a time, in the same order on all members."""

    def __init__(self, *, links: Links, islands: Islands, rank: int, size: int, tuning: Tuning) -> None:
        self.links = links
        self._islands = islands
        self.rank = rank
        self._size = size
        self._tuning = tuning
        self.home = islands[island_index(islands, rank)]
        """The ranks of this rank's island, in the group's numbers."""
        self._neighbours = [other for other in self.home if other != rank]
        self.clock = LegClock()

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction, residual: torch.Tensor | None = None) -> None:
        """`flat` becomes the reduction over all members, the same bits everywhere.

        `residual` (fp32, as many elements) carries a narrow wire's rounding errors from call to call.
        """
        if not flat.numel():
            return
        self.links.call += reduction.mark
        if reduction.is_scaled:
            flat.copy_(reduction.prepared(flat))
        if self.is_small(flat, reduction):
            self._all_reduce_small(flat, reduction)
            return
        chunks = (self._reduce_stages(flat, piece, reduction, residual) for piece in self.chunks_of(flat))
        run_pipelined(chunks, self._tuning.lag)

    def reduce_scatter(
        self, flat: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor, reduction: Reduction
    ) -> None:
        """`out` becomes the reduction over all members of `flat[ranges[rank]]`; it may be that very memory."""
        self.links.call += reduction.mark
        first = ranges[self.rank].start
        chunks = (
            self._scatter_stages(flat, part, _sub(out, part[self.rank].shift(-first)), reduction)
            for part in self.chunks_by_ranges(ranges, flat.itemsize)
        )
        run_pipelined(chunks, self._tuning.lag)

    def all_gather(self, flat: torch.Tensor, ranges: Sequence[Range]) -> None:
        """Every member's `flat[ranges[member]]` is written to the same place of all members' `flat`."""
        parts = self.chunks_by_ranges(ranges, flat.itemsize)
        run_pipelined((self._gather_stages(flat, part) for part in parts), self._tuning.lag)

    def all_to_all(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Sends `sent[rank]` to each rank in it and fills `received[rank]` from each; a rank's own is copied."""
        if self.rank in received:
            received[self.rank].copy_(sent[self.rank])
        others = [{peer: tensor for peer, tensor in of.items() if peer != self.rank} for of in (sent, received)]
        arrivals, sends = list[Transfer](), list[Transfer]()
        for leaving, arriving in self.chunks_of_messages(*others):
            arrivals += [self.links.receive(piece, peer, Stage.DIRECT) for peer, piece in arriving]
            sends += [self.links.send(piece, peer, Stage.DIRECT) for peer, piece in leaving]
        with self.clock(Leg.WIRE):
            wait_for(arrivals)
            wait_for(sends)

    def _all_reduce_small(self, flat: torch.Tensor, reduction: Reduction) -> None:
        """One hop instead of three: everybody's input to everybody, added in the same order as large messages."""
        others = [rank for rank in range(self._size) if rank != self.rank]
        incoming = {r: self.links.expect(flat.numel(), flat.dtype, r, Stage.SMALL) for r in others}
        sends = [self.links.send(flat, rank, Stage.SMALL) for rank in others]
        with self.clock(Leg.WIRE):
            inputs = {rank: message.wait() for rank, message in incoming.items()} | {self.rank: flat}
            wait_for(sends)
        with self.clock(Leg.ADD):
            partials = []
            for island in self._islands:
                if len(island) == 1:
                    partials.append(inputs[island[0]])
                else:
                    partials.append(torch.empty_like(flat))
                    reduction.partial([inputs[rank] for rank in island], partials[-1])
            reduction.total(partials, flat)
        for message in incoming.values():
            message.release()

    @property
    def num_islands(self) -> int:
        return len(self._islands)

    @property
    def has_lone_ranks(self) -> bool:
        """Whether no two members share an island."""
        return len(self._islands) == self._size

    @property
    def lag(self) -> int:
        return self._tuning.lag

    def chunks_of(self, flat: torch.Tensor) -> list[Range]:
        return split(flat.numel(), self._tuning.num_chunks(flat.nbytes))

    def chunks_by_ranges(self, ranges: Sequence[Range], itemsize: int) -> list[list[Range]]:
        """The ranges of each chunk."""
        return chunked(ranges, self._tuning.num_chunks(sum(r.size for r in ranges) * itemsize))

    def chunks_of_messages(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[Messages, Messages]]:
        """The pieces of each chunk that leave and arrive; sender and receiver cut a message alike, by its size."""
        # Each rank begins with its successor, so that not all send to the same rank at once.
        order = sorted(sent, key=lambda peer: (peer - self.rank) % self._size)
        leaving = [(peer, self._pieces(sent[peer])) for peer in order]
        arriving = [(peer, self._pieces(tensor)) for peer, tensor in received.items()]
        for chunk in range(max([len(pieces) for _, pieces in leaving + arriving], default=0)):
            yield _at(leaving, chunk), _at(arriving, chunk)

    def _pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [_sub(flat, piece) for piece in split(flat.numel(), self._tuning.num_chunks(flat.nbytes)) if piece]

    def reduce_scatter_route(self, ranges: Sequence[Range]) -> Route:
        """This rank's part in the exchange of one chunk."""
        return reduce_scatter_route(self._islands, ranges, self.rank)

    def gather_route(self, ranges: Sequence[Range]) -> GatherRoute:
        """This rank's part in the all-gather of one chunk."""
        return gather_route(self._islands, ranges, self.rank)

    def all_reduce_route(self, whole: Range) -> Route:
        """This rank's part in the exchange of one chunk."""
        return all_reduce_route(self._islands, island_parts(self._islands, whole), self.rank)

    def is_small(self, tensor: torch.Tensor, reduction: Reduction) -> bool:
        """Whether an all-reduce of `tensor` goes to everybody in one hop."""
        return tensor.nbytes * self._size <= self._tuning.small_bytes and reduction.wire.dtype == tensor.dtype

    def _reduce_stages(
        self, flat: torch.Tensor, whole: Range, reduction: Reduction, residual: torch.Tensor | None
    ) -> Iterator[None]:
        """One chunk of an all-reduce: this rank's part becomes the total, then all of the island gather."""
        route = self.all_reduce_route(whole)
        side = HostSide(self.links, self.clock, self.home, route, reduction, flat)
        parts = [(rank, route.held[rank][0]) for rank in self._neighbours]
        gathered = [self.links.receive(_sub(flat, part), rank, Stage.GATHER) for rank, part in parts if part]
        yield from Exchange(route=route, side=side, reduction=reduction, residual=residual).stages()
        sends = [self.links.send(_sub(flat, route.mine), rank, Stage.GATHER) for rank in self._neighbours if route.mine]
        yield
        with self.clock(Leg.ISLAND_GATHER):
            wait_for(gathered)
            wait_for(sends)
            side.wait()

    def _scatter_stages(
        self, flat: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor, reduction: Reduction
    ) -> Iterator[None]:
        """One chunk of a reduce-scatter."""
        route = self.reduce_scatter_route(ranges)
        side = HostSide(self.links, self.clock, self.home, route, reduction, flat, out)
        yield from Exchange(route=route, side=side, reduction=reduction).stages()
        yield
        with self.clock(Leg.WIRE):
            side.wait()

    def _gather_stages(self, flat: torch.Tensor, ranges: Sequence[Range]) -> Iterator[None]:
        """All-gather: every range crosses to each other island once, in parts, and is spread there."""
        route, mine = self.gather_route(ranges), ranges[self.rank]
        sends = [self.links.send(_sub(flat, mine), p, Stage.GATHER) for p in self._neighbours if mine]
        sends += [self.links.send(_sub(flat, piece), peer, Stage.EXCHANGE) for peer, piece in route.sent]
        arrivals = [self.links.receive(_sub(flat, piece), peer, Stage.EXCHANGE) for peer, piece in route.expected]
        spread = []
        for peer in self._neighbours:
            own, *carried = route.held[peer]
            if own:
                spread.append(self.links.receive(_sub(flat, own), peer, Stage.GATHER))
            spread += [self.links.receive(_sub(flat, piece), peer, Stage.SPREAD) for piece in carried]
        yield
        with self.clock(Leg.WIRE):
            wait_for(arrivals)
        _, *carried = route.held[self.rank]
        for peer in self._neighbours:
            sends += [self.links.send(_sub(flat, piece), peer, Stage.SPREAD) for piece in carried]
        yield
        with self.clock(Leg.ISLAND_GATHER):
            wait_for(spread)
            wait_for(sends)


def _sub(flat: torch.Tensor, piece: Range) -> torch.Tensor:
    return flat[piece.start : piece.stop]


def _at(messages: Iterable[tuple[int, list[torch.Tensor]]], chunk: int) -> Messages:
    return [(peer, pieces[chunk]) for peer, pieces in messages if chunk < len(pieces)]


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

    def expect(self, num_elements: int, dtype: torch.dtype, peer: int, stage: Stage) -> Incoming:
        return self._links.expect(num_elements, dtype, peer, stage)

    def release(self) -> None:
        for lent in self._lent.values():
            lent.release()

    def wait(self) -> None:
        """Returns when the island's messages have left `flat`, or were read, where none come from it."""
        (wait_for if self._incoming else wait_until_read)(self._sends)

    def _own(self, piece: Range) -> torch.Tensor:
        return self._flat[piece.start : piece.stop]
