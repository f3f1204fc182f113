"""The `gloo` relay: host-staged TCP through Gloo groups over the whole world, a connection per pair, way and lane.

A receiver tells Gloo's sender that it is ready, and the sender waits for that. On a connection that carries messages both
ways, the word that one is awaited queues behind another that leaves: the ways then take turns, and a link that carries
both at once gives half of its rate.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.communicator.joining.rendezvous import Rendezvous
from hethub.communicator.relays.relay import CLOSED, PeerError, Relay, Transfer

_STRIPE_BYTES = 1 << 20
_NUM_SIZES = (
    4093  # a prime near the calls that a tag tells apart: sizes of messages have many factors, and not this one
)

_SIZE_STEP = 2_654_435_761  # the number of tags is a prime: sizes of one tag below 2 GiB do not meet (Knuth's hash)

Lanes = list[torch_private.GlooGroup]


def connect_gloo(
    rendezvous: Rendezvous, name: str, members: Sequence[int], timeout_seconds: float
) -> torch_private.GlooGroup:
    """A Gloo group of these ranks, who meet under `name` in the store. Raises RunFailed where any rank of the world fails
    meanwhile, or has failed, or a member has left."""
    assert rendezvous.watch is not None
    store, place = dist.PrefixStore(name, rendezvous.store), members.index(rendezvous.rank)
    return rendezvous.watch.liveness.unless_failed(
        lambda: torch_private.create_gloo_group(store, place, len(members), timeout_seconds, rendezvous.address),
        members,
    )


class GlooTransfer(Transfer):
    """A Gloo send or receive under way."""

    def __init__(self, work: object, tensor: torch.Tensor, peer: int) -> None:
        self._work = work
        self._tensor = tensor
        self._peer = peer

    def wait(self) -> None:
        try:
            self._work.wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise PeerError(self._peer, gloo_reason(error)) from error


def sized(tag: int, tensor: torch.Tensor) -> int:
    """The tag of a message of that size: Gloo takes a shorter one than was asked for without a word, and ends the process at
    a longer one, so unlike sizes are not to meet."""
    return (tag + tensor.nbytes * _SIZE_STEP) % torch_private.NUM_GLOO_TAGS


def begin_transfer(
    start: object, group: torch_private.GlooGroup, tensor: torch.Tensor, place: int, tag: int, peer: int
) -> Transfer:
    """A send or receive with the group's member `place`, who is the world's rank `peer`. Raises PeerError."""
    try:
        return GlooTransfer(start(group, tensor, place, tag), tensor, peer)  # type: ignore[operator]
    except RuntimeError as error:
        raise PeerError(peer, gloo_reason(error)) from error


class Striped(Transfer):
    """One message cut over several lanes."""

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()


class GlooRelay(Relay):
    """Large messages go over all lanes of their way at once, small ones over the first. `lanes` are those up, from lower
    ranks to higher, and those down."""

    name = "gloo"

    def __init__(self, lanes: tuple[Lanes, Lanes], rank: int, size: int) -> None:
        self._up, self._down = lanes
        self._rank = rank
        self._size = size

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        lanes = self._up if peer > self._rank else self._down
        return self._over_lanes(lanes, torch_private.gloo_send, tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        lanes = self._down if peer > self._rank else self._up
        return self._over_lanes(lanes, torch_private.gloo_receive, tensor, peer, tag)

    def _over_lanes(self, lanes: Lanes, start: object, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        tensor = tensor.view(torch.uint8)  # Gloo moves bytes, but knows few types by name
        # As in `sized`, above the tags that are the groups' own.
        tag = (tag + tensor.nbytes % _NUM_SIZES * self.num_tags) % (self.num_tags * self.num_calls)
        if len(lanes) == 1 or tensor.nbytes < _STRIPE_BYTES:
            return begin_transfer(start, lanes[0], tensor, peer, tag, peer)
        stripes = tensor.tensor_split(len(lanes))
        return Striped(
            [begin_transfer(start, lane, part, peer, tag, peer) for lane, part in zip(lanes, stripes, strict=True)]
        )

    def abort(self) -> None:
        for lane in (*self._up, *self._down):
            torch_private.break_gloo_group(lane, self._rank, self._size)


def gloo_reason(error: RuntimeError) -> str:
    """Gloo's message in a clause, without its source path and advice."""
    text = str(error)
    if "imed out" in text:
        return "no answer within the timeout"
    if "losed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return CLOSED
    if "pair closure" in text:
        return "communication was given up on this rank"
    return text.split("] ", 1)[-1].split(". This is", 1)[0]
