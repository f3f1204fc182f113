"""Emulated time and emulated interfaces: what makes an emulation's messages take as long as planned.

Every rank has a clock of its own. It says when the emulated device would be through with what the rank has done, on
the monotonic clock that all processes of a host share, and the rank sleeps until then. Messages and collectives carry
these times, so a late wake-up of one process is not added to the next one's.
"""

import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple, Protocol

from hethub.communicator.joining.rendezvous import Rendezvous

_SPANS = 32  # that an interface keeps; ranks ask in advance for what one action sends, far less


class Transfer(NamedTuple):
    """What a message or collective takes of the emulated network, in emulated seconds.

    It holds one interface out of each entry of `interfaces` for `hold_seconds` and is there `latency_seconds` later.
    """

    hold_seconds: float
    latency_seconds: float
    interfaces: tuple[tuple[int, ...], ...]


class EmulatedNetwork(Protocol):
    """The network of the emulated cluster."""

    num_interfaces: int

    def message(self, source: int, target: int, num_bytes: int) -> Transfer: ...

    def collective(self, name: str, ranks: Sequence[int], num_bytes: int, parts: Sequence[int] = ()) -> Transfer:
        """`num_bytes`: of the whole tensor, whatever part of it a rank gets or gives. `parts`: how many elements of it
        each rank owns, where that is told."""


class EmulatedClock:
    """One rank's emulated time. With `scale` 0 nothing takes time, so the rank runs as fast as it can."""

    def __init__(self, scale: float = 0.0) -> None:
        self.scale = scale  # real seconds per emulated second
        self.at = monotonic()  # until when the emulated device is busy
        self.waited_seconds = 0.0  # spent waiting for others' data, really
        self._is_computing = False

    def start_step(self) -> None:
        """Forgets what was lost between steps, which no device would have done."""
        self.at = max(self.at, monotonic())

    def begin(self, seconds: float) -> None:
        """The device is busy for `seconds` from here, however long it really takes until `end`.

        What is started before `end` starts at the end of these seconds; collectives waited for come on top. The rank
        does not sleep before it next waits for something or asks to (`keep`).
        """
        self.at += seconds * self.scale
        self._is_computing = True

    def end(self) -> None:
        self._is_computing = False

    def advance(self, at: float) -> None:
        """Something the device waits for is there at `at`."""
        self.at = max(self.at, at)
        if not self._is_computing:
            self.keep()

    def keep(self) -> float:
        """Sleeps until the emulated device is through; returns by how many seconds this rank comes too late."""
        late = monotonic() - self.at
        if late < 0:
            sleep(-late)
        return max(0.0, late)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as waiting for others."""
        start = monotonic()
        yield
        self.waited_seconds += monotonic() - start


class Fabric:
    """When each interface of the emulated cluster is taken; one table for all ranks of this host.

    A rank asks when it starts something, which may be well before its emulated device is there. So an interface keeps
    its last spans, and who is earlier by emulated time goes into a gap before them.
    """

    def __init__(self, meeting: Rendezvous, num_interfaces: int) -> None:
        num_bytes = 16 * _SPANS * max(1, num_interfaces)
        if meeting.rank == 0:
            descriptor, path = tempfile.mkstemp(prefix="hethub-fabric-")
            os.ftruncate(descriptor, num_bytes)
            meeting.store.set("fabric", path)
        else:
            path = meeting.store.get("fabric").decode()
            descriptor = os.open(path, os.O_RDWR)
        self._descriptor, self._lock = descriptor, threading.Lock()
        self._memory = mmap.mmap(descriptor, num_bytes)
        self._table = memoryview(self._memory).cast("d")  # by interface: starts, then stops
        if meeting.store.add("fabric-open", 1) == meeting.size:
            Path(path).unlink()

    def reserve(self, interfaces: Sequence[Sequence[int]], earliest: float, seconds: float) -> float:
        """When one interface of each entry is taken for `seconds`: not before `earliest`, in the first gap that all of
        them have. Of each entry's alternatives the one with the first gap is taken."""
        with self._lock:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                taken = [min(choices, key=lambda one: self._gap(one, earliest, seconds)) for choices in interfaces]
                start, after = earliest, -1.0
                while start != after:
                    after = start
                    for index in taken:
                        start = self._gap(index, start, seconds)
                for index in taken:
                    self._take(index, start, start + seconds)
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return start

    def _gap(self, interface: int, earliest: float, seconds: float) -> float:
        """The first moment from `earliest` on at which an interface is free for `seconds`."""
        starts, stops = self._spans(interface)
        later = [(start, stop) for start, stop in zip(starts, stops, strict=True) if stop > earliest]
        for start, stop in sorted(later):
            if start < earliest + seconds and earliest < stop:
                earliest = stop
        return earliest

    def _take(self, interface: int, start: float, stop: float) -> None:
        """Writes a span in place of the one that is over first."""
        starts, stops = self._spans(interface)
        oldest = min(range(_SPANS), key=stops.__getitem__)
        starts[oldest], stops[oldest] = start, stop

    def _spans(self, interface: int) -> "tuple[memoryview[float], memoryview[float]]":
        first = 2 * _SPANS * interface
        return self._table[first : first + _SPANS], self._table[first + _SPANS : first + 2 * _SPANS]

    def close(self) -> None:
        self._table.release()
        self._memory.close()
        os.close(self._descriptor)
