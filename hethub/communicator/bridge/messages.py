"""Tagged messages between two ranks of a group, any number under way, receives posted as early as one likes.

Three ways, which sender and receiver choose alike:

- Inside an island, device tensors go by the island's library, on a group of two for each direction. The library matches
  messages in the order in which they are sent, so receives are posted in that order; tags are not looked at.
- Between islands, where one of the two has a device, messages go over the bridge's relays, in chunks that overlap: copied to
  host memory that the relay lends, sent as soon as they are there, copied to the device as soon as they have come. A
  thread for each message waits for the copies and for the wire; the caller's only for messages that it needs.
- Everything else goes over Gloo, which moves bytes in threads of its own; between hosts on a connection for each way.

A group's own messages (`dist.send`) take Gloo always, because it alone can receive from any rank; those of a device are
staged whole.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from hethub.communicator import torch_private
from hethub.communicator.bridge.chunks import Tuning
from hethub.communicator.bridge.launch_order import StartOrder
from hethub.communicator.bridge.links import CopiedDown, Links, message_stage, wait_for
from hethub.communicator.bridge.staging import Staged, Stager, flat_of, is_plain, place_for
from hethub.communicator.counters import Counters, LegClock
from hethub.communicator.joining.islands import Islands, island_index
from hethub.communicator.relays.gloo import GlooTransfer, begin_transfer, sized
from hethub.communicator.relays.relay import Transfer
from hethub.communicator.work import (
    CallbackThreads,
    HethubWork,
    Job,
    NativeWork,
    OnceJob,
    Operation,
    WaitedWork,
    Worker,
    writing,
)
from hethub.kernels.device import Device, Event
from hethub.spec.errors import BadInput
from hethub.spec.ranges import split

_CHUNKS = Tuning()
Start = Callable[[], Transfer]  # begins what a relay carries


class Process(Protocol):
    """What messages use of this process's part in the world."""

    islands: Islands
    counters: Counters
    callbacks: CallbackThreads
    device_ranks: frozenset[int]
    device: Device
    timeout_seconds: float

    @property
    def rank(self) -> int: ...

    @property
    def given_up(self) -> bool: ...

    def stager(self) -> Stager: ...

    def native_group(
        self, name: str, island: Sequence[int], timeout_seconds: float, *, for_messages: bool = False
    ) -> Any: ...


