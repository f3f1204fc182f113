"""Runs one rank's actions of a step: tiles forward and backward, transfers between stages, reductions."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import World
from hethub.runtime.pace import Pace
from hethub.runtime.passes import Itinerary, TilePass, Visit
from hethub.runtime.residency import Residency
from hethub.runtime.spans import SpanLog
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
class _Step:
    """What a step has under way."""

    load: Callable[[Tile], TileInput]
    loss_scale: float
    running: dict[Tile, TilePass] = field(default_factory=dict)
    arrivals: dict[tuple[Kind, Tile], _Arrival] = field(default_factory=dict)
    sends: deque[tuple["dist.Work", Tensor]] = field(default_factory=deque)
    losses: list[Tensor] = field(default_factory=list)


class Executor:
    """One rank's interpreter of the schedule. `run_step` executes all forward and backward actions and reductions."""

    def __init__(
        self, layout: Layout, seat: Seat, world: World, stage: Stage, residency: Residency, pace: Pace
    ) -> None:
        self.layout, self.seat, self.world, self.stage, self.residency = layout, seat, world, stage, residency
        self.pace = pace
        self._group_ranks = sorted(layout.replica(seat.stage, seat.replica).ranks)
        self._compute = [action for action in actions(layout, seat.stage, seat.replica) if action.tile is not None]
        self._layers = Range(0, len(stage.layers))
        self._itinerary = Itinerary(residency, self._visits(), pace)
        self.tiles = layout.tiles_of(seat.stage, seat.replica)
        self._before = self._by_tile(seat.stage - 1, "target")
        self._after = self._by_tile(seat.stage, "source")
        # Gradients cross the same boundaries as activations; their tags follow after all of those.
        self._gradient_tags = sum(map(len, layout.transfers))
        self.log = SpanLog(seat.rank)

    def _visits(self) -> list[Visit]:
        """The layers of all compute actions, in the order in which they are entered."""
        forward = range(*self._layers)
        order = {Kind.FORWARD: forward, Kind.BACKWARD: forward[::-1]}
        return [(action.kind, layer) for action in self._compute for layer in order[action.kind]]

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
        step = self._step = _Step(load, loss_scale)
        self.log.start_step()
        self.residency.start_step(len(self.tiles))
        self._itinerary.start_step()
        for index, action in enumerate(self._compute):
            self._post_receives(index)
            assert action.tile is not None
            with self.log.timed(action), self.pace.action(action):
                (self._forward if action.kind is Kind.FORWARD else self._backward)(action.tile)
        with self.log.timed(Action(Kind.REDUCE, self.seat.stage)):
            self.residency.finish()
            for work, _ in step.sends:
                work.wait()
        return float(torch.stack(step.losses).sum()) if step.losses else 0.0

    # -- receiving -------------------------------------------------------------------------------------------------

    def _post_receives(self, index: int) -> None:
        """Posts the receives of the next few tiles in each direction, so that data moves while we compute."""
        window = self._compute[index : index + 4 * LOOKAHEAD]
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            for tile in [action.tile for action in window if action.kind is kind and action.tile][:LOOKAHEAD]:
                if (kind, tile) not in self._step.arrivals and (arrival := self._expect(kind, tile)) is not None:
                    self._step.arrivals[kind, tile] = arrival

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
        arrival = self._step.arrivals.pop((kind, tile), None)
        if arrival is None:
            return None
        for work in arrival.works:
            work.wait()
        if self.stage.group.group is not None:
            dist.broadcast(
                arrival.buffer,
                group=self.stage.group.group,
                group_src=self._group_ranks.index(self.layout.leader(tile)),
            )
        return arrival.buffer

    # -- computing and sending -------------------------------------------------------------------------------------

    def _forward(self, tile: Tile) -> None:
        source = self._arrived(Kind.FORWARD, tile)
        running = TilePass(self.stage, self._itinerary, self._layers, self._step.load(tile), self._step.loss_scale)
        result = running.forward(source)
        if self.stage.is_last:
            self._step.losses.append(result)
        else:
            self._send(Kind.FORWARD, tile, result, self._after[tile])
        self._step.running[tile] = running

    def _backward(self, tile: Tile) -> None:
        grad = self._step.running.pop(tile).backward(self._arrived(Kind.BACKWARD, tile))
        if grad is not None:
            self._send(Kind.BACKWARD, tile, grad, self._before[tile])

    def _send(self, kind: Kind, tile: Tile, tensor: Tensor, outgoing: list[Transfer]) -> None:
        """Starts sending a tile's result to every tile that overlaps it; the replica's leader sends for all."""
        if self.layout.leader(tile) != self.seat.rank:
            return
        sends = self._step.sends
        while sends and sends[0][0].is_completed():
            sends.popleft()
        for transfer in outgoing:
            peer = self.layout.leader(transfer.target if kind is Kind.FORWARD else transfer.source)
            part = self._part(tensor, tile, transfer.samples)
            sends.append((self.world.send(part, peer, self._tag(kind, transfer)), part))
