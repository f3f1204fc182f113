"""A device that is late: torch tensors in a memory of their own, whose copies and sums are done some time after the call.

It stands behind the device layer (`hethub/kernels/device.py`) where there is no accelerator, and shows what a CPU hides:
work that is not waited for. Streams are queues; a thread runs what is at their heads, in an order and after pauses drawn
from a seed. What the host reads too early it finds poisoned, NaN in floats; so it does what was freed, or reused without
being kept for the stream that still reads it, on the device and in pinned memory alike. Collectives of the native
library run one at a time, in the order in which they were launched, and only when all ranks have come: launched in
unlike orders on two ranks they never end. Messages run beside them. What the device computes, torch computes on the CPU.

Two more things wait as they do on devices, by the settings that those take: streams beyond the number of hardware queues
(`engine.QUEUES`) share one, and what one holds runs in order; and unless CUDA_MODULE_LOADING is EAGER, the first launch of
a kernel waits until the device has done all that it was given.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hethub.communicator import torch_private
from hethub.communicator.context import Context
from hethub.communicator.groups import backend
from hethub.communicator.groups.native import watch_group, watched
from hethub.kernels.device import Device, Stream, Vendor, detect_vendor
from tests.support.late.engine import COLLECTIVES, Item, LateStream, Point, engine, is_started, start
from tests.support.late.tensor import make_empty, make_empty_strided, near


class LateDevice(Device):
    """A rank's late device, as the device layer shows one."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("late", 0)

    @property
    def name(self) -> str:
        return "late"

    @property
    def identity(self) -> str | None:
        return None

    @property
    def native_library(self) -> str:
        return "late 1.0"

    def activate(self) -> None:
        return None

    def synchronize(self) -> None:
        engine().synchronize()

    def new_stream(self) -> Stream:
        return LateStream(engine())

    def current_stream(self) -> Stream:
        return engine().current()

    def host_buffer(self, num_bytes: int) -> Tensor:
        return engine().pinned.buffer(num_bytes)

    def pin(self, memory: Tensor) -> None:
        engine().pinned.add(memory)

    def unpin(self, memory: Tensor) -> None:
        return None

    def stream_pointer(self) -> int:
        return 0


