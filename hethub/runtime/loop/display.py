"""What rank 0 shows of a run while it goes on."""

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn

from hethub.runtime.progress import ProgressDisplay
from hethub.runtime.run_folder import StepMetrics

PLAIN_LINES = 20  # about so many lines over a whole run, where there is no terminal


class TrainingDisplay(ProgressDisplay):
    """The progress of a run, with what its steps came to."""

    def __init__(
        self,
        first_step: int,
        last_step: int,
        *,
        shows: bool = True,
        console: Console | None = None,
        items: str = "tokens",
    ) -> None:
        self._first, self._last, self._items = first_step, last_step, items
        self._every = max(1, (last_step - first_step + 1) // PLAIN_LINES)
        columns = (
            MofNCompleteColumn(),
            TextColumn(f"loss {{task.fields[loss]}}  {{task.fields[rate]}} {items}/s"),
            TimeRemainingColumn(),
        )
        super().__init__(
            "training", *columns, console=console, total=last_step, done=first_step - 1, shows=shows, loss="…", rate="…"
        )

    def step(self, metrics: StepMetrics) -> None:
        """Takes in a step that is done."""
        is_due = (metrics.step - self._first) % self._every == 0 or metrics.step == self._last
        line = describe(metrics, self._last, self._items) if is_due else None
        self.update(metrics.step, line, loss=show_loss(metrics), rate=f"{metrics.tokens_per_second:,.0f}")


def describe(metrics: StepMetrics, last_step: int, items: str = "tokens") -> str:
    """A step as one line."""
    norm = "skipped: fp16 overflow" if metrics.grad_norm is None else f"grad norm {metrics.grad_norm:.3f}"
    return (
        f"step {metrics.step}/{last_step}  loss {show_loss(metrics)}  {norm}  "
        f"{metrics.step_seconds:.3f} s  {metrics.tokens_per_second:,.0f} {items}/s"
    )


def show_loss(metrics: StepMetrics) -> str:
    return "overflow" if metrics.loss is None else f"{metrics.loss:.4f}"
