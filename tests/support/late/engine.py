"""The engine of a late device: streams as queues, and threads that work on them late; memory that is poisoned when freed."""

import contextlib
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy
import torch
from torch import Tensor

from hethub.kernels.device import Event, Stream

_POISON = 0xFF
STUCK_SECONDS = 20.0
_CLASS_BYTES = 512


COPIES, COLLECTIVES = "copies and sums", "collectives"
"""What runs a stream's work: a thread for all copies and sums, one for all collectives, one for each direction of messages."""


class Point(Event):
    """A point in a stream's work."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reached = threading.Event()

    def synchronize(self) -> None:
        if not self.reached.wait(STUCK_SECONDS):
            raise TimeoutError(f"the device has not come to this point in {STUCK_SECONDS:g} s")

    def is_done(self) -> bool:
        return self.reached.is_set()


class Item:
    """Something a stream will do: `run`, once `after` is reached."""

    def __init__(
        self,
        run: Callable[[], None],
        after: Point | None = None,
        *,
        worker: object = COPIES,
        is_point: bool = False,
    ) -> None:
        self.run, self.after, self.worker, self.is_point = run, after, worker, is_point


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
            if item.worker is COLLECTIVES:
                self._engine.launched.append(item)
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
        if hasattr(tensor, "allocation"):
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
        self._idle: dict[object, threading.Condition] = {}
        self.streams: list[LateStream] = []
        self.local = threading.local()
        self.error: Exception | None = None
        self._free: dict[tuple[int, int], list[Tensor]] = {}
        self.launched: deque[Item] = deque()
        """The collectives still to come, in the order in which they were launched, which is that of the device."""
        self._default = LateStream(self)
        self.pinned = PinnedMemory()
        for worker in (COPIES, COLLECTIVES):
            self.start_worker(worker)

    def start_worker(self, worker: object) -> None:
        """A thread for the items that name it."""
        with self.lock:
            self._idle[worker] = threading.Condition(self.lock)
        threading.Thread(target=self._work, args=(worker,), name="late-device", daemon=True).start()

    def reseed(self, seed: int) -> None:
        """Other pauses and another order from here on."""
        with self.lock:
            self.random.seed(seed)
            for stream in self.streams:
                stream.urgency = self.random.random()

    def wake(self, item: Item) -> None:
        """The thread that can run it has something to look at."""
        self._idle[item.worker].notify()

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

    def _work(self, worker: object) -> None:
        torch.set_grad_enabled(False)
        while True:
            with self.lock:
                while (stream := self._ready(worker)) is None:
                    self._idle[worker].wait()
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
                if item.worker is COLLECTIVES:
                    self.launched.popleft()
                if stream.queue:
                    self.wake(stream.queue[0])
                if item.is_point:
                    for idle in self._idle.values():
                        idle.notify()

    def _ready(self, worker: object) -> LateStream | None:
        """The stream whose head runs next: mostly the most urgent one, whose urgency the seed has drawn."""
        ready = [
            stream
            for stream in self.streams
            if stream.queue
            and stream.queue[0].worker is worker
            and (worker is not COLLECTIVES or stream.queue[0] is self.launched[0])
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

    def add(self, memory: Tensor) -> None:
        """Memory of another allocator, which is given out and taken back there."""
        self._starts.add(memory.untyped_storage().data_ptr())

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._starts

    def _give_back(self, memory: numpy.ndarray) -> None:
        memory.fill(_POISON)
        self._free[memory.size].append(memory)


def engine() -> Engine:
    """This process's, which `start` has started."""
    return _started[0]


def is_started() -> bool:
    return bool(_started)


def start(seed: int) -> None:
    """Starts this process's engine, once."""
    if not _started:
        _started.append(Engine(seed))


_started: list[Engine] = []
