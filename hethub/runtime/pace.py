"""How long a rank's actions take. Here: as long as they do; a rehearsal makes them take what was planned."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hethub.spec.schedule import Action, Kind


@dataclass(frozen=True, kw_only=True)
class StepPace:
    """A step of a rank in a rehearsal: how much of its emulated seconds the rank's real work came too late."""

    emulated_seconds: float
    overrun_seconds: float


class Pace:
    """The pace of a rank whose device is real. The trainer and the executor say what they are about to do."""

    time_scale: float | None = None  # real seconds per emulated second, in a rehearsal

    def start_step(self) -> None:
        """A step begins."""

    def end_step(self) -> StepPace | None:
        """The step is done; how well a rehearsal kept its pace."""
        return None

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """The block executes `action`."""
        yield

    def enter(self, kind: Kind, layer: int) -> None:
        """One layer of the action's tile begins; `layer` counts the stage's layers in model order."""

    def leave(self) -> None:
        """The layer that was entered is computed."""

    @contextmanager
    def stepping(self, num_elements: int) -> Iterator[None]:
        """The block updates so many parameters."""
        yield

    def seconds(self, real_seconds: float) -> float:
        """Seconds to report for what really took `real_seconds`."""
        return real_seconds

    def memory_bytes(self, counted: int) -> int:
        """Bytes to report for a rank that counted `counted`. Raises RunFailed where its device has less."""
        return counted
