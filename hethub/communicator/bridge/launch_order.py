"""One order for the island legs of all groups of a process: that in which their operations were submitted.

NCCL and RCCL want one order over communicators on all ranks of an island. Groups run their operations in threads of
their own. What such a thread launches on the island's library, it launches in its operation's turn, on one stream: all
legs of one operation, then all of the next, whatever the network's timing. Every rank submits its operations in the
same order, as c10d asks for device tensors, so every rank launches in the same order. Operations without island legs
take no turn and wait for nobody's.
"""

import threading
from collections import deque
from typing import Self

from hethub.kernels.device import Device


class Dispatcher:
    """The turns of one process; `stream` is what island legs are launched on."""

    def __init__(self, device: Device) -> None:
        self.stream = device.new_stream()
        self._waiting: deque[Turn] = deque()
        self._changed = threading.Condition()

    def take_turn(self) -> "Turn":
        """A turn behind all taken before; the operation's submitter takes it, and it must be left in the end."""
        turn = Turn(self)
        with self._changed:
            self._waiting.append(turn)
        return turn

    def _wait_for(self, turn: "Turn") -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] is turn)

    def _leave(self, turn: "Turn") -> None:
        with self._changed:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._changed.notify_all()


class Turn:
    """A place in the order: inside `with turn:` all earlier turns have been left."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def __enter__(self) -> Self:
        self._dispatcher._wait_for(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """The operation launches no more; also for one that fails before its turn."""
        self._dispatcher._leave(self)
