"""A device that is late: torch tensors in a memory of their own, whose copies and sums are done some time after the call.

It stands behind the device layer (`hethub/kernels/device.py`) where there is no accelerator, and shows what a CPU hides:
work that is not waited for. Streams are queues; a thread runs what is at their heads, in an order and after pauses drawn
from a seed. What the host reads too early it finds poisoned, NaN in floats; so it does what was freed, or reused without
being kept for the stream that still reads it, on the device and in pinned memory alike. Collectives of the native
library run one at a time, in whatever order streams allow, and only when all ranks have come: launched in unlike orders
on two ranks they never end. What the device computes, torch computes on the CPU.
"""

import contextlib
import functools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hethub.communicator import torch_private
from hethub.kernels.device import Device, Event, Stream

_POISON = 0xFF
_STUCK_SECONDS = 20.0
_CLASS_BYTES = 512


class HostRead(AssertionError):
    """The host reads memory of the device without asking for a copy."""


class Point(Event):
    """A point in a stream's work."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reached = threading.Event()

    def synchronize(self) -> None:
        if not self.reached.wait(_STUCK_SECONDS):
            raise TimeoutError(f"the device has not come to this point in {_STUCK_SECONDS:g} s")

    def is_done(self) -> bool:
        return self.reached.is_set()


class Item:
    """Something a stream will do: `run`, once `after` is reached."""

    def __init__(
        self,
        run: Callable[[], None],
        after: Point | None = None,
        *,
        is_collective: bool = False,
        is_point: bool = False,
    ) -> None:
        self.run, self.after, self.is_collective, self.is_point = run, after, is_collective, is_point


class LateStream(Stream):
    """A queue of work."""

    def __init__(self, engine: "Engine", *, is_aside: bool = False) -> None:
        super().__init__(None)
        self._engine, self.is_aside = engine, is_aside
        self.queue: deque[Item] = deque()
        self.urgency = engine.random.random()
        engine.streams.append(self)

    def submit(self, item: Item) -> None:
        with self._engine.lock:
            self.queue.append(item)
            if len(self.queue) == 1:
                self._engine.wake(item)

    def record(self) -> Point:
        point = Point()
        self.submit(Item(point.reached.set, is_point=True))
        return point

    def wait(self, event: Event) -> None:
        if isinstance(event, Point):
            self.submit(Item(lambda: None, event))

    def keep(self, tensor: Tensor) -> None:
        if isinstance(tensor, LateTensor):
            tensor.allocation.users.add(self)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        before = self._engine.current()
        self._engine.local.stream = self
        try:
            yield
        finally:
            self._engine.local.stream = before


class Engine:
    """One rank's device: its streams, its memory, and the threads that work on them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self._idle = {is_collective: threading.Condition(self.lock) for is_collective in (False, True)}
        self.streams: list[LateStream] = []
        self.local = threading.local()
        self.error: Exception | None = None
        self._free: dict[tuple[int, int], list[Tensor]] = {}
        self._default = LateStream(self)
        self.pinned = PinnedMemory()
        for is_collective in (False, True):
            threading.Thread(target=self._work, args=(is_collective,), name="late-device", daemon=True).start()

    def reseed(self, seed: int) -> None:
        """Other pauses and another order from here on."""
        with self.lock:
            self.random.seed(seed)
            for stream in self.streams:
                stream.urgency = self.random.random()

    def wake(self, item: Item) -> None:
        """The thread that can run it has something to look at."""
        self._idle[item.is_collective].notify()

    def current(self) -> LateStream:
        return getattr(self.local, "stream", self._default)

    def submit(self, run: Callable[[], None]) -> None:
        self.current().submit(Item(run))

    def synchronize(self) -> None:
        for point in [stream.record() for stream in self.streams if not stream.is_aside]:
            point.synchronize()
        if self.error is not None:
            raise self.error

    def allocate(self, num_bytes: int) -> "Allocation":
        """Memory of the current stream, poisoned: what was freed in this stream's order is had again at once."""
        size, stream = -(-max(1, num_bytes) // _CLASS_BYTES) * _CLASS_BYTES, self.current()
        with self.lock:
            free = self._free.setdefault((id(stream), size), [])
            memory = free.pop() if free else torch.full((size,), _POISON, dtype=torch.uint8)
        return Allocation(self, memory, stream)

    def free(self, memory: Tensor, owner: LateStream, users: set[LateStream]) -> None:
        """Poisons the memory in the owner's order, or after all streams that it is kept for; then it is had again."""

        def poison() -> None:
            memory.fill_(_POISON)

        def give_back() -> None:
            with self.lock:
                self._free[id(owner), memory.numel()].append(memory)

        others = users - {owner}
        if not others:
            owner.submit(Item(poison))
            give_back()
            return
        points = [stream.record() for stream in [owner, *others]]
        aside = LateStream(self, is_aside=True)
        for point in points:
            aside.wait(point)
        aside.submit(Item(poison))
        aside.submit(Item(give_back))
        aside.submit(Item(lambda: self.streams.remove(aside)))

    def _work(self, is_collective: bool) -> None:
        torch.set_grad_enabled(False)
        while True:
            with self.lock:
                while (stream := self._ready(is_collective)) is None:
                    self._idle[is_collective].wait()
                item = stream.queue[0]
                pause = self.random.choice((0, 0, 0, 1e-4, 4e-4)) if item.after is None else 0
            if pause:
                time.sleep(pause)
            try:
                item.run()
            except Exception as error:  # noqa: BLE001  told by the next `synchronize`
                self.error = self.error or error
            with self.lock:
                stream.queue.popleft()
                if stream.queue:
                    self.wake(stream.queue[0])
                if item.is_point:
                    for idle in self._idle.values():
                        idle.notify()

    def _ready(self, is_collective: bool) -> LateStream | None:
        """The stream whose head runs next: mostly the most urgent one, whose urgency the seed has drawn."""
        ready = [
            stream
            for stream in self.streams
            if stream.queue
            and stream.queue[0].is_collective == is_collective
            and ((after := stream.queue[0].after) is None or after.is_done())
        ]
        if not ready:
            return None
        return self.random.choice(ready) if self.random.random() < 0.2 else max(ready, key=lambda each: each.urgency)


class Allocation:
    """Memory as long as a tensor uses it."""

    def __init__(self, engine: Engine, memory: Tensor, owner: LateStream) -> None:
        self.engine, self.memory, self.owner = engine, memory, owner
        self.users: set[LateStream] = set()

    def __del__(self) -> None:
        self.engine.free(self.memory, self.owner, self.users)


class PinnedMemory:
    """Host memory that copies need not wait for; what nobody holds is poisoned and had again, the last first."""

    def __init__(self) -> None:
        self._free: dict[int, list[numpy.ndarray]] = {}
        self._starts: set[int] = set()

    def buffer(self, num_bytes: int) -> Tensor:
        size = -(-max(1, num_bytes) // _CLASS_BYTES) * _CLASS_BYTES
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else numpy.full(size, _POISON, dtype=numpy.uint8)
        self._starts.add(memory.ctypes.data)
        handle = memory[:num_bytes]
        # Copies under way hold the handle, as CUDA's allocator waits for them before it gives memory out again.
        weakref.finalize(handle, self._give_back, memory)
        return torch.from_numpy(handle)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._starts

    def _give_back(self, memory: numpy.ndarray) -> None:
        memory.fill(_POISON)
        self._free[memory.size].append(memory)


def _engine() -> Engine:
    assert _installed, "install() makes the device"
    return _installed[0]


_installed: list[Engine] = []


class LateTensor(torch.Tensor):
    """A tensor of the device. `near` is its memory, which only the device's own work may touch."""

    near: Tensor
    allocation: Allocation
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor, allocation: Allocation) -> "LateTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device="late:0"
        )  # fmt: skip
        made.near, made.allocation = near, allocation
        return made

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise HostRead("numpy() of a tensor of the device")

    def tolist(self) -> Any:
        raise HostRead("tolist() of a tensor of the device")

    def __repr__(self) -> str:
        return f"LateTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket._qualified_op_name
        if name in _HOST_READS:
            raise HostRead(f"{name} needs a value of the device on the host")
        if name == "aten::copy_":
            return _copy(*args, **kwargs)
        if name == "aten::_to_copy":
            return _to_copy(*args, **kwargs)
        if func.is_view:
            return tree_map(functools.partial(_wrap, _allocation_of(args)), func(*_near(args), **_near(kwargs)))
        return _compute(func, args, kwargs)


