"""What rank 0 shows of a run while it goes on."""

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn

from hethub.runtime.metrics import StepMetrics
from hethub.runtime.progress import ProgressDisplay
from hethub.spec.base import show_gib


class TrainingDisplay(ProgressDisplay):
    """The progress of a run, with what its steps came to."""

    def __init__(
        self,
        first_step: int,
        last_step: int,
        *,
        every: int = 1,
        num_ranks: int = 1,
        shows: bool = True,
        console: Console | None = None,
        items: str = "tokens",
    ) -> None:
        self._last, self._items, self._every, self._num_ranks = last_step, items, every, num_ranks
        columns = (
            MofNCompleteColumn(),
            TextColumn(f"loss {{task.fields[loss]}}  {{task.fields[rate]}} {items}/s"),
            TimeRemainingColumn(),
        )
        super().__init__(
            "training", *columns, console=console, total=last_step, done=first_step - 1, shows=shows, loss="…", rate="…"
        )

    def step(self, metrics: StepMetrics) -> str | None:
        """Takes in a step that is done; its line, where one is due."""
        is_due = metrics.step % self._every == 0 or metrics.step == self._last
        line = describe(metrics, self._last, self._num_ranks, self._items) if is_due else None
        self.update(metrics.step, line, loss=show_loss(metrics), rate=f"{metrics.tokens_per_second:,.0f}")
        return line


def describe(metrics: StepMetrics, last_step: int, num_ranks: int, items: str = "tokens") -> str:
    """A step as one line."""
    norm = "skipped: fp16 overflow" if metrics.grad_norm is None else f"grad norm {metrics.grad_norm:.3f}"
    predicted = metrics.predicted_step_seconds
    beside = "" if predicted is None else f" (predicted {_seconds(predicted)})"
    rate = metrics.tokens_per_second
    mfu = "" if metrics.mfu is None else f"  MFU {metrics.mfu:.1f} %"
    return (
        f"step {metrics.step}/{last_step}  loss {show_loss(metrics)}  lr {metrics.lr:.2e}  {norm}  "
        f"{_seconds(metrics.step_seconds)} s{beside}  {rate:,.0f} {items}/s ({rate / num_ranks:,.0f} each){mfu}  "
        f"tensors {show_gib(metrics.memory_bytes)} GiB"
    )


def show_loss(metrics: StepMetrics) -> str:
    return "overflow" if metrics.loss is None else f"{metrics.loss:.4f}"


def _seconds(seconds: float) -> str:
    """Return seconds as text with at least three digits: emulated steps, and small models on a GPU, take milliseconds."""
    return f"{seconds:.3f}" if seconds >= 0.1 or seconds == 0 else f"{seconds:#.3g}"
