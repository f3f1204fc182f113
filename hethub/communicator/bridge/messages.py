"""Tagged messages between two ranks of a group, any number under way, receives posted as early as one likes.

Gloo matches (peer, tag) and moves bytes in threads of its own, one connection per direction and pair in use, so a
host tensor costs no thread here. A device tensor is staged: a send waits for its copy to the host in a thread for its
peer; a receive lands in pinned memory and is copied to the device when it is waited for.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from hethub.communicator import torch_private
from hethub.communicator.bridge.staging import Staged, Stager
from hethub.communicator.counters import Counters
from hethub.communicator.joining.islands import Islands, island_index
from hethub.communicator.relays.gloo import GlooTransfer
from hethub.communicator.work import CallbackThreads, HethubWork, Job, NativeWork, Operation, WaitedWork, Worker
from hethub.spec.errors import BadInput


class Process(Protocol):
    """What messages use of this process's part in the world."""

    islands: Islands
    counters: Counters
    callbacks: CallbackThreads
    aborted: bool

    @property
    def rank(self) -> int: ...

    def stager(self) -> Stager: ...


class PointToPoint:
    """Messages among `members` (the world's ranks, in group order), who are named by their place in the group.

    `label` names the group in the counters.
    """

    def __init__(self, gloo: torch_private.GlooGroup, process: Process, members: Sequence[int], label: str) -> None:
        self._process = process
        self._members = members
        self._gloo = gloo
        self._label = label
        self._stager = process.stager()
        self._senders: dict[int, tuple[Worker, Stager]] = {}
        self._lock = threading.Lock()
        self._aborted = False

    def abort(self) -> None:
        """From here on nothing is received from any rank; other messages fail on the group's closed connections."""
        self._aborted = True

    def send(self, tensor: torch.Tensor, peer: int, tag: int, operation: Operation) -> torch_private.WorkBase:
        """A Work that is done when `tensor` may be changed: the receiver has asked for it and it is on its way."""
        if self._stager.on_device(tensor):
            return self._send_staged(tensor, peer, tag, operation)
        host = tensor.contiguous()
        return self._start(torch_private.gloo_send, host, tensor, peer, tag, operation)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, operation: Operation) -> torch_private.WorkBase:
        """A Work that is done when `tensor` holds the message of `peer` with `tag`."""
        if not self._stager.on_device(tensor) and tensor.is_contiguous():
            return self._start(torch_private.gloo_receive, tensor, tensor, peer, tag, operation)
        staged = self._stager.stage(tensor)
        inner = self._start(torch_private.gloo_receive, staged.empty_whole(), tensor, peer, tag, operation)
        return StagedReceive(inner, staged)

    def receive_any(self, tensor: torch.Tensor, tag: int, operation: Operation) -> torch_private.WorkBase:
        """As `receive`, from whoever sends first; host tensors only.

        Gloo waits for no connection in particular then. So one posted in a group that was given up is refused here, and
        one that was pending when its group was given up ends at the group's timeout only.
        """
        if self._stager.on_device(tensor):
            raise BadInput(
                "a receive from any rank needs a host tensor, as with NCCL; receive on the CPU, or name a rank."
            )
        if tensor.is_contiguous():
            return self._start_any(tensor, tensor, tag, operation)
        staged = self._stager.stage(tensor)
        return StagedReceive(self._start_any(staged.empty_whole(), tensor, tag, operation), staged)

    def close(self) -> None:
        for worker, _ in self._senders.values():
            worker.stop()

    def _start(
        self, start: Any, host: torch.Tensor, tensor: torch.Tensor, peer: int, tag: int, operation: Operation
    ) -> NativeWork:
        name = "send" if start is torch_private.gloo_send else "receive"
        if name == "send":
            self._count_sent(tensor, peer)
        try:
            return NativeWork(
                operation, start(self._gloo, host, peer, tag), [tensor], peer, self._counted(tensor, name)
            )
        except RuntimeError as error:
            raise operation.failed(error, peer) from error

    def _start_any(self, host: torch.Tensor, tensor: torch.Tensor, tag: int, operation: Operation) -> NativeWork:
        if self._aborted or self._process.aborted:
            raise operation.failed(RuntimeError("the group was given up; build it anew"))
        try:
            inner = self._gloo.recv_anysource([host], tag)
        except RuntimeError as error:
            raise operation.failed(error) from error
        return NativeWork(operation, inner, [tensor], count=self._counted(tensor, "receive"))

    def _send_staged(self, tensor: torch.Tensor, peer: int, tag: int, operation: Operation) -> HethubWork:
        worker, stager = self._sender(peer)
        self._count_sent(tensor, peer)
        staged = stager.stage(tensor)

        def job() -> None:
            host = staged.load_whole()
            GlooTransfer(torch_private.gloo_send(self._gloo, host, peer, tag), host, peer).wait()

        blocks_streams = stager.blocks_streams([tensor])
        work = HethubWork(operation, [tensor], self._process.callbacks, blocks_streams=blocks_streams)
        return worker.submit(Job(run=job, work=work, count=self._counted(tensor, "send")))

    def _count_sent(self, tensor: torch.Tensor, peer: int) -> None:
        other, islands = self._members[peer], self._process.islands
        is_bridge = island_index(islands, other) != island_index(islands, self._process.rank)
        self._process.counters.count_sent(self._label, other, "gloo", is_bridge=is_bridge, num_bytes=tensor.nbytes)

    def _counted(self, tensor: torch.Tensor, name: str) -> Callable[[float], None]:
        """Counts one message and the seconds it was waited for."""
        return functools.partial(self._process.counters.count_operation, self._label, name, tensor.nbytes)

    def _sender(self, peer: int) -> tuple[Worker, Stager]:
        with self._lock:
            if peer not in self._senders:
                self._senders[peer] = (
                    Worker(f"hethub-send-{peer}", self._stager.device.activate),
                    self._process.stager(),
                )
            return self._senders[peer]


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
            self._staged.store()
        return True

    def is_completed(self) -> bool:
        return self._stored

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    _source_rank = source_rank