class PointToPoint:
    """Messages among `members` (the world's ranks, in group order), who are named by their place in the group.

    `label` names the group in the counters; `links` are what joins the world's ranks, None for a group's own messages.
    `gloo_down` takes those to lower ranks, where one connection would carry both ways by turns (`relays.gloo`).
    """

    def __init__(
        self,
        gloo: torch_private.GlooGroup,
        process: Process,
        members: Sequence[int],
        label: str,
        links: Links | None = None,
        gloo_down: torch_private.GlooGroup | None = None,
    ) -> None:
        self._process = process
        self._members = members
        self._gloo, self._gloo_down = gloo, gloo if gloo_down is None else gloo_down
        self._label = label
        self._links = links
        self._stager = process.stager()
        if links is not None:
            self._down, self._up = process.device.new_stream(), process.device.new_stream()
        self._senders: dict[int, tuple[Worker, Stager]] = {}
        self._pairs: dict[tuple[int, int], Any] = {}
        self._sends, self._receives = StartOrder(), StartOrder()
        self._lock = threading.Lock()
        self._aborted = False

    def abort(self) -> None:
        """From here on nothing is received from any rank; other messages fail on the group's closed connections."""
        self._aborted = True

    def connect(self, sends: Sequence[int], receives: Sequence[int]) -> None:
        """Connects what device tensors to and from these ranks of the island need, in an order without circles."""
        if self._process.rank not in self._process.device_ranks:
            return
        own, place, works = self._process.rank, self._process.device.torch_device, []
        for source, target in sorted([(own, peer) for peer in sends] + [(peer, own) for peer in receives]):
            move = torch_private.native_send if source == own else torch_private.native_receive
            works.append(
                move(self._pair(source, target), torch.zeros(1, dtype=torch.uint8, device=place), int(source == own))
            )
        for connecting in works:
            connecting.wait()

    def send(self, tensor: torch.Tensor, peer: int, tag: int, operation: Operation) -> torch_private.WorkBase:
        """A Work that is done when `tensor` may be changed: the receiver has asked for it and it is on its way."""
        with operation.beginning():
            if self._takes_links(peer):
                return self._send_bridged(tensor, peer, message_stage(tag), operation)
            if self._is_native(tensor):
                return self._move_natively(torch_private.native_send, flat_of(tensor), tensor, peer, operation)
            if self._stager.on_device(tensor):
                return self._send_staged(tensor, peer, tag, operation)
            host = tensor.resolve_conj().resolve_neg().contiguous()
            return self._start(torch_private.gloo_send, host, tensor, peer, tag, operation)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, operation: Operation) -> torch_private.WorkBase:
        """A Work that is done when `tensor` holds the message of `peer` with `tag`."""
        with operation.beginning():
            if self._takes_links(peer):
                return self._receive_bridged(tensor, peer, message_stage(tag), operation)
            if self._is_native(tensor):
                place = place_for(tensor)
                inner = self._move_natively(torch_private.native_receive, place, tensor, peer, operation)
                lies_there = place.data_ptr() == tensor.data_ptr()
                return inner if lies_there else Landed(inner, place, tensor, self._process.device)
            if not self._stager.on_device(tensor) and is_plain(tensor):
                return self._start(torch_private.gloo_receive, tensor, tensor, peer, tag, operation)
            staged = self._stager.stage(tensor)
            inner = self._start(torch_private.gloo_receive, staged.empty_whole(), tensor, peer, tag, operation)
            return StagedReceive(inner, staged)

    def receive_any(self, tensor: torch.Tensor, tag: int, operation: Operation) -> torch_private.WorkBase:
        """Receive from whoever sends first, into a host tensor.

        Gloo waits for no connection in particular then. So one posted in a group that was given up is refused here, and
        one that was pending when its group was given up ends at the group's timeout only.
        """
        if self._stager.on_device(tensor):
            raise BadInput(
                "a receive from any rank needs a host tensor, as with NCCL; receive on the CPU, or name a rank."
            )
        with operation.beginning():
            if is_plain(tensor):
                return self._start_any(tensor, tensor, tag, operation)
            staged = self._stager.stage(tensor)
            return StagedReceive(self._start_any(staged.empty_whole(), tensor, tag, operation), staged)

    def close(self) -> None:
        for worker, _ in self._senders.values():
            worker.stop()
        if self._process.device.is_gpu and not self._process.given_up:
            for pair in self._pairs.values():
                pair.shutdown()

    # ---- the island's library

    def _is_native(self, tensor: torch.Tensor) -> bool:
        return self._links is not None and self._stager.on_device(tensor)

    def _pair(self, source: int, target: int) -> Any:
        """The library's group for what `source` sends to `target`."""
        if (source, target) not in self._pairs:
            name, ranks, process = f"messages/{source}-{target}", [source, target], self._process
            self._pairs[source, target] = process.native_group(name, ranks, process.timeout_seconds, for_messages=True)
        return self._pairs[source, target]

    def _move_natively(
        self, move: Any, flat: torch.Tensor, tensor: torch.Tensor, peer: int, operation: Operation
    ) -> NativeWork:
        own, sends = self._process.rank, move is torch_private.native_send
        pair = self._pair(own, peer) if sends else self._pair(peer, own)
        inner = move(pair, flat.view(torch.uint8), int(sends))
        return NativeWork(operation, inner, [tensor], self._counted(tensor, "send" if sends else "receive"))

    # ---- over the bridge

    def _takes_links(self, peer: int) -> bool:
        has_device = not {self._process.rank, self._members[peer]}.isdisjoint(self._process.device_ranks)
        return self._links is not None and has_device and self._is_bridge(peer)

    def _send_bridged(self, tensor: torch.Tensor, peer: int, stage: int, operation: Operation) -> HethubWork:
        flat, process, clock = flat_of(tensor), self._process, LegClock()
        ready = process.device.current_stream().record()
        starts = [self._copy_down(piece, ready, peer, stage, clock) for piece in _chunks(flat)]
        work = HethubWork(operation, [tensor], process.callbacks)
        run = self._sends.behind(peer, lambda: [start() for start in starts])
        process.callbacks.run(Job(run=run, work=work, count=self._counted(tensor, "send", clock)))
        return work

    def _copy_down(self, piece: torch.Tensor, ready: Event, peer: int, stage: int, clock: LegClock) -> Start:
        """Begins a chunk's copy to memory that its relay takes it from; the call waits for it, then sends it."""
        links = self._links
        assert links is not None
        if not self._stager.on_device(piece):
            return lambda: links.send(piece, peer, stage)
        if links.takes_device_memory(peer, piece.nbytes):

            def send() -> Transfer:
                ready.synchronize()
                return links.send(piece, peer, stage)

            return send
        return CopiedDown(links, piece, peer, stage, ready, self._down, clock)

    def _receive_bridged(self, tensor: torch.Tensor, peer: int, stage: int, operation: Operation) -> "Arrival":
        links, process, flat = self._links, self._process, place_for(tensor)
        assert links is not None
        work, count = HethubWork(operation, [tensor], process.callbacks), self._counted(tensor, "receive")
        arrival, pieces = Arrival(work, flat, tensor, process.device), _chunks(flat)
        if not self._stager.on_device(tensor):
            transfers = [links.receive(piece, peer, stage) for piece in pieces]
            process.callbacks.run(Job(run=lambda: wait_for(transfers), work=work, count=count))
            return arrival
        ready = process.device.current_stream().record()
        if pieces and links.takes_device_memory(peer, pieces[0].nbytes):

            def start() -> list[Transfer]:
                ready.synchronize()  # what used this memory before must be done with it
                return [links.receive(piece, peer, stage) for piece in pieces]

            process.callbacks.run(Job(run=self._receives.behind(peer, start), work=work, count=count))
            return arrival
        messages = [links.expect(piece.numel(), piece.dtype, peer, stage) for piece in pieces]

        def copy_up() -> None:
            for piece, message in zip(pieces, messages, strict=True):
                host = message.wait()
                self._up.wait(ready)
                with self._up.active():
                    piece.copy_(host, non_blocking=True)
            arrival.copied = self._up.record()

        def give_back() -> None:
            if arrival.copied is not None:
                arrival.copied.synchronize()
                for message in messages:
                    message.release()

        process.callbacks.run(Job(run=copy_up, work=work, count=count, leave=give_back))
        return arrival

    # ---- over Gloo

    def _start(
        self, start: Any, host: torch.Tensor, tensor: torch.Tensor, peer: int, tag: int, operation: Operation
    ) -> torch_private.WorkBase:
        sends, world_rank = start is torch_private.gloo_send, self._members[peer]
        gloo = self._gloo if sends == (world_rank > self._process.rank) else self._gloo_down
        count = self._counted(tensor, "send" if sends else "receive")
        if sends:
            self._count_sent(tensor, peer)
        inner = start(gloo, host, peer, sized(tag, host))
        if not sends or self._links is None:
            return NativeWork(operation, inner, [tensor], count)
        # Gloo says that a message has left to who waits for it alone: a thread does, so that its tensor can be let go.
        work = HethubWork(operation, [tensor], self._process.callbacks)
        work.out_of_turn = job = OnceJob(run=GlooTransfer(inner, host, world_rank).wait, work=work, count=count)
        return self._sender(peer)[0].submit(job)

    def _start_any(self, host: torch.Tensor, tensor: torch.Tensor, tag: int, operation: Operation) -> NativeWork:
        if self._aborted or self._process.given_up:
            raise RuntimeError("the group was given up; build it anew")
        inner = self._gloo.recv_anysource([host], sized(tag, host))
        return NativeWork(operation, inner, [tensor], self._counted(tensor, "receive"))

    def _send_staged(self, tensor: torch.Tensor, peer: int, tag: int, operation: Operation) -> HethubWork:
        worker, stager = self._sender(peer)
        self._count_sent(tensor, peer)
        staged = stager.stage(tensor)

        def job() -> None:
            host, world_rank = staged.load_whole(), self._members[peer]
            begin_transfer(torch_private.gloo_send, self._gloo, host, peer, sized(tag, host), world_rank).wait()

        work = HethubWork(operation, [tensor], self._process.callbacks)
        return worker.submit(Job(run=job, work=work, count=self._counted(tensor, "send")))

    def _is_bridge(self, peer: int) -> bool:
        other, islands = self._members[peer], self._process.islands
        return island_index(islands, other) != island_index(islands, self._process.rank)

    def _count_sent(self, tensor: torch.Tensor, peer: int) -> None:
        self._process.counters.count_sent(
            self._label, self._members[peer], "gloo", is_bridge=self._is_bridge(peer), num_bytes=tensor.nbytes
        )

    def _counted(self, tensor: torch.Tensor, name: str, clock: LegClock | None = None) -> Callable[[float], None]:
        """Counts one message, the seconds it was waited for, and those of a clock's legs."""
        count = functools.partial(self._process.counters.count_operation, self._label, name, tensor.nbytes)
        return count if clock is None else lambda seconds: count(seconds, clock.take())

    def _sender(self, peer: int) -> tuple[Worker, Stager]:
        with self._lock:
            if peer not in self._senders:
                worker = Worker(f"hethub-send-{peer}", self._stager.device.activate)
                self._senders[peer] = worker, self._process.stager()
            return self._senders[peer]


