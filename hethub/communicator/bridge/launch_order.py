"""One order for what all groups of a process launch on their islands' libraries: that in which it was submitted.

NCCL and RCCL want one order over communicators on all ranks of an island: a collective may keep its device until all
ranks have launched it. Groups over islands run their operations in threads of their own, and their legs on one stream;
native groups launch in the thread that calls them, which may be autograd's. All take a turn when they are submitted, and
launch in it. Every rank submits in the same order, as c10d asks for device tensors, so every rank launches in the same
order, whatever the network's timing. What needs nothing from the network is launched the moment its turn comes, by
whoever made it come. Operations without the library take no turn and wait for nobody's.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Self, TypeVar

from hethub.communicator.bridge.links import wait_for
from hethub.communicator.relays.relay import Transfer
from hethub.kernels.device import Device

_Result = TypeVar("_Result")


class Dispatcher:
    """The turns of one process, and the streams that its groups share (torch has 32 for all): `stream` is what island legs
    and arithmetic go to, `down` and `up` what copies to the host and to the device."""

    def __init__(self, device: Device) -> None:
        self.stream, self.down, self.up = (device.new_stream() for _ in range(3))
        self._waiting: deque[Turn] = deque()
        self._changed = threading.Condition()

    def take_turn(self) -> "Turn":
        """A turn behind all taken before; the operation's submitter takes it, and it must be left in the end."""
        turn = Turn(self)
        with self._changed:
            self._waiting.append(turn)
        return turn

    def take_turn_of(self, launch: Callable[[], Iterable[_Result]]) -> "Launched[_Result]":
        """A turn in which `launch` runs, by whoever leaves the turn before it, or by `Turn.begin`."""
        launched = Launched(self, launch)
        with self._changed:
            self._waiting.append(launched)
        return launched

    def _wait_for(self, turn: "Turn") -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] is turn)

    def _leave(self, turn: "Turn") -> None:
        with self._changed:
            if turn not in self._waiting or (isinstance(turn, Launched) and turn.begun):
                return  # what has begun leaves by itself
            self._waiting.remove(turn)
            self._changed.notify_all()
        self._run_first()

    def _run_first(self) -> None:
        """Launches what need not be waited for, as long as such is first."""
        while True:
            with self._changed:
                first = self._waiting[0] if self._waiting else None
                if not isinstance(first, Launched) or first.begun:
                    return
                first.begun = True
            try:
                first.run()
            finally:
                with self._changed:
                    self._waiting.popleft()
                    self._changed.notify_all()


class Turn:
    """A place in the order: inside `with turn:` all earlier turns have been left."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def begin(self) -> None:
        """Launches what need not be waited for, if its turn has come."""
        self._dispatcher._run_first()

    def __enter__(self) -> Self:
        try:
            self._dispatcher._wait_for(self)
        except BaseException:  # Ctrl-C: `__exit__` is not called then
            self.leave()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """The operation launches no more; also for one that fails before its turn."""
        self._dispatcher._leave(self)

    def drop(self) -> None:
        """The operation could not be submitted: unless it has begun, it launches nothing, and the next ones do not wait."""
        self._dispatcher._leave(self)


class Launched(Turn, Generic[_Result]):
    """A turn that is left as soon as it has come."""

    def __init__(self, dispatcher: Dispatcher, launch: Callable[[], Iterable[_Result]]) -> None:
        super().__init__(dispatcher)
        self.begun = False
        self._launch = launch
        self._results: queue.SimpleQueue[_Result | Exception | None] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            for result in self._launch():
                self._results.put(result)
                del result
        except Exception as error:  # noqa: BLE001  raised to who asks for the results
            self._results.put(error)
        except BaseException as error:  # Ctrl-C in the caller's thread, which is another than theirs
            self._results.put(RuntimeError(f"{type(error).__name__} while it was launched"))
            raise
        finally:
            self._results.put(None)

    def results(self) -> Iterator[_Result]:
        """What is launched, each as soon as it is and once, so that the tensors in it can go."""
        while (result := self._results.get()) is not None:
            if isinstance(result, Exception):
                raise result
            yield result
            del result

    def __enter__(self) -> Self:
        for _ in self.results():
            pass
        return self

    def leave(self) -> None:
        """It leaves by itself."""


class StartOrder:
    """The order in which the transfers of messages are started: to and from one peer that of their submission, as
    messages of one tag need it."""

    def __init__(self) -> None:
        self._last: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def behind(self, peer: int, start: Callable[[], list[Transfer]]) -> Callable[[], None]:
        """What starts transfers behind those of the calls before, in any thread, and waits for them."""
        with self._lock:
            before, started = self._last.get(peer), threading.Event()
            self._last[peer] = started

        def run() -> None:
            try:
                if before is not None:
                    before.wait()
                transfers = start()
            finally:
                started.set()
            wait_for(transfers)

        return run