class LateNative:
    """An island's library on late devices: as NCCL, on a stream of its own behind the caller's, Gloo moving the bytes."""

    def __init__(self, store: Any, rank: int, size: int, timeout_seconds: float, *, for_messages: bool = False) -> None:
        self._gloo = torch_private.create_gloo_group(store, rank, size, timeout_seconds, "127.0.0.1")
        self._size = size
        self._stream = LateStream(engine(), is_high=for_messages)
        self.ended = ""
        self._moves = False
        natives.append(self)

    def size(self) -> int:
        return self._size

    def abort(self) -> None:
        self.ended = "aborted"

    def shutdown(self) -> None:
        self.ended = "shut down"

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor, opts: Any) -> "LateWork":
        return self._launch("_reduce_scatter_base", part, whole, opts)

    def _allgather_base(self, whole: Tensor, part: Tensor, *opts: Any) -> "LateWork":
        return self._launch("_allgather_base", whole, part, *opts)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "LateWork":
        return self._launch("send", tensors, peer, tag, worker=self._messages())

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "LateWork":
        return self._launch("recv", tensors, peer, tag, worker=self._messages())

    def _messages(self) -> object:
        """Messages of each group have a thread of their own: they block their stream only, not the device's other work."""
        if not self._moves:
            self._moves = True
            engine().start_worker(self)
        return self

    def reduce(self, tensors: list[Tensor], opts: Any) -> "LateWork":
        return self._launch("reduce", tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> "LateWork":
        return self._launch("broadcast", tensors, opts)

    def alltoall_base(self, *args: Any) -> "LateWork":
        return self._launch("alltoall_base", *args)

    def _launch(self, name: str, *args: Any, worker: object = COLLECTIVES) -> "LateWork":
        places = near(args)
        self._stream.wait(engine().current().record())
        self._stream.submit(Item(lambda: getattr(self._gloo, name)(*places).wait(), name=name, worker=worker))
        return LateWork(self._stream.record(), args)


class LateGroup(torch_private.GroupBase):
    """A group inside an island of late devices, as `backend.with_native_backends` makes one of NCCL."""

    def __init__(self, native: LateNative, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._native, self._name = native, name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return "late"


def _collective(name: str, inner: str, uses: str) -> Any:
    """A collective of the group as Gloo's `inner`; the tensors it writes and reads as torch's own groups have them."""

    def launch(self: LateGroup, *args: Any) -> "LateWork":
        return self._native._launch(inner, *args)

    return watched(name, launch, uses)


for _name, _inner, _uses in (
    ("allreduce", "allreduce", "w"),
    ("broadcast", "broadcast", "w"),
    ("reduce", "reduce", "w"),
    ("allgather", "allgather", "wr"),
    ("_allgather_base", "_allgather_base", "wr"),
    ("all_gather_single", "_allgather_base", "wr"),
    ("_reduce_scatter_base", "_reduce_scatter_base", "wr"),
    ("reduce_scatter_single", "_reduce_scatter_base", "wr"),
):
    setattr(LateGroup, _name, _collective(_name, _inner, _uses))


def make_group(group: Any, context: Context, options: Any) -> LateGroup:
    store, rank, size = dist.PrefixStore("late", options.store), options.group_rank, options.group_size
    native = LateNative(store, rank, size, options.timeout.total_seconds())
    native.ended = "left to torch"
    context.watch_nccl(native, options.group_id)
    made = LateGroup(native, options.group_id, rank, size)
    watch_group(made, context.turn_of)
    return made


natives: list[LateNative] = []
"""All that were made in this process."""


class LateWork:
    """A collective under way; its tensors are held until it is waited for, as torch's NCCL holds them."""

    def __init__(self, point: Point, tensors: Any) -> None:
        self._point, self._tensors = point, tensors

    def wait(self) -> None:
        engine().current().wait(self._point)
        self._tensors = None

    def is_completed(self) -> bool:
        return self._point.is_done()

    def is_success(self) -> bool:
        raise NotImplementedError("as NCCL's")


def install(seed: int = 0, vendor: Vendor = "nvidia") -> LateDevice:
    """This process's late device, known to torch as "late"."""
    if not is_started():
        _setup_privateuseone_for_python_backend("late")
        _call_driver(seed, vendor)
        library = torch.library.Library("aten", "IMPL")
        library.impl("empty.memory_format", make_empty, "PrivateUse1")
        library.impl("empty_strided", make_empty_strided, "PrivateUse1")
        _kept.append(library)
        torch_private.create_nccl_group = LateNative
        backend.with_native_backends = make_group
    return LateDevice(vendor=vendor)


def _call_driver(seed: int, vendor: Vendor) -> None:
    """The driver's first call, as the device layer makes it: there it looks at its environment."""
    before = torch.cuda.is_available, torch.version.hip
    torch.version.hip = "late" if vendor == "amd" else None
    torch.cuda.is_available = lambda: start(seed, vendor) is None
    assert detect_vendor() == vendor
    torch.cuda.is_available, torch.version.hip = before


_kept: list[Any] = []


def reseed(seed: int) -> None:
    """Other pauses and another order from here on; nothing where this process has no late device."""
    if is_started():
        engine().reseed(seed)


def dawdle(seconds: float) -> None:
    """This thread is late, now and then."""
    if is_started() and engine().random.random() < 0.25:
        time.sleep(seconds)


def fall_behind(seconds: float) -> None:
    """The current stream is busy for so long, now and then."""
    if is_started() and engine().random.random() < 0.25:
        engine().submit(lambda: time.sleep(seconds))
