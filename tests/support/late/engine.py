"""The engine of a late device: queues of work, streams that share them, and threads that work on them late; memory that is
poisoned when freed."""

import contextlib
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy
import torch
from torch import Tensor

from hethub.kernels.device import Event, Stream, Vendor

_POISON = 0xFF
STUCK_SECONDS = 20.0
_CLASS_BYTES = 512


COPIES, COLLECTIVES = "copies and sums", "collectives"
"""What runs a stream's work: a thread for all copies and sums, one for all collectives, one for each direction of messages."""


QUEUES: dict[Vendor, tuple[str, str, bool]] = {
    "nvidia": ("CUDA_DEVICE_MAX_CONNECTIONS", "8", False),
    "amd": ("GPU_MAX_HW_QUEUES", "4", True),
}
"""The setting that says how many hardware queues there are, the driver's default, and whether each priority has so many:
AMD says so, NVIDIA does not."""


class Point(Event):
    """A point in a stream's work."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reached = threading.Event()

    def synchronize(self) -> None:
        done = -1
        while not self.reached.wait(STUCK_SECONDS):
            if done == (done := engine().num_done):
                raise TimeoutError(
                    f"the device has not come to this point, and done nothing in {STUCK_SECONDS:g} s: {engine().where_it_stands()}"
                )

    def is_done(self) -> bool:
        return self.reached.is_set()


class Item:
    """Something a stream will do: `run`, once `after` is reached."""

    def __init__(
        self,
        run: Callable[[], None],
        after: Point | None = None,
        *,
        name: str = "a copy or a sum",
        worker: object = COPIES,
        is_point: bool = False,
    ) -> None:
        self.run, self.after, self.worker, self.is_point = run, after, worker, is_point
        self.name = name


class Queue:
    """A hardware queue: what it is given runs in order, of whichever of its streams it is. `is_aside`: the host's own."""

    def __init__(self, urgency: float, *, is_high: bool = False, is_aside: bool = False) -> None:
        self.items: deque[Item] = deque()
        self.urgency, self.is_high, self.is_aside = urgency, is_high, is_aside
        self.num_streams = 0