def _chunks(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the chunks of a message. They are the same on both ranks, which know its size."""
    return [flat[piece.start : piece.stop] for piece in split(flat.numel(), _CHUNKS.num_chunks(flat.nbytes)) if piece]


class Landed(WaitedWork):
    """A message that has come to another place than it was asked for; the first `wait` copies it on the caller's
    stream."""

    def __init__(
        self, inner: torch_private.WorkBase, place: torch.Tensor, tensor: torch.Tensor, device: Device
    ) -> None:
        super().__init__()
        self._inner = inner
        self._place: torch.Tensor | None = place
        self._tensor = tensor
        self._device = device

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._inner.wait() if timeout is None else self._inner.wait(timeout)
        self._order()
        place, self._place = self._place, None
        if place is not None and place.data_ptr() != self._tensor.data_ptr():
            with writing([self._tensor]):
                self._tensor.copy_(place.view(self._tensor.shape))
            self._device.current_stream().keep(place)  # it may be another than the one that the place was made for
        return True

    def _order(self) -> None:
        """The caller's stream goes on behind the message."""

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]


class Arrival(Landed):
    """A message over the bridge. Its `wait` returns when the copy to the device is under way; the caller's stream waits
    for that."""

    copied: Event | None = None

    def _order(self) -> None:
        if self.copied is not None:
            self._device.current_stream().wait(self.copied)


class StagedReceive(WaitedWork):
    """A receive into staging memory; `wait` copies it to where the caller wants it."""

    def __init__(self, inner: NativeWork, staged: Staged) -> None:
        super().__init__()
        self._inner = inner
        self._staged = staged
        self._stored = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._inner.wait(timeout)
        if not self._stored:
            self._stored = True
            with writing(self.result()):
                self._staged.store()
        return True

    def is_completed(self) -> bool:
        return self._stored

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    _source_rank = source_rank
