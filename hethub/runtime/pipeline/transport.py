"""What microbatches hand from chunk to chunk: messages between stages, and tensors kept where the next chunk is this
rank's own."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import World
from hethub.runtime.model.stage import Stage
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.layout.execution import Action, Kind
from hethub.spec.ranges import Range
from hethub.spec.schedule.microbatches import MicrobatchRange, Transfer

LOOKAHEAD = 2  # microbatches whose receives are posted before they are needed, in each direction
WINDOW = 12  # actions among which those microbatches are looked for

Place = tuple[Kind, int, MicrobatchRange]  # what a microbatch is about to do in which chunk of the stage


@dataclass
class _Arrival:
    """A microbatch's input on its way: one buffer, and the works that fill it."""

    buffer: Tensor
    works: list["dist.Work"] = field(default_factory=list)


class Transport:
    """One rank's receives and sends of a step. Hidden states go forward, their gradients back, by the same transfers.

    The leader of a microbatch sends and receives for its replica, which then broadcasts inside.
    """

    def __init__(self, layout: Layout, assignment: Assignment, world: World, stage: Stage) -> None:
        self.layout, self.assignment, self.world, self.stage = layout, assignment, world, stage
        self._group_ranks = sorted(layout.replica(assignment.stage, assignment.replica).ranks)
        self._incoming: dict[Place, list[Transfer]] = {}
        self._outgoing: dict[Place, list[Transfer]] = {}
        self._find_transfers()
        # Gradients cross the same boundaries as activations; their tags follow after all of those.
        self._gradient_tags = sum(map(len, layout.transfers))
        self._arrivals: dict[Place, _Arrival] = {}
        self._handed: dict[Place, Tensor] = {}
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def _find_transfers(self) -> None:
        """The transfers that this replica takes part in, by microbatch, chunk and direction."""
        own = set(self.layout.microbatches_of(self.assignment.stage, self.assignment.replica))
        for source, target, transfers in self.layout.boundaries:
            if self.assignment.stage not in (source.stage, target.stage):
                continue
            for transfer in transfers:
                if transfer.source in own:
                    self._outgoing.setdefault((Kind.FORWARD, source.chunk, transfer.source), []).append(transfer)
                    self._incoming.setdefault((Kind.BACKWARD, source.chunk, transfer.source), []).append(transfer)
                elif transfer.target in own:
                    self._incoming.setdefault((Kind.FORWARD, target.chunk, transfer.target), []).append(transfer)
                    self._outgoing.setdefault((Kind.BACKWARD, target.chunk, transfer.target), []).append(transfer)

    def post_receives(self, upcoming: Sequence[Action]) -> None:
        """Posts the receives of the next few microbatches in each direction, so that data moves while we compute."""
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            soon = [(kind, act.chunk, act.microbatch) for act in upcoming if act.kind is kind and act.microbatch]
            for place in soon[:LOOKAHEAD]:
                if place in self._incoming and place not in self._arrivals:
                    self._arrivals[place] = self._expect(place)

    def _expect(self, place: Place) -> _Arrival:
        """A buffer for a microbatch's input, its receives posted on the replica's leader."""
        kind, _, microbatch = place
        weights = self.stage.storage.weights
        shape = (microbatch.samples.size * self.stage.seq_len, self.stage.hidden)
        arrival = _Arrival(torch.empty(shape, dtype=weights.dtype, device=weights.device))
        if self.layout.leader(microbatch) == self.assignment.rank:
            for transfer in self._incoming[place]:
                peer = self.layout.leader(transfer.source if kind is Kind.FORWARD else transfer.target)
                rows = self._rows(arrival.buffer, microbatch, transfer.samples)
                arrival.works.append(self.world.receive(rows, peer, self._tag(kind, transfer)))
        return arrival

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
            leader = self._group_ranks.index(self.layout.leader(microbatch))
            dist.broadcast(arrival.buffer, group=self.stage.group.group, group_src=leader)
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
            peer = self.layout.leader(transfer.target if kind is Kind.FORWARD else transfer.source)
            rows = self._rows(tensor, microbatch, transfer.samples)
            self._sends.append((self.world.send(rows, peer, self._tag(kind, transfer)), rows))

    def finish(self) -> None:
        """Returns when everything sent is on its way."""
        assert not self._arrivals
        assert not self._handed
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
