"""What joins a rank to its group's members: messages by group rank and stage, over the relay for pair and size."""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import torch

from hethub.communicator.counters import Counters, Leg, LegClock
from hethub.communicator.relays.choice import Carriers
from hethub.communicator.relays.relay import Incoming, Outgoing, Relay, Transfer
from hethub.kernels.device import Event, Stream
from hethub.spec.errors import BadInput


class Stage(IntEnum):
    """The steps of a bridged collective. Each has a tag of its own, so chunks may overlap freely."""

    SCATTER = 0
    EXCHANGE = 1
    GATHER = 2
    SPREAD = 3
    DIRECT = 4
    SMALL = 5
    TOTAL = 6
    MESSAGE = 7


_NUM_STAGES = len(Stage)
_NUM_MESSAGE_TAGS = 4096  # so that none is above 32,767, which every MPI takes


def message_stage(tag: int) -> int:
    """The stage of a message of the world, in the links of number 0. Messages whose tags are a multiple of that apart are
    told apart by their order."""
    return tag % _NUM_MESSAGE_TAGS * _NUM_STAGES + Stage.MESSAGE


def wait_for(transfers: Iterable[Transfer]) -> None:
    """Returns when all tensors may be used again."""
    for transfer in transfers:
        transfer.wait()


def wait_until_read(transfers: Iterable[Transfer]) -> None:
    """Returns when the peers have all messages: for who hears nothing from them that would keep it from running ahead, with
    one more of them in memory each time."""
    for transfer in transfers:
        transfer.wait_until_read()


class Links:
    """Sends and receives among `members` (the world's ranks, in group order); `number` sets this group's tags apart.

    `label` names the group in the counters. A stage is a `Stage`, or under number 0 a `message_stage`. Raises BadInput
    where a relay does not know so many groups apart.
    """

    call = 0
    """The group's operation under way, as a number that another one has not: ranks that are in unlike ones do not meet."""

    def __init__(
        self,
        *,
        relays: Mapping[int, Carriers],
        members: Sequence[int],
        number: int,
        label: str,
        near: frozenset[int],
        counters: Counters,
    ) -> None:
        self._relays = relays
        self._members = members
        self._first_tag = number * _NUM_STAGES
        for relay in (relay for member in members for relay in relays[member]):
            if self._first_tag + max(Stage) >= relay.num_tags:
                raise BadInput(
                    f"relay {relay.name} tells at most {relay.num_tags // _NUM_STAGES - 1:,} groups over islands apart, as it has"
                    f" {relay.num_tags:,} tags, but {label} is number {number:,}. Make fewer groups, or choose another"
                    " communicator.relay (gloo)."
                )
        self._label = label
        self._near = near
        self._counters = counters

    def send(self, tensor: torch.Tensor, to: int, stage: int) -> Transfer:
        relay, peer = self._carrier(to, tensor.nbytes)
        self._count(to, peer, relay, tensor.nbytes)
        return relay.send(tensor, peer, self._tag(relay, stage))

    def outgoing(self, num_elements: int, dtype: torch.dtype, to: int) -> Outgoing:
        relay, peer = self._carrier(to, num_elements * dtype.itemsize)
        return relay.outgoing(num_elements, dtype, peer)

    def send_outgoing(self, message: Outgoing, to: int, stage: int) -> Transfer:
        relay, peer = self._carrier(to, message.tensor.nbytes)
        self._count(to, peer, relay, message.tensor.nbytes)
        return message.send(self._tag(relay, stage))

    def receive(self, tensor: torch.Tensor, source: int, stage: int) -> Transfer:
        relay, peer = self._carrier(source, tensor.nbytes)
        return relay.receive(tensor, peer, self._tag(relay, stage))

    def expect(self, num_elements: int, dtype: torch.dtype, source: int, stage: int) -> Incoming:
        relay, peer = self._carrier(source, num_elements * dtype.itemsize)
        return relay.expect(num_elements, dtype, peer, self._tag(relay, stage))

    def takes_device_memory(self, member: int, num_bytes: int) -> bool:
        """Whether messages of that size to and from the member need not lie in host memory."""
        return self._carrier(member, num_bytes)[0].takes_device_memory

    def _tag(self, relay: Relay, stage: int) -> int:
        return self._first_tag + stage + self.call % relay.num_calls * relay.num_tags

    def _carrier(self, member: int, num_bytes: int) -> tuple[Relay, int]:
        """The relay for a message of that size, and the member's rank in the world."""
        peer = self._members[member]
        return self._relays[peer].carrier(num_bytes), peer

    def _count(self, to: int, peer: int, relay: Relay, num_bytes: int) -> None:
        self._counters.count_sent(self._label, peer, relay.name, is_bridge=to not in self._near, num_bytes=num_bytes)


class CopiedDown:
    """A message on its way from a device: the copy to memory that its relay lends is begun here, on the stream `down` and
    behind `ready`; the call waits for it, then sends."""

    def __init__(
        self, links: Links, message: torch.Tensor, peer: int, stage: int, ready: Event, down: Stream, clock: LegClock
    ) -> None:
        self._links, self._peer, self._stage, self._clock = links, peer, stage, clock
        self._lent = links.outgoing(message.numel(), message.dtype, peer)
        down.wait(ready)
        with down.active():
            self._lent.tensor.copy_(message, non_blocking=True)
        down.keep(message)
        self._copied = down.record()

    def __call__(self) -> Transfer:
        with self._clock(Leg.COPY):
            self._copied.synchronize()
        transfer = self._links.send_outgoing(self._lent, self._peer, self._stage)
        self._lent.release()
        return transfer
