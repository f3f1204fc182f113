"""Where steps are told beside metrics.jsonl: TensorBoard, Weights & Biases, torch's profiler. What fails is left out,
with a warning; a run goes on."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from hethub.spec.job import LogSpec

Warn = Callable[[str], None]

# Of a line of metrics: what goes to a sink, under these names.
SHOWN = {
    "loss": "loss", "lr": "lr", "grad_norm": "grad_norm", "mfu": "mfu", "step_seconds": "seconds/measured",
    "predicted_step_seconds": "seconds/predicted", "tokens_per_second": "tokens_per_second",
    "memory_bytes": "memory_bytes", "eval_loss": "eval/loss", "eval_perplexity": "eval/perplexity",
}  # fmt: skip


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Events in the run folder's `tensorboard/`; needs the package tensorboard. What an earlier start told of
    `first_step` and later ones is no longer shown."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project, named as the run folder; a resumed run goes on with it. WANDB_MODE=offline keeps it in the
    run folder's `wandb/`."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project, name=folder.name, id=folder.name, resume="allow", dir=str(folder), config=dict(config)
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """The sinks that a job asks for, on the rank that speaks; the others have none. A run that goes on tells them of
    `first_step` and later ones anew. A context manager that closes them."""

    def __init__(
        self, log: LogSpec, folder: Path, config: Mapping[str, Any], warn: Warn, *, first_step: int = 1
    ) -> None:
        self._sinks: dict[str, Sink] = {}
        self._warn = warn
        if log.tensorboard:
            self._try("tensorboard", lambda: self._sinks.update(tensorboard=TensorBoard(folder, first_step)))
        if (project := log.wandb) is not None:
            self._try("wandb", lambda: self._sinks.update(wandb=WeightsAndBiases(folder, project, config)))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Tells every sink a line of metrics."""
        values = {shown: metrics[key] for key, shown in SHOWN.items() if metrics.get(key) is not None}
        for name, sink in list(self._sinks.items()):
            self._try(name, lambda sink=sink: sink.write(metrics["step"], values))  # type: ignore[misc]

    def _try(self, name: str, action: Callable[[], None]) -> None:
        """What a logger does is its own code's and its server's: whatever it raises takes this sink out, no more."""
        try:
            action()
        except Exception as error:  # noqa: BLE001  said to the user, and the run goes on without the sink
            self._sinks.pop(name, None)
            remedy = "; pip install 'hethub[logs]' brings it" if isinstance(error, ImportError) else ""
            self._warn(f"warning: {name} is left out from here on ({type(error).__name__}: {error}){remedy}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)


class StepProfiler:
    """torch.profiler over the steps `first` to `last` on this rank; its trace is `profile/rank-N.json` in the run
    folder, which Perfetto opens."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int, warn: Warn) -> None:
        self._steps, self._rank, self._warn = steps, rank, warn
        self._folder = folder / "profile"
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Starts before the first step; where a run is resumed behind it, before the one it begins with."""
        if self._steps is None or self._profiler is not None or not self._steps[0] <= step <= self._steps[1]:
            return
        import torch

        self._profiler = torch.profiler.profile(activities=list(torch.profiler.supported_activities()))
        self._profiler.start()

    def behind(self, step: int, *, complete: Callable[[], None], ends: bool = False) -> None:
        """Stops and writes behind the last step, or where the run `ends` sooner; before, `complete` waits for what goes on
        beside the next one: an operation that ends later would write to a profiler that is gone."""
        if self._steps is None or self._profiler is None or not (ends or step >= self._steps[1]):
            return
        profiler, self._steps = self._profiler, None
        complete()
        profiler.stop()
        path = self._folder / f"rank-{self._rank}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self._warn(f"warning: the profile {path} could not be written ({error})")
