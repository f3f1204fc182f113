"""A group's way to its members: messages by group rank and stage, each over the relay chosen for that pair."""

from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch

from hethub.communicator.counters import Counters
from hethub.communicator.relay import Incoming, Outgoing, Relay, Transfer


class Stage(IntEnum):
    """The steps of a bridged collective. Each has a tag of its own, so chunks may overlap freely."""

    SCATTER = 0
    EXCHANGE = 1
    GATHER = 2
    SPREAD = 3
    DIRECT = 4
    SMALL = 5
    TOTAL = 6


_NUM_STAGES = 8


class Links:
    """Sends and receives among `members` (the world's ranks, in group order); `number` sets this group's tags apart.

    `label` names the group in the counters.
    """

    def __init__(
        self,
        *,
        relays: Mapping[int, Relay],
        members: Sequence[int],
        number: int,
        label: str,
        near: frozenset[int],
        counters: Counters,
    ) -> None:
        self._relays = relays
        self._members = members
        self._first_tag = number * _NUM_STAGES
        self._label = label
        self._near = near
        self._counters = counters

    def send(self, tensor: torch.Tensor, to: int, stage: Stage) -> Transfer:
        peer = self._members[to]
        self._count(to, peer, tensor.nbytes)
        return self._relays[peer].send(tensor, peer, self._first_tag + stage)

    def outgoing(self, num_elements: int, dtype: torch.dtype, to: int) -> Outgoing:
        peer = self._members[to]
        return self._relays[peer].outgoing(num_elements, dtype, peer)

    def send_outgoing(self, message: Outgoing, to: int, stage: Stage) -> Transfer:
        self._count(to, self._members[to], message.tensor.nbytes)
        return message.send(self._first_tag + stage)

    def _count(self, to: int, peer: int, num_bytes: int) -> None:
        name = self._relays[peer].name
        self._counters.count_sent(self._label, peer, name, is_bridge=to not in self._near, num_bytes=num_bytes)

    def receive(self, tensor: torch.Tensor, source: int, stage: Stage) -> Transfer:
        peer = self._members[source]
        return self._relays[peer].receive(tensor, peer, self._first_tag + stage)

    def expect(self, num_elements: int, dtype: torch.dtype, source: int, stage: Stage) -> Incoming:
        peer = self._members[source]
        return self._relays[peer].expect(num_elements, dtype, peer, self._first_tag + stage)
