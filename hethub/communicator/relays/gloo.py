"""The `gloo` relay: host-staged TCP through a Gloo group over the whole world, one connection per pair and lane."""

import torch
import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.communicator.joining.rendezvous import Rendezvous
from hethub.communicator.relays.relay import PeerError, Relay, Transfer

_STRIPE_BYTES = 1 << 20


def connect_gloo(
    rendezvous: Rendezvous, name: str, rank: int, size: int, timeout_seconds: float
) -> torch_private.GlooGroup:
    """A Gloo group of the ranks that meet under `name` in the store, this one as `rank` of `size`. Raises RunFailed where
    any rank of the world fails meanwhile, or has failed."""
    assert rendezvous.watch is not None
    store = dist.PrefixStore(name, rendezvous.store)
    return rendezvous.watch.liveness.unless_failed(
        lambda: torch_private.create_gloo_group(store, rank, size, timeout_seconds, rendezvous.address)
    )


class GlooTransfer:
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


class Striped:
    """One message cut over several lanes."""

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()


class GlooRelay(Relay):
    """Large messages go over all lanes at once, small ones over the first."""

    name = "gloo"

    def __init__(self, lanes: list[torch_private.GlooGroup], rank: int, size: int) -> None:
        self._lanes = lanes
        self._rank = rank
        self._size = size

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._over_lanes(torch_private.gloo_send, tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        return self._over_lanes(torch_private.gloo_receive, tensor, peer, tag)

    def _over_lanes(self, start: object, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        tensor = tensor.view(torch.uint8)  # Gloo moves bytes, but knows few types by name
        if len(self._lanes) == 1 or tensor.nbytes < _STRIPE_BYTES:
            return self._one(start, self._lanes[0], tensor, peer, tag)
        stripes = tensor.tensor_split(len(self._lanes))
        return Striped(
            [self._one(start, lane, part, peer, tag) for lane, part in zip(self._lanes, stripes, strict=True)]
        )

    @staticmethod
    def _one(start: object, lane: torch_private.GlooGroup, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        try:
            return GlooTransfer(start(lane, tensor, peer, tag), tensor, peer)  # type: ignore[operator]
        except RuntimeError as error:
            raise PeerError(peer, gloo_reason(error)) from error

    def abort(self) -> None:
        for lane in self._lanes:
            torch_private.break_gloo_group(lane, self._rank, self._size)


def gloo_reason(error: RuntimeError) -> str:
    """Gloo's message in a clause, without its source path and advice."""
    text = str(error)
    if "imed out" in text:
        return "no answer within the timeout"
    if "losed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "connection closed"
    if "pair closure" in text:
        return "communication was given up on this rank"
    return text.split("] ", 1)[-1].split(". This is", 1)[0]
