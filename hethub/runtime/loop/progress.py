"""What rank 0 shows of a run while it goes on: a progress bar on a terminal, plain lines elsewhere."""

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hethub.runtime.loop.console import make_console
from hethub.runtime.run_folder import StepMetrics

PLAIN_LINES = 20  # about so many lines over a whole run


class Reporter(Protocol):
    """Is told of every step, and of anything else worth a line; a context manager around the steps."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def step(self, metrics: StepMetrics) -> None: ...
    def say(self, text: str) -> None: ...


class Silent:
    """Ranks other than 0 show nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def step(self, metrics: StepMetrics) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class TerminalReporter:
    """Rank 0's view."""

    def __init__(self, first_step: int, last_step: int, console: Console | None = None) -> None:
        self._console = console or make_console()
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
            self._task, completed=metrics.step, loss=show_loss(metrics), rate=f"{metrics.tokens_per_second:,.0f}"
        )
        shown = (metrics.step - self._first) % self._every == 0 or metrics.step == self._last
        if not self._console.is_terminal and shown:
            self.say(describe(metrics, self._last))

    def say(self, text: str) -> None:
        self._console.print(text)


def describe(metrics: StepMetrics, last_step: int) -> str:
    """A step as one line."""
    norm = "skipped: fp16 overflow" if metrics.grad_norm is None else f"grad norm {metrics.grad_norm:.3f}"
    return (
        f"step {metrics.step}/{last_step}  loss {show_loss(metrics)}  {norm}  "
        f"{metrics.step_seconds:.3f} s  {metrics.tokens_per_second:,.0f} tokens/s"
    )


def show_loss(metrics: StepMetrics) -> str:
    return "overflow" if metrics.loss is None else f"{metrics.loss:.4f}"
