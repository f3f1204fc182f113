"""What microbatches hand from model chunk to model chunk: messages between stages, and tensors kept here where the next
chunk is of the same stage."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import World
from hethub.runtime.model.stage import Stage
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.layout.execution import Action, Kind, actions
from hethub.spec.ranges import Range
from hethub.spec.schedule.microbatches import MicrobatchRange, Transfer

DIRECTIONS = (Kind.FORWARD, Kind.BACKWARD)
LOOKAHEAD = 2  # microbatches whose receives are posted before they are needed, in each direction
WINDOW = 12  # actions among which those microbatches are looked for
# Steps in which a device meets kernels for the first time; an update that waits for the norm comes in the second.
LOADING = 2

Place = tuple[Kind, int, MicrobatchRange]  # what a microbatch is about to do, in which model chunk of the stage
Transfers = dict[Place, list[Transfer]]


def transfers_of(layout: Layout, stage: int, replica: int) -> tuple[Transfers, Transfers]:
    """What a replica receives and what it sends, by microbatch, model chunk and direction."""
    own = set(layout.microbatches_of(stage, replica))
    incoming, outgoing = defaultdict[Place, list[Transfer]](list), defaultdict[Place, list[Transfer]](list)
    for source, target, transfers in layout.boundaries:
        if stage not in (source.stage, target.stage):
            continue
        for transfer in transfers:
            if transfer.source in own:
                outgoing[Kind.FORWARD, source.chunk, transfer.source].append(transfer)
                incoming[Kind.BACKWARD, source.chunk, transfer.source].append(transfer)
            elif transfer.target in own:
                incoming[Kind.FORWARD, target.chunk, transfer.target].append(transfer)
                outgoing[Kind.BACKWARD, target.chunk, transfer.target].append(transfer)
    return incoming, outgoing


def peer_of(layout: Layout, kind: Kind, transfer: Transfer, *, sends: bool) -> int:
    """The rank that a transfer goes to (`sends`) or comes from, going forward or back."""
    return layout.leader(transfer.target if sends == (kind is Kind.FORWARD) else transfer.source)


def sending_order(layout: Layout, stage: int, replica: int) -> list[tuple[Kind, Transfer]]:
    """What a replica sends in a step, in order."""
    _, outgoing = transfers_of(layout, stage, replica)
    return [
        (action.kind, transfer)
        for action in actions(layout, stage, replica)
        if action.microbatch is not None
        for transfer in outgoing.get((action.kind, action.chunk, action.microbatch), [])
    ]


@dataclass
class _Arrival:
    """A microbatch's input on its way: one buffer, and the works that fill it."""

    buffer: Tensor
    works: list["dist.Work"] = field(default_factory=list)


