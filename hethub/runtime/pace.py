"""How long a rank's actions take. Here: as long as they do; an emulation makes them take what was planned."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from hethub.kernels.device import Device
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
    def stepping(self, num_elements: int) -> Iterator[None]:
        """The block updates so many parameters."""
        yield

    def start_host_copy(self, num_bytes: int) -> float | None:
        """Bytes start their way between host and device; when they are through, for `end_host_copy`."""
        return None

    def end_host_copy(self, end: float | None) -> None:
        """The device waits for a copy."""

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


LOOKED_AT = 10  # every so many steps on a device: to time a layer, it is waited for


class WatchedPace(Pace):
    """The pace of a real device that times what it computes, collectives inside layers included."""

    def __init__(self, device: Device) -> None:
        self._device, self._step = device, 0
        self._busy: dict[str, float] = {}
        self._kind, self._began, self._looks = Kind.FORWARD, 0.0, False

    def start_step(self) -> None:
        self._looks = not self._device.is_gpu or self._step % LOOKED_AT == 0
        self._step += 1

    def enter(self, kind: Kind, layer: int) -> None:
        if self._looks:
            self._device.synchronize()
            self._kind, self._began = kind, monotonic()

    def leave(self) -> None:
        if self._looks:
            self._device.synchronize()
            self._busy[self._kind] = self._busy.get(self._kind, 0.0) + monotonic() - self._began

    @contextmanager
    def stepping(self, num_elements: int) -> Iterator[None]:
        self.enter(Kind.STEP, 0)
        yield
        self.leave()

    def take_busy_seconds(self) -> dict[str, float] | None:
        """An update that comes behind the asking counts with the next step that is looked at."""
        if not self._looks:
            return None
        taken, self._busy = self._busy, {}
        return taken

    def on(self, layout: Layout) -> "WatchedPace":
        return WatchedPace(self._device)