_HOST_READS = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::nonzero"}


def _near(values: Any) -> Any:
    return tree_map(lambda value: value.near if isinstance(value, LateTensor) else value, values)


def _wrap(allocation: Allocation, value: Any) -> Any:
    return LateTensor(value, allocation) if isinstance(value, Tensor) else value


def _allocation_of(args: Sequence[Any]) -> Allocation:
    return next(arg.allocation for arg in args if isinstance(arg, LateTensor))


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> LateTensor:
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
    allocation = _engine().allocate(extent * dtype.itemsize)
    flat = allocation.memory[: extent * dtype.itemsize].view(dtype)
    return LateTensor(flat.as_strided(size, stride), allocation)


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """As CUDA copies: only between pinned memory and the device does the host go on, and only if it may."""
    engine = _engine()
    host = [tensor for tensor in (into, source) if not isinstance(tensor, LateTensor)]
    goes_on = not host or (non_blocking and engine.pinned.holds(host[0]))
    near, read = _near(into), _near(source)
    if not isinstance(source, LateTensor) and not goes_on:
        read = source.clone()  # pageable memory has been read when the call returns
    engine.submit(lambda: near.copy_(read))
    if not goes_on and not isinstance(into, LateTensor):
        engine.current().record().synchronize()
    return into


