"""How long a rank's actions take. Here: as long as they do; an emulation makes them take what was planned."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hethub.kernels.device import Clock, Device, Stamp
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import Action, Kind


@dataclass(frozen=True, kw_only=True)
class StepPace:
    """A step of a rank in an emulation: how much of its emulated seconds the rank's real work came too late."""

    emulated_seconds: float
    overrun_seconds: float


class Pace:
    """The pace of a rank whose device is real. The trainer and the executor say what they are about to do."""

    time_scale: float | None = None  # real seconds per emulated second, in an emulation

    def start_step(self) -> None:
        """A step begins."""

    def end_step(self) -> StepPace | None:
        """The step is done; how well an emulation kept its pace."""
        return None

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """The block executes `action`."""
        yield

    def enter(self, kind: Kind, layer: int) -> None:
        """One layer of the action's microbatch begins; `layer` counts the stage's layers in model order."""

    def leave(self) -> None:
        """The layer that was entered is computed."""

    @contextmanager
    def communicating(self) -> Iterator[bool]:
        """Around communication inside a layer. Yields whether communication that the block only starts has to be waited for there."""
        yield False

    @contextmanager
    def stepping(self, num_elements: int) -> Iterator[None]:
        """The block updates so many parameters."""
        yield

    def start_host_copy(self, num_bytes: int, *, fetches: bool) -> float | None:
        """Bytes start their way from the host to the device (`fetches`) or back; when they are through, for
        `end_host_copy`."""
        return None

    def end_host_copy(self, end: float | None) -> None:
        """The device waits for a copy."""

    @contextmanager
    def behind_host_copy(self, end: float | None) -> Iterator[None]:
        """What the block starts comes behind a copy that the device does not wait for."""
        yield

    def take_busy_seconds(self) -> dict[str, float] | None:
        """What this rank has computed since it was last asked, by kind of action; None where nobody looked at this
        step."""
        return None

    def on(self, layout: Layout) -> "Pace":
        """The pace of this rank under another plan."""
        return self

    def seconds(self, real_seconds: float) -> float:
        """Seconds to report for what really took `real_seconds`."""
        return real_seconds

    def memory_bytes(self, counted: int) -> int:
        """Bytes to report for a rank that counted `counted`. Raises RunFailed where its device has less."""
        return counted


# Every so many steps on a device: there a layer waits for what its ranks exchange. Twenty steps, two of which settle,
# hold nine: five slow ones on end are among them even where noise hides one.
LOOKED_AT = 2


class WatchedPace(Pace):
    """The pace of a real device that times what it computes, by events between its work: what ranks wait for each other
    inside a layer is left out, as it is of what is planned."""

    def __init__(self, device: Device) -> None:
        self._device, self._step = device, 0
        self._clock = Clock(device)
        self._marks: list[tuple[Kind, Stamp, Stamp, int]] = []  # what began and ended, and whether it counts or not
        self._entered: tuple[Kind, Stamp] | None = None
        self._looks = False

    def start_step(self) -> None:
        self._looks = not self._device.is_gpu or self._step % LOOKED_AT == 0
        self._step += 1

    def enter(self, kind: Kind, layer: int) -> None:
        if self._looks:
            self._entered = kind, self._clock.stamp()

    def leave(self) -> None:
        if self._entered is not None:
            self._marks.append((*self._entered, self._clock.stamp(), 1))
            self._entered = None

    @contextmanager
    def communicating(self) -> Iterator[bool]:
        if self._entered is None:
            yield False
            return
        start = self._clock.stamp()
        yield self._device.is_gpu  # else what is started runs beside computing on any step, as is
        self._marks.append((self._entered[0], start, self._clock.stamp(), -1))

    @contextmanager
    def stepping(self, num_elements: int) -> Iterator[None]:
        self.enter(Kind.STEP, 0)
        yield
        self.leave()

    def take_busy_seconds(self) -> dict[str, float] | None:
        """An update that comes behind the asking counts with the next step that is looked at."""
        if not self._looks:
            return None
        marks, self._marks = self._marks, []
        busy: dict[str, float] = {}
        for kind, first, last, counts in marks:
            busy[kind] = busy.get(kind, 0.0) + counts * self._clock.between(first, last)
        return busy

    def on(self, layout: Layout) -> "WatchedPace":
        return WatchedPace(self._device)
