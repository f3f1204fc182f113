"""What rank 0 shows of a run while it goes on: a progress bar on a terminal, plain lines elsewhere."""

import os
import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hethub.runtime.run_folder import StepMetrics

PLAIN_LINES = 20  # about so many lines over a whole run


def shows_on_terminal() -> bool:
    """Whether what this process prints ends on a terminal.

    mpirun gives its ranks a pseudo-terminal whatever its own output is, so there its own decides; a rank that cannot
    see it (another node's daemon started it) takes it for none.
    """
    if not sys.stdout.isatty():
        return False
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return True
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


class Reporter(Protocol):
    """Is told of every step, and of anything else worth a line."""

    def step(self, metrics: StepMetrics) -> None: ...
    def say(self, text: str) -> None: ...


class Silent:
    """Ranks other than 0 show nothing."""

    def step(self, metrics: StepMetrics) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class TerminalReporter:
    """Rank 0's view; a context manager around the steps."""

    def __init__(self, first_step: int, last_step: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, force_terminal=shows_on_terminal())
        self._first, self._last = first_step, last_step
        self._every = max(1, (last_step - first_step + 1) // PLAIN_LINES)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[rate]} tokens/s"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("steps", total=last_step, completed=first_step - 1, loss="…", rate="…")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, metrics: StepMetrics) -> None:
        self._progress.update(
            self._task, completed=metrics.step, loss=f"{metrics.loss:.4f}", rate=f"{metrics.tokens_per_second:,.0f}"
        )
        shown = (metrics.step - self._first) % self._every == 0 or metrics.step == self._last
        if not self._console.is_terminal and shown:
            self.say(describe(metrics, self._last))

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def describe(metrics: StepMetrics, last_step: int) -> str:
    """A step as one line."""
    norm = "skipped: fp16 overflow" if metrics.grad_norm is None else f"grad norm {metrics.grad_norm:.3f}"
    return (
        f"step {metrics.step}/{last_step}  loss {metrics.loss:.4f}  {norm}  "
        f"{metrics.step_seconds:.3f} s  {metrics.tokens_per_second:,.0f} tokens/s"
    )