class LateStream(Stream):
    """A stream, whose work goes to a queue of its own, or to one that it shares where the device has no more.

    `is_high`: of high priority.
    """

    def __init__(self, engine: "Engine", *, is_high: bool = False, is_aside: bool = False) -> None:
        super().__init__(None)
        self._engine = engine
        self.queue = engine.new_queue(is_aside=True) if is_aside else engine.queue_of_stream(is_high)
        self.queue.num_streams += 1

    def __del__(self) -> None:
        self.queue.num_streams -= 1

    def submit(self, item: Item) -> None:
        self._engine.put(self.queue, item)

    def record(self) -> Point:
        return self._engine.record(self.queue)

    def wait(self, event: Event) -> None:
        if isinstance(event, Point):
            self.submit(Item(lambda: None, event, name="a wait for another stream"))

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

    def __init__(self, seed: int, vendor: Vendor) -> None:
        self.random, self._sharing = random.Random(seed), random.Random(seed)
        self.lock = threading.RLock()
        self._idle: dict[object, threading.Condition] = {}
        self.queues: list[Queue] = []
        variable, default, self._by_priority = QUEUES[vendor]
        self._num_queues = int(os.environ.get(variable, default))
        self._loaded: set[str] | None = None if os.environ.get("CUDA_MODULE_LOADING") == "EAGER" else set()
        self.local = threading.local()
        self.error: Exception | None = None
        self._free: dict[tuple[int, int], list[Tensor]] = {}
        self.used_bytes = self.peak_bytes = 0  # of blocks that are in use, or wait for a stream that they are kept for
        self.num_done = 0
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
            for queue in self.queues:
                queue.urgency = self.random.random()

    def new_queue(self, *, is_high: bool = False, is_aside: bool = False) -> Queue:
        with self.lock:
            self.queues.append(Queue(self.random.random(), is_high=is_high, is_aside=is_aside))
            return self.queues[-1]

    def queue_of_stream(self, is_high: bool) -> Queue:
        """One that no other stream has; where there are no more, any: which streams share one is the driver's secret."""
        is_high = is_high and self._by_priority
        with self.lock:
            own = [queue for queue in self.queues if not queue.is_aside and queue.is_high == is_high]
            unused = [queue for queue in own if not queue.num_streams]
            if not unused and len(own) < self._num_queues:
                return self.new_queue(is_high=is_high)
            return self._sharing.choice(unused or own)

    def put(self, queue: Queue, item: Item) -> None:
        with self.lock:
            queue.items.append(item)
            if item.worker is COLLECTIVES:
                self.launched.append(item)
            if len(queue.items) == 1:
                self._wake(item)

    def record(self, queue: Queue) -> Point:
        point = Point()
        self.put(queue, Item(point.reached.set, name="a point", is_point=True))
        return point

    def _wake(self, item: Item) -> None:
        """The thread that can run it has something to look at."""
        self._idle[item.worker].notify()

    def current(self) -> LateStream:
        return getattr(self.local, "stream", self._default)

    def submit(self, run: Callable[[], None]) -> None:
        self.current().submit(Item(run))

    def synchronize(self) -> None:
        for point in [self.record(queue) for queue in list(self.queues) if not queue.is_aside]:
            point.synchronize()
        if self.error is not None:
            raise self.error

    def load(self, kernel: str) -> None:
        """At a kernel's first launch: CUDA loads it then, and waits with that until the device stands still."""
        if self._loaded is None or kernel in self._loaded:
            return
        self._loaded.add(kernel)
        try:
            self.synchronize()
        except TimeoutError as error:
            raise TimeoutError(f"deadlock: {kernel} is loaded once the device stands still, and {error}") from error

    def where_it_stands(self) -> str:
        """What the queues wait for."""
        with self.lock:
            standing = [queue for queue in self.queues if queue.items]
            return "; ".join(
                f"{queue.num_streams} stream(s) on a queue that stands at {queue.items[0].name}, before {len(queue.items) - 1} more"
                for queue in standing
            )

    def allocate(self, num_bytes: int) -> "Allocation":
        """Memory of the current stream, poisoned: what was freed in this stream's order is had again at once."""
        size, stream = -(-max(1, num_bytes) // _CLASS_BYTES) * _CLASS_BYTES, self.current()
        with self.lock:
            free = self._free.setdefault((id(stream), size), [])
            self.used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            memory = free.pop() if free else torch.full((size,), _POISON, dtype=torch.uint8)
        return Allocation(self, memory, stream)

    def free(self, memory: Tensor, owner: LateStream, users: set[LateStream]) -> None:
        """Poisons the memory in the owner's order, or after all streams that it is kept for; then it is had again."""

        def poison() -> None:
            memory.fill_(_POISON)

        def give_back() -> None:
            with self.lock:
                self.used_bytes -= memory.numel()
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
        aside.submit(Item(lambda queue=aside.queue: self.queues.remove(queue)))

    def _work(self, worker: object) -> None:
        torch.set_grad_enabled(False)
        while True:
            with self.lock:
                while (queue := self._ready(worker)) is None:
                    self._idle[worker].wait()
                item = queue.items[0]
                pause = self.random.choice((0, 0, 0, 1e-4, 4e-4)) if item.after is None else 0
            if pause:
                time.sleep(pause)
            try:
                item.run()
            except Exception as error:  # noqa: BLE001  told by the next `synchronize`
                self.error = self.error or error
            with self.lock:
                queue.items.popleft()
                self.num_done += 1
                if item.worker is COLLECTIVES:
                    self.launched.popleft()
                if queue.items:
                    self._wake(queue.items[0])
                if item.is_point:
                    for idle in self._idle.values():
                        idle.notify()

    def _ready(self, worker: object) -> Queue | None:
        """The queue whose head runs next: mostly the most urgent one, whose urgency the seed has drawn."""
        ready = [
            queue
            for queue in self.queues
            if queue.items
            and queue.items[0].worker is worker
            and (worker is not COLLECTIVES or queue.items[0] is self.launched[0])
            and ((after := queue.items[0].after) is None or after.is_done())
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


def start(seed: int, vendor: Vendor) -> None:
    """Starts this process's engine, once."""
    if not _started:
        _started.append(Engine(seed, vendor))


_started: list[Engine] = []
