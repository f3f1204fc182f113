"""What the groups of one world share in a process: ranks, islands, relays, liveness, counters."""

import contextlib
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.communicator.bridge.chunks import Tuning
from hethub.communicator.bridge.collectives import Bridge
from hethub.communicator.bridge.launch_order import Dispatcher
from hethub.communicator.bridge.links import Links
from hethub.communicator.bridge.staging import Stager
from hethub.communicator.counters import Counters
from hethub.communicator.joining.connection import Failure
from hethub.communicator.joining.islands import Islands, island_index, restrict
from hethub.communicator.joining.liveness import run_apart
from hethub.communicator.joining.rendezvous import NEWS_SECONDS, Rendezvous
from hethub.communicator.joining.watch import Watch
from hethub.communicator.relays.choice import Carriers, RelayChoice
from hethub.communicator.relays.gloo import connect_gloo
from hethub.communicator.relays.relay import Relay
from hethub.communicator.work import CallbackThreads
from hethub.kernels.device import Device
from hethub.kernels.reference import TorchKernels
from hethub.spec.errors import RunFailed

_log = logging.getLogger(__name__)
_NO_TURN = contextlib.nullcontext()


@dataclass(kw_only=True)
class Context:
    """One process's part in a world. Groups are made from it and hold it; nothing in the module is global."""

    rendezvous: Rendezvous
    device: Device
    islands: Islands
    gloo: torch_private.GlooGroup
    relays: Mapping[int, Carriers]
    relay_choice: RelayChoice
    hosts: Sequence[str]
    """What tells each rank's host from the others."""
    store_server: int | None
    """The rank with which the store in which the ranks met ends; None where a launcher serves it."""
    watch: Watch
    timeout_seconds: float
    device_ranks: frozenset[int] = frozenset()
    """Ranks whose tensors may lie outside host memory."""
    wire: str = "exact"
    debug: bool = False
    kernels: TorchKernels = field(default_factory=TorchKernels)
    stages_host_tensors: bool = False
    """Host tensors take the way of a device's, with Gloo for the island's legs: it can be tested without one."""
    counters: Counters = field(default_factory=Counters)
    spanning: dict[str, Any] = field(default_factory=dict)
    """Our operations over native groups, by name, where a caller has asked for them."""
    emulation: Any = None
    """What makes the groups of an emulation, None elsewhere."""
    _bridges: dict[str, Bridge] = field(default_factory=dict)
    _meetings: Counter[str] = field(default_factory=Counter)
    _releases: dict[str, "weakref.finalize[[str], dist.ProcessGroup]"] = field(default_factory=dict)
    _gloo_groups: list[tuple[torch_private.GlooGroup, int, int, str]] = field(default_factory=list)
    _nccl_groups: list[tuple[Any, str]] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)
    """A garbage collection in the thread that holds it may call `release`."""
    _closed: bool = False
    aborted: bool = False
    """Whether everything under way was given up; the world cannot be used any more."""
    _broken: str | None = None
    """What has failed first among this rank's operations, in words: an error itself would keep what its frames hold."""

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.device)
        self.callbacks = CallbackThreads(self.device.activate)

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    @property
    def size(self) -> int:
        return self.rendezvous.size

    @property
    def has_device(self) -> bool:
        """Whether tensors of this rank may lie outside host memory."""
        return self.rank in self.device_ranks

    @property
    def given_up(self) -> bool:
        """Whether everything under way was given up, or is about to be: the libraries' groups are aborted then."""
        return self.aborted or self.watch.liveness.failure is not None

    def turn_of(
        self, tensors: Sequence[torch.Tensor], on_host: AbstractContextManager[object] = _NO_TURN
    ) -> AbstractContextManager[object]:
        """The turn in which a native group launches a collective of these tensors (none given: a barrier); `on_host` is the
        one for those of the host."""
        lie_there = all(tensor.device.type == "cpu" for tensor in tensors) and (bool(tensors) or not self.device.is_gpu)
        return on_host if lie_there and not self.stages_host_tensors else self.dispatcher.take_turn()

    def stager(self) -> Stager:
        """What moves tensors to and from the device for one thread of communication."""
        return Stager(
            device=self.device,
            kernels=self.kernels,
            stream=self.device.new_stream(),
            stages_host_tensors=self.stages_host_tensors,
        )

    def explain(self) -> str | None:
        """The world's failure, given a moment to arrive: a closed connection is often felt before its cause is told."""
        failure = self.watch.liveness.wait_for_failure(NEWS_SECONDS)
        return str(failure) if failure is not None else None

    def give_up(self, failure: Exception, *, is_known: bool) -> None:
        """From here on no operation of this rank's groups runs, and the world fails on all ranks unless they know.

        Groups share relays, streams and the libraries' launch order, so what one has missed is missing for all.
        """
        with self._lock:
            if self._broken is not None:
                return
            self._broken = str(failure)
        if not is_known and not self.given_up:
            self.aborted = True
            self.watch.liveness.report(f"failed: {failure}")
            # Where rank 0 has left nobody passes that on: then the others feel that the connections end.
            run_apart(self.abort)

    def require_whole(self, what: str) -> None:
        """Raises RunFailed where an operation has failed on this rank: `what`, which comes behind it, cannot run."""
        if self._broken is not None:
            raise RunFailed(f"{what} cannot run on rank {self.rank}, behind an operation that failed: {self._broken}")

    def meeting_place(self, what: str, name: str, members: Sequence[int]) -> str:
        """Where the members of a group find each other in the store, this time.

        torch counts each rank's groups to name them, so groups without a common member may have one name. With
        `use_local_synchronization` it names them by their members: one made anew has the name of one destroyed, whose
        members may not have read each other's addresses yet.
        """
        place = f"{what}/{name}/{members[0]}"
        self._meetings[place] += 1
        return f"{place}/{self._meetings[place]}"

    def gloo_group(
        self, name: str, members: Sequence[int], timeout_seconds: float | None = None
    ) -> torch_private.GlooGroup:
        """A Gloo group of its own for `members` (all of them ask for it at the same time)."""
        key = self.meeting_place("gloo", name, members)
        return self._gloo_under(key, name, members, timeout_seconds or self.timeout_seconds)

    def _gloo_under(
        self, key: str, name: str, members: Sequence[int], timeout_seconds: float
    ) -> torch_private.GlooGroup:
        """A Gloo group that meets under a key of the store, and that `abort` will reach."""
        gloo = connect_gloo(self.rendezvous, key, members, timeout_seconds)
        self.watch_gloo(gloo, members.index(self.rank), len(members), name)
        return gloo

    def native_group(
        self, name: str, island: Sequence[int], timeout_seconds: float, *, for_messages: bool = False
    ) -> Any:
        """The island's own library for messages or the legs of a group: NCCL or RCCL on devices, Gloo where host tensors
        are staged."""
        key = self.meeting_place("native", name, island)
        if self.device.is_gpu:
            store, place = dist.PrefixStore(key, self.rendezvous.store), island.index(self.rank)
            nccl = torch_private.create_nccl_group(
                store, place, len(island), timeout_seconds, for_messages=for_messages
            )
            self.watch_nccl(nccl, name)
            return nccl
        return self._gloo_under(key, name, island, timeout_seconds)

    def watch_gloo(self, gloo: torch_private.GlooGroup, rank: int, size: int, name: str) -> None:
        """`abort` will reach this part of the group `name` too, until that is released."""
        with self._lock:
            self._gloo_groups.append((gloo, rank, size, name))

    def release(self, name: str) -> None:
        """Free what was made for a group that has been destroyed: connections, threads, buffers."""
        with self._lock:
            self._gloo_groups = [row for row in self._gloo_groups if row[3] != name]
            self._nccl_groups = [row for row in self._nccl_groups if row[1] != name]
        self._bridges.pop(name, None)
        self._releases.pop(name, None)
        spanning = self.spanning.pop(spanning_name(name), None)
        if spanning is not None:
            spanning.shutdown()

    def release_with(self, group: dist.ProcessGroup, name: str) -> None:
        """Releases what will be made for a native group when that is no more: it has no shutdown of ours. One that has been
        destroyed may live on while another of its name is made; what is left of it goes now."""
        if name in self._releases:
            self._releases[name]()
        self._releases[name] = weakref.finalize(group, self.release, name)
        self._releases[name].atexit = False

    def watch_nccl(self, nccl: Any, name: str) -> None:
        """Do for NCCL and RCCL what `watch_gloo` does."""
        with self._lock:
            self._nccl_groups.append((nccl, name))

    def bridge(self, name: str, members: Sequence[int], label: str, timeout_seconds: float) -> Bridge:
        """The bridged collectives of the group `name`; made at its first call, which all members make."""
        if name not in self._bridges:
            self._bridges[name] = self._make_bridge(name, members, label, timeout_seconds)
        return self._bridges[name]

    def _make_bridge(self, name: str, members: Sequence[int], label: str, timeout_seconds: float) -> Bridge:
        rank = members.index(self.rank)
        tuning = Tuning.over(
            set().union(*(self.relays[member].names for member in members if member != self.rank)),
            has_devices=not self.device_ranks.isdisjoint(members),
        )
        links = self.links(self._agree_on_number(name, members, timeout_seconds), members, label)
        return Bridge(links=links, islands=restrict(self.islands, members), rank=rank, size=len(members), tuning=tuning)

    def links(self, number: int, members: Sequence[int], label: str) -> Links:
        """What joins this rank to the members of a group."""
        islands = restrict(self.islands, members)
        near = frozenset(islands[island_index(islands, members.index(self.rank))])
        return Links(relays=self.relays, members=members, number=number, label=label, near=near, counters=self.counters)

    def _agree_on_number(self, name: str, members: Sequence[int], timeout_seconds: float) -> int:
        """A number no other group of the world has, drawn by the group's first member. Raises RunFailed where that does not
        come, or a rank has failed or left."""
        store = dist.PrefixStore(self.meeting_place("group-number", name, members), self.rendezvous.store)
        if self.rank == members[0]:
            store.set("number", str(self.rendezvous.store.add("group-numbers", 1)))
        look, until, pause = self.watch.liveness.look_for(members), time.monotonic() + timeout_seconds, 0.001
        while not store.check(["number"]):  # in a get, the store would have no answer for others when a rank is gone
            look(pause)
            pause = min(2 * pause, 0.2)
            if time.monotonic() > until:
                raise RunFailed(
                    f"rank {self.rank} has not heard the number of group '{name}' from rank {members[0]} within {timeout_seconds:g} s."
                )
        number = int(store.get("number"))
        torch_private.delete_when_read(store, ["number"], len(members))
        return number

    def _distinct_relays(self) -> set[Relay]:
        return {relay for carriers in self.relays.values() for relay in carriers}

    def abort(self, failure: Failure | None = None) -> None:
        """Makes everything under way in this process fail, in every group; the world cannot be used any more, but the
        store it met in can, unless it ends with the rank that failed: another may meet there."""
        _log.debug("giving up communication on rank %d: %s", self.rank, failure)
        self.aborted = True
        for relay in self._distinct_relays():
            relay.abort()
        with self._lock:
            groups = [(self.gloo, self.rank, self.size, ""), *self._gloo_groups]
            nccl_groups = list(self._nccl_groups)
        for gloo, rank, size, _ in groups:
            torch_private.break_gloo_group(gloo, rank, size)
        if failure is not None and failure.rank == self.store_server:
            torch_private.break_store(self.rendezvous.store)
        for nccl, name in nccl_groups:  # last: it may wait for the device
            try:
                nccl.abort()
            except RuntimeError as error:
                _log.warning("the native part of group %r could not be aborted on rank %d: %s", name, self.rank, error)

    def close(self) -> None:
        """Frees connections and threads; a second call does nothing.

        The other ranks may go on among themselves: this one says goodbye. When rank 0 goes, nobody watches any more.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for name in list(self.spanning):  # before the relays that they use: they end what is under way
            self.spanning.pop(name).shutdown()
        for relay in self._distinct_relays():
            relay.close()
        if self.rendezvous.finalize is not None and self.watch.liveness.failure is None:
            self.rendezvous.finalize()  # waits for the other ranks, which are watched until then
        self.watch.close()
        self.callbacks.stop()


def spanning_name(name: str) -> str:
    """The name of our operations over the native group `name`."""
    return f"over/{name}"