def _to_copy(source: Tensor, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
    device = torch.device(device) if device is not None else source.device
    dtype = dtype or source.dtype
    if device.type == "cpu":
        return _copy(torch.empty(source.shape, dtype=dtype), source)
    meta = torch.empty_strided(source.shape, source.stride(), device="meta", dtype=dtype)
    made = torch.empty_like(meta)
    return _copy(_empty(made.shape, made.stride(), dtype), source, non_blocking)


def _compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Anything else: the result's place now, the result later."""

    for value in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and not isinstance(value, LateTensor) and value.dim():
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    near_args, near_kwargs = _near(tuple(args)), _on("cpu", _near(kwargs))
    if func._schema.is_mutable:
        _engine().submit(lambda: func(*near_args, **near_kwargs))
        written = [
            a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
        ]
        named = [kwargs[s.name] for s in func._schema.arguments if s.name in kwargs and s.alias_info]
        return [*written, *named][0] if len(written) + len(named) == 1 else (*written, *named)
    shapes = func(*tree_map(_as_meta, tuple(args)), **_on("meta", tree_map(_as_meta, kwargs)))
    made = tree_map(lambda value: _empty(value.shape, value.stride(), value.dtype), shapes)
    places = [value.near for value in torch.utils._pytree.tree_leaves(made)]

    def run() -> None:
        results = torch.utils._pytree.tree_leaves(func(*near_args, **near_kwargs))
        for place, result in zip(places, results, strict=True):
            place.copy_(result)

    _engine().submit(run)
    return made


def _as_meta(value: Any) -> Any:
    if isinstance(value, LateTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _on(device: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device(device)} if "device" in kwargs else kwargs


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

    def activate(self) -> None:
        return None

    def synchronize(self) -> None:
        _engine().synchronize()

    def new_stream(self) -> Stream:
        return LateStream(_engine())

    def current_stream(self) -> Stream:
        return _engine().current()

    def host_buffer(self, num_bytes: int) -> Tensor:
        return _engine().pinned.buffer(num_bytes)

    def stream_pointer(self) -> int:
        return 0


class LateNative:
    """An island's library on late devices: as NCCL, on a stream of its own behind the caller's, Gloo moving the bytes."""

    def __init__(self, store: Any, rank: int, size: int, timeout_seconds: float) -> None:
        self._gloo = torch_private.create_gloo_group(store, rank, size, timeout_seconds, "127.0.0.1")
        self._size = size
        self._stream = LateStream(_engine())
        self.ended = ""
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

    def _launch(self, name: str, *args: Any) -> "LateWork":
        near = _near(args)
        self._stream.wait(_engine().current().record())
        self._stream.submit(Item(lambda: getattr(self._gloo, name)(*near).wait(), is_collective=True))
        return LateWork(self._stream.record(), args)


natives: list[LateNative] = []
"""All that were made in this process."""


class LateWork:
    """A collective under way; its tensors are held until it is waited for, as torch's NCCL holds them."""

    def __init__(self, point: Point, tensors: Any) -> None:
        self._point, self._tensors = point, tensors

    def wait(self) -> None:
        _engine().current().wait(self._point)
        self._tensors = None


def install(seed: int = 0) -> LateDevice:
    """This process's late device, known to torch as "late"."""
    if not _installed:
        _setup_privateuseone_for_python_backend("late")
        _installed.append(Engine(seed))
        library = torch.library.Library("aten", "IMPL")
        library.impl("empty.memory_format", _make_empty, "PrivateUse1")
        library.impl("empty_strided", _make_empty_strided, "PrivateUse1")
        _kept.append(library)
        torch_private.create_nccl_group = LateNative
    return LateDevice(vendor="nvidia")


_kept: list[Any] = []


def _make_empty(size: Sequence[int], dtype: Any = None, **_: Any) -> Tensor:
    made = torch.empty(size, device="meta", dtype=dtype)
    return _empty(made.shape, made.stride(), made.dtype)


def _make_empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, **_: Any) -> Tensor:
    return _empty(size, stride, dtype or torch.get_default_dtype())


def reseed(seed: int) -> None:
    """Other pauses and another order from here on; nothing where this process has no late device."""
    if _installed:
        _engine().reseed(seed)


def fall_behind(seconds: float) -> None:
    """The current stream is busy for so long, now and then."""
    if _installed and _engine().random.random() < 0.25:
        _engine().submit(lambda: time.sleep(seconds))