class Transport:
    """One rank's receives and sends of a step. Hidden states go forward, their gradients back, by the same transfers.

    The leader of a microbatch sends and receives for its replica, which then broadcasts inside. Where nothing goes back,
    `directions` is FORWARD alone.
    """

    def __init__(
        self, layout: Layout, assignment: Assignment, world: World, stage: Stage, directions: Sequence[Kind]
    ) -> None:
        self.layout, self.assignment, self.world, self.stage = layout, assignment, world, stage
        self._incoming, self._outgoing = (
            {place: transfers for place, transfers in found.items() if place[0] in directions}
            for found in transfers_of(layout, assignment.stage, assignment.replica)
        )
        self._directions = directions
        # Gradients cross the same boundaries as activations; their tags follow after all of those.
        self._gradient_tags = sum(map(len, layout.transfers))
        self._arrivals: dict[Place, _Arrival] = {}
        self._handed: dict[Place, Tensor] = {}
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._expected = self._find_expected()
        self._turns = {
            (place[0], transfer.tag): turn
            for found in self._expected.values()
            for turn, (place, transfer) in enumerate(found)
        }
        self._num_posted = dict.fromkeys(self._expected, 0)
        self._num_loading = LOADING if world.device.is_gpu else 0  # steps to come that post no receive ahead
        sends = {
            peer_of(layout, kind, transfer, sends=True)
            for (kind, _, microbatch), found in self._outgoing.items()
            for transfer in found
            if layout.leader(microbatch) == assignment.rank
        }
        world.connect_messages(sorted(sends), sorted(self._expected))

    def _find_expected(self) -> dict[int, list[tuple[Place, Transfer]]]:
        """Return, for each sender, the messages it will send to this rank in its order: receives are posted in that order."""
        layout, own = self.layout, self.assignment.rank
        places = {(place[0], transfer.tag): place for place, found in self._incoming.items() for transfer in found}
        senders = {
            (source.stage, source.replica)
            for (kind, *_), found in self._incoming.items()
            for transfer in found
            for source in [transfer.source if kind is Kind.FORWARD else transfer.target]
        }
        expected = defaultdict[int, list[tuple[Place, Transfer]]](list)
        for stage, replica in sorted(senders):
            for kind, transfer in sending_order(layout, stage, replica):
                if kind in self._directions and peer_of(layout, kind, transfer, sends=True) == own:
                    source = peer_of(layout, kind, transfer, sends=False)
                    expected[source].append((places[kind, transfer.tag], transfer))
        return expected

    def post_receives(self, upcoming: Sequence[Action]) -> None:
        """Posts the receives of the next few microbatches in each direction, so that data moves while we compute.

        In the first steps on a device, only those of the action at hand: a kernel that is launched for the first time is
        loaded then, and CUDA waits with that for all that is under way on the device (lazy loading). A receive posted
        ahead may wait for what this rank has yet to compute.
        """
        upcoming = upcoming[:1] if self._num_loading else upcoming
        for kind in self._directions:
            soon = [(kind, act.chunk, act.microbatch) for act in upcoming if act.kind is kind and act.microbatch]
            for place in soon[:LOOKAHEAD]:
                if place in self._incoming:
                    self._expect(place)

    def _expect(self, place: Place) -> None:
        """Posts a microbatch's receives on the replica's leader, behind those of all that their senders send before;
        those that are posted already not again."""
        kind, _, microbatch = place
        self._arrival(place)
        if self.layout.leader(microbatch) != self.assignment.rank:
            return
        for transfer in self._incoming[place]:
            peer = peer_of(self.layout, kind, transfer, sends=False)
            for earlier in range(self._num_posted[peer], self._turns[kind, transfer.tag] + 1):
                self._receive(*self._expected[peer][earlier], peer)
                self._num_posted[peer] += 1

    def _receive(self, place: Place, transfer: Transfer, peer: int) -> None:
        arrival = self._arrival(place)
        rows = self._rows(arrival.buffer, place[2], transfer.samples)
        arrival.works.append(self.world.receive(rows, peer, self._tag(place[0], transfer)))

    def _arrival(self, place: Place) -> _Arrival:
        """The microbatch's input, with a buffer that its receives write."""
        if place not in self._arrivals:
            weights, microbatch = self.stage.storage.weights, place[2]
            shape = (microbatch.samples.size * self.stage.seq_len, self.stage.hidden)
            self._arrivals[place] = _Arrival(torch.empty(shape, dtype=weights.dtype, device=weights.device))
        return self._arrivals[place]

    def _rows(self, tensor: Tensor, microbatch: MicrobatchRange, samples: Range) -> Tensor:
        """The rows of a microbatch's (batch * seq, hidden) that belong to `samples`."""
        first, seq = microbatch.samples.start, self.stage.seq_len
        return tensor[(samples.start - first) * seq : (samples.stop - first) * seq]

    def _tag(self, kind: Kind, transfer: Transfer) -> int:
        return transfer.tag + (self._gradient_tags if kind is Kind.BACKWARD else 0)

    def arrived(self, kind: Kind, chunk: int, microbatch: MicrobatchRange) -> Tensor | None:
        """A microbatch's input once it is here and known to the whole replica; None at the model's ends."""
        place = (kind, chunk, microbatch)
        if place in self._handed:
            return self._handed.pop(place)
        arrival = self._arrivals.pop(place, None)
        if arrival is None:
            return None
        for work in arrival.works:
            work.wait()
        if self.stage.group.group is not None:
            dist.broadcast(arrival.buffer, self.layout.leader(microbatch), self.stage.group.group)
        return arrival.buffer

    def hand_on(self, kind: Kind, chunk: int, microbatch: MicrobatchRange, tensor: Tensor) -> None:
        """Gives a microbatch's result to the chunk that is next: keeps it here, or starts sending it to all that
        overlap it."""
        beside = self.layout.chunk_beside(self.assignment.stage, chunk, 1 if kind is Kind.FORWARD else -1)
        assert beside is not None
        if beside.stage == self.assignment.stage:
            self._handed[kind, beside.chunk, microbatch] = tensor
        elif self.layout.leader(microbatch) == self.assignment.rank:
            self._send((kind, chunk, microbatch), tensor)

    def _send(self, place: Place, tensor: Tensor) -> None:
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()
        kind, _, microbatch = place
        for transfer in self._outgoing[place]:
            peer = peer_of(self.layout, kind, transfer, sends=True)
            rows = self._rows(tensor, microbatch, transfer.samples)
            self._sends.append((self.world.send(rows, peer, self._tag(kind, transfer)), rows))

    def finish(self) -> None:
        """Returns when everything sent is on its way."""
        assert not self._arrivals
        assert not self._handed
        assert self._num_posted == {peer: len(found) for peer, found in self._expected.items()}
        self._num_posted = dict.fromkeys(self._expected, 0)
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
        self._num_loading = max(0, self._num_loading - 1)
