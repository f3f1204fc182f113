"""One world over all ranks of a job: groups, messages, barriers, and the certainty that every process ends."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.communicator.bridge.messages import PointToPoint
from hethub.communicator.context import Context
from hethub.communicator.groups import backend
from hethub.communicator.groups.process_group import HethubGroup
from hethub.communicator.joining.connection import Failure
from hethub.communicator.joining.islands import Islands, island_index
from hethub.communicator.joining.rendezvous import Rendezvous
from hethub.communicator.relays.choice import RelayChoice
from hethub.communicator.setup import connecting, make_context
from hethub.communicator.work import Operation
from hethub.kernels.device import Device, choose_device

_OBJECTS_TAG = 2**30  # beyond those of all messages


def connect(
    rendezvous: Rendezvous,
    *,
    device: Device | None = None,
    islands: Sequence[Sequence[int]] | None = None,
    relay: str = "auto",
    wire: str = "exact",
    timeout_seconds: float = 120.0,
    debug: bool = False,
    num_lanes: int = 1,
    staged_ranks: Sequence[int] = (),
    stored_relays: Mapping[str, Any] | None = None,
) -> "World":
    """The connected world, once every rank of `rendezvous` has called it with the same arguments.

    `islands` emulates islands; without it, ranks of one vendor form one. With `debug`, bridged operations compare
    first what each rank is about to do, and name the rank that does something else. `num_lanes` connections per pair
    and way carry the gloo relay's large messages: one fills a slow link, a fast one may want 2 to 4. `staged_ranks`
    treat host tensors as they would a device's, so that this way can be tested without one. `stored_relays` is an
    earlier world's `relays`, used again where `relay` is auto. Raises BadInput where ranks do not fit together
    (versions, islands, relay) and RunFailed where one does not come within the timeout.
    """
    with connecting(rendezvous):
        context = make_context(
            rendezvous,
            device=device or choose_device(rendezvous.local_rank, rendezvous.local_size),
            islands=islands,
            relay=relay,
            wire=wire,
            timeout_seconds=timeout_seconds,
            debug=debug,
            num_lanes=num_lanes,
            staged_ranks=staged_ranks,
            stored_relays=None if stored_relays is None else RelayChoice.from_dict(stored_relays),
        )
        world = World(context, backend.init_default_group(context))
    world.barrier()  # all have read what they need of the store: from here on rank 0 may stop without holding them up
    return world


class World:
    """All ranks of a job. Its default group is torch's, so torch.distributed works as usual beside it."""

    def __init__(self, context: Context, group: dist.ProcessGroup) -> None:
        self._context = context
        self._group = group
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(context.size)): group}
        label = f"the world of {context.size} ranks"
        members = range(context.size)
        spans_hosts = len(set(context.hosts)) > 1
        self._messages = PointToPoint(
            context.gloo, context, members, label, context.links(0, members, label),
            context.gloo_group("world/down", members) if spans_hosts else None,
        )  # fmt: skip
        self._closed = False

    @property
    def rank(self) -> int:
        return self._context.rank

    @property
    def size(self) -> int:
        return self._context.size

    @property
    def device(self) -> Device:
        return self._context.device

    @property
    def islands(self) -> Islands:
        return self._context.islands

    @property
    def default_group(self) -> dist.ProcessGroup:
        return self._group

    def island_of(self, rank: int) -> int:
        """The index in `islands` of the island that holds `rank`."""
        return island_index(self.islands, rank)

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of these ranks, None on ranks outside it; made once, then remembered.

        Every rank of the world calls it, member or not, for the same sets in the same order. Inside one island it is
        the native library's group; across islands it is bridged.
        """
        members = tuple(sorted(ranks))
        if members not in self._groups:
            self._groups[members] = backend.new_group(self._context, members)
        return self._groups[members]

    def gloo_group(self, timeout: timedelta) -> dist.ProcessGroup:
        """A new Gloo group of all ranks for a thread of its own; it fails with the world. Raises RunFailed where a rank
        fails or leaves before all have connected."""
        everyone = list(range(self.size))
        with self.guard("connecting a group for another thread"):
            group = self._context.watch.liveness.unless_failed(
                lambda: dist.new_group(everyone, backend="gloo", timeout=timeout), everyone
            )
        self._context.release_with(group, group.group_name)
        self._context.watch_gloo(torch_private.gloo_of(group), self.rank, self.size, group.group_name)
        return group

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> torch_private.WorkBase:
        """A Work that is done when `tensor` may be changed; the receiver must have asked for it by then.

        Messages of one direction are received in the order in which they are sent: between two devices of an island all,
        over the bridge those whose tags differ by a multiple of 4,096.
        """
        operation = self._operation(f"send to rank {dst} (tag {tag})", dst)
        return self._messages.send(tensor, dst, tag, operation)

    def receive(self, tensor: torch.Tensor, src: int, tag: int = 0) -> torch_private.WorkBase:
        """A Work that is done when `tensor` holds rank `src`'s message with `tag`; may be posted long before."""
        operation = self._operation(f"receive from rank {src} (tag {tag})", src)
        return self._messages.receive(tensor, src, tag, operation)

    def connect_messages(self, sends: Sequence[int], receives: Sequence[int]) -> None:
        """Connects what this rank's device will send to and receive from these ranks; the first messages do it else.

        Every rank concerned calls it, once for all its peers.
        """
        island = self.island_of(self.rank)
        sends, receives = ([peer for peer in of if self.island_of(peer) == island] for of in (sends, receives))
        with self.guard("connecting messages"):
            self._messages.connect(sends, receives)

    def all_gather_objects(self, value: Any, patience: timedelta | None = None) -> list[Any]:
        """Every rank's JSON-able `value`, in rank order, over the Gloo group of all ranks.

        In each round a rank passes on all it has, which doubles what it knows: log2(ranks) rounds. Gloo's own all-gather
        goes around a ring, which at every step would wait for as many messages as there are ranks. `patience` in place
        of the world's timeout is for values that ranks compute for unlike times: a dead rank is named all the same, by
        the watch.
        """
        data = json.dumps(value).encode()
        with self.guard("all_gather_objects"):
            for distance in (1 << number for number in range((self.size - 1).bit_length())):
                to, source = (self.rank - distance) % self.size, (self.rank + distance) % self.size
                length = self._swapped(torch.tensor([len(data)]), to, source, 1, patience)
                sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                data += b"," + bytes(self._swapped(sent, to, source, int(length), patience).numpy())
        values = json.loads(b"[" + data + b"]")  # of this rank, the next, and so on around, some twice
        return [values[(rank - self.rank) % self.size] for rank in range(self.size)]

    def _swapped(
        self, sent: torch.Tensor, to: int, source: int, numel: int, patience: timedelta | None
    ) -> torch.Tensor:
        """What `source` sends while `sent` goes to another rank."""
        gloo, received = self._context.gloo, torch.empty(numel, dtype=sent.dtype)
        works = [
            torch_private.gloo_receive(gloo, received, source, _OBJECTS_TAG),
            torch_private.gloo_send(gloo, sent, to, _OBJECTS_TAG),
        ]
        for work in works:
            work.wait() if patience is None else work.wait(patience)
        return received

    def barrier(self) -> None:
        """Returns when every rank of the world has called it."""
        with self.guard("barrier"):
            self._context.gloo.barrier().wait()

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Native errors of the block (a closed connection, a timeout) become RunFailed naming the rank behind them."""
        return self._operation(what).beginning()

    def counters(self) -> dict[str, Any]:
        """What has been communicated since `connect`, as JSON-able data: operations per group, and links."""
        return self._context.counters.to_dict()

    @property
    def relays(self) -> dict[str, Any]:
        """What carries messages, as JSON-able data: [bytes, relay] inside a host and between hosts; ranks by host."""
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(self._context.hosts):
            ranks.setdefault(host, []).append(rank)
        return {**self._context.relay_choice.to_dict(), "hosts": list(ranks.values())}

    @property
    def failure(self) -> Failure | None:
        """What has failed first in the world, None while all is well."""
        return self._context.watch.liveness.failure

    def watch(self, grace_seconds: float | None = None) -> None:
        """From here on this process ends when any rank fails, even if its main thread is stuck in a native call.

        All pending work fails at once, and after `grace_seconds` a process that neither has ended by itself nor is
        about to (`abort`) prints the reason and exits with 1.
        """
        self._context.watch.end_with_the_job(grace_seconds)

    def abort(self, reason: str) -> None:
        """Tells every rank that this one has failed and why, and makes all its pending work fail."""
        self._context.watch.tell(reason)
        self._context.abort()

    def close(self) -> None:
        """Leaves the world: with all other ranks when all is well, at once when one has failed."""
        if self._closed:
            return
        if not self._context.given_up:
            self.barrier()
        self._closed = True
        self._messages.close()
        for group in reversed(self._groups.values()):  # the default group last: it closes the relays of all
            if isinstance(group, HethubGroup):
                group.shutdown()
        self._groups.clear()
        self._context.close()
        dist.destroy_process_group()

    def _operation(self, name: str, peer: int | None = None) -> Operation:
        group = f"the world of {self.size} ranks"
        return Operation(name=name, group=group, rank=self.rank, explainer=self._context, peer=peer)
