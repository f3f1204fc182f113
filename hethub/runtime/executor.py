"""Runs one rank's actions of a step: tiles forward and backward, transfers between stages, reductions."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import World
from hethub.predictor.timeline import Span, stream_of
from hethub.runtime.reduction import Reducer
from hethub.runtime.stage import Stage, TileInput
from hethub.spec.layout import Layout, Seat
from hethub.spec.ranges import Range
from hethub.spec.schedule import Action, Kind, actions
from hethub.spec.tiling import Tile, Transfer

LOOKAHEAD = 2  # tiles whose receives are posted before they are needed


@dataclass
class _Arrival:
    """A tile's input on its way: one buffer, the works that fill it, and what autograd must come back to."""

    buffer: Tensor
    works: list["dist.Work"] = field(default_factory=list)


@dataclass
class _Running:
    """A tile between its forward and its backward."""

    source: Tensor | None
    result: Tensor


class Executor:
    """One rank's interpreter of the schedule. `run_step` executes all forward and backward actions and reductions."""

    def __init__(self, layout: Layout, seat: Seat, world: World, stage: Stage, reducer: Reducer) -> None:
        self.layout, self.seat, self.world, self.stage, self.reducer = layout, seat, world, stage, reducer
        self._group_ranks = sorted(layout.replica(seat.stage, seat.replica).ranks)
        self.actions = actions(layout, seat.stage, seat.replica)
        self.tiles = layout.tiles_of(seat.stage, seat.replica)
        self._before = self._by_tile(seat.stage - 1, "target")
        self._after = self._by_tile(seat.stage, "source")
        # Gradients cross the same boundaries as activations; their tags follow after all of those.
        self._gradient_tags = sum(map(len, layout.transfers))
        self.spans: list[Span] = []

    def _by_tile(self, boundary: int, end: str) -> dict[Tile, list[Transfer]]:
        """The transfers of a stage boundary that this replica takes part in, by its own tile."""
        found: dict[Tile, list[Transfer]] = {tile: [] for tile in self.tiles}
        if 0 <= boundary < len(self.layout.transfers):
            for transfer in self.layout.transfers[boundary]:
                tile = getattr(transfer, end)
                if tile in found:
                    found[tile].append(transfer)
        return found

    def run_step(self, load: Callable[[Tile], TileInput], loss_scale: float) -> float:
        """Runs every tile of this rank and returns the loss it computed (0.0 where the head is elsewhere).

        `load` gives a tile's data; the loss is summed over tokens and multiplied by `loss_scale`.
        """
        self._load, self._loss_scale = load, loss_scale
        self._running: dict[Tile, _Running] = {}
        self._arrivals: dict[tuple[Kind, Tile], _Arrival] = {}
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._losses: list[Tensor] = []
        self.spans = []
        self.reducer.start_step(len(self.tiles))
        compute = [action for action in self.actions if action.tile is not None]
        for index, action in enumerate(compute):
            self._post_receives(compute[index:])
            self._timed(action, self._forward if action.kind is Kind.FORWARD else self._backward)
        self._timed(Action(Kind.REDUCE, self.seat.stage), lambda _: self._finish())
        return float(torch.stack(self._losses).sum()) if self._losses else 0.0

    def _finish(self) -> None:
        self.reducer.finish()
        while self._sends:
            self._sends.popleft()[0].wait()

    def _timed(self, action: Action, run: Callable[[Tile], None]) -> None:
        start = monotonic()
        run(action.tile)  # type: ignore[arg-type]
        self.spans.append(Span(self.seat.rank, stream_of(action.kind), action.name, start, monotonic()))

    # -- receiving -------------------------------------------------------------------------------------------------

    def _post_receives(self, upcoming: list[Action]) -> None:
        """Posts the receives of the next few tiles in each direction, so that data moves while we compute."""
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            for action in [a for a in upcoming[: 4 * LOOKAHEAD] if a.kind is kind][:LOOKAHEAD]:
                tile = action.tile
                assert tile is not None
                if (kind, tile) not in self._arrivals:
                    arrival = self._expect(kind, tile)
                    if arrival is not None:
                        self._arrivals[kind, tile] = arrival

    def _expect(self, kind: Kind, tile: Tile) -> _Arrival | None:
        """A buffer for the tile's input in a direction, its receives posted on the replica's leader."""
        incoming = (self._before if kind is Kind.FORWARD else self._after)[tile]
        if not incoming:
            return None
        arrival = _Arrival(self._buffer(tile))
        if self.layout.leader(tile) == self.seat.rank:
            for transfer in incoming:
                peer = self.layout.leader(transfer.source if kind is Kind.FORWARD else transfer.target)
                part = self._part(arrival.buffer, tile, transfer.samples)
                arrival.works.append(self.world.receive(part, peer, self._tag(kind, transfer)))
        return arrival

    def _buffer(self, tile: Tile) -> Tensor:
        weights = self.stage.storage.weights
        return torch.empty(
            tile.samples.size * self.stage.seq_len, self.stage.hidden, dtype=weights.dtype, device=weights.device
        )

    def _part(self, tensor: Tensor, tile: Tile, samples: Range) -> Tensor:
        """The rows of a tile's (batch * seq, hidden) that belong to `samples`."""
        first, seq = tile.samples.start, self.stage.seq_len
        return tensor[(samples.start - first) * seq : (samples.stop - first) * seq]

    def _tag(self, kind: Kind, transfer: Transfer) -> int:
        return transfer.tag + (self._gradient_tags if kind is Kind.BACKWARD else 0)

    def _arrived(self, kind: Kind, tile: Tile) -> Tensor | None:
        """The tile's input once it is here and known to the whole replica; None where there is no stage to send it."""
        arrival = self._arrivals.pop((kind, tile), None)
        if arrival is None:
            return None
        for work in arrival.works:
            work.wait()
        if self.stage.group.group is not None:
            dist.broadcast(arrival.buffer, group=self.stage.group.group, group_src=self._group_ranks.index(self.layout.leader(tile)))
        return arrival.buffer

    # -- computing and sending -------------------------------------------------------------------------------------

    def _forward(self, tile: Tile) -> None:
        source = self._arrived(Kind.FORWARD, tile)
        if source is not None:
            source.requires_grad_()
        result = self.stage.forward(source, self._load(tile), self._loss_scale)
        if self.stage.is_last:
            self._losses.append(result.detach())
        else:
            self._send(Kind.FORWARD, tile, result.detach(), self._after[tile])
        self._running[tile] = _Running(source, result)

    def _backward(self, tile: Tile) -> None:
        grad = self._arrived(Kind.BACKWARD, tile)
        running = self._running.pop(tile)
        torch.autograd.backward(running.result, grad)
        if running.source is not None:
            assert running.source.grad is not None
            self._send(Kind.BACKWARD, tile, running.source.grad, self._before[tile])

    def _send(self, kind: Kind, tile: Tile, tensor: Tensor, outgoing: list[Transfer]) -> None:
        """Starts sending a tile's result to every tile that overlaps it; the replica's leader sends for all."""
        if self.layout.leader(tile) != self.seat.rank:
            return
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()
        for transfer in outgoing:
            peer = self.layout.leader(transfer.target if kind is Kind.FORWARD else transfer.source)
            part = self._part(tensor, tile, transfer.samples)
            self._sends.append((self.world.send(part, peer, self._tag(kind, transfer)), part))
