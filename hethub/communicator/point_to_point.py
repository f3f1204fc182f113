"""Tagged messages between two ranks of a group, any number under way, receives posted as early as one likes.

Gloo matches (peer, tag) and moves bytes in threads of its own, one connection per direction and pair in use, so a
host tensor costs no thread here. A device tensor is staged: a send waits for its copy to the host in the lane of its
peer; a receive lands in pinned memory and is copied to the device when it is waited for.
"""

import threading
from datetime import timedelta
from typing import Any

import torch

from hethub.communicator import torch_private
from hethub.communicator.gloo_relay import GlooTransfer
from hethub.communicator.staging import Staged
from hethub.communicator.work import CallbackThreads, HethubWork, Job, NativeWork, Operation, Worker
from hethub.kernels.device import Device
from hethub.spec.errors import BadInput


class PointToPoint:
    """Messages of one group; ranks are the group's."""

    def __init__(self, gloo: torch_private.GlooGroup, device: Device, callbacks: CallbackThreads) -> None:
        self._callbacks = callbacks
        self._gloo = gloo
        self._device = device
        self._lanes: dict[int, Worker] = {}
        self._lock = threading.Lock()

    def send(self, tensor: torch.Tensor, peer: int, tag: int, operation: Operation) -> torch_private.WorkBase:
        """A Work that is done when `tensor` may be changed: the receiver has asked for it and it is on its way."""
        if tensor.is_cuda:
            return self._send_staged(tensor, peer, tag, operation)
        host = tensor.contiguous()
        return self._start(torch_private.gloo_send, host, tensor, peer, tag, operation)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, operation: Operation) -> torch_private.WorkBase:
        """A Work that is done when `tensor` holds the message of `peer` with `tag`."""
        if not tensor.is_cuda and tensor.is_contiguous():
            return self._start(torch_private.gloo_receive, tensor, tensor, peer, tag, operation)
        staged = Staged(tensor, self._device)
        inner = self._start(torch_private.gloo_receive, staged.empty(), tensor, peer, tag, operation)
        return StagedReceive(inner, staged)

    def receive_any(self, tensor: torch.Tensor, tag: int, operation: Operation) -> torch_private.WorkBase:
        """As `receive`, from whoever sends first; host tensors only."""
        if tensor.is_cuda:
            raise BadInput(
                "a receive from any rank needs a host tensor, as with NCCL; receive on the CPU, or name a rank."
            )
        if tensor.is_contiguous():
            return NativeWork(operation, self._gloo.recv_anysource([tensor], tag), [tensor])
        staged = Staged(tensor, self._device)
        return StagedReceive(NativeWork(operation, self._gloo.recv_anysource([staged.empty()], tag), [tensor]), staged)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.stop()

    def _start(
        self, start: Any, host: torch.Tensor, tensor: torch.Tensor, peer: int, tag: int, operation: Operation
    ) -> NativeWork:
        try:
            return NativeWork(operation, start(self._gloo, host, peer, tag), [tensor], peer)
        except RuntimeError as error:
            raise operation.failed(error, peer) from error

    def _send_staged(self, tensor: torch.Tensor, peer: int, tag: int, operation: Operation) -> HethubWork:
        staged = Staged(tensor, self._device)

        def job() -> None:
            host = staged.load()
            GlooTransfer(torch_private.gloo_send(self._gloo, host, peer, tag), host, peer).wait()

        with self._lock:
            lane = self._lanes.setdefault(peer, Worker(f"hethub-send-{peer}"))
        return lane.submit(
            Job(run=job, work=HethubWork(operation, [tensor], self._callbacks), count=lambda seconds: None)
        )


class StagedReceive(torch_private.WorkBase):
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

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._stored

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    _source_rank = source_rank
