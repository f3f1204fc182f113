"""Loop: the steps of a run on one rank, and what is kept and shown of them."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from hethub.communicator import World
from hethub.predictor.cost.profile import assumed_speeds
from hethub.predictor.pipeline.timeline import Span
from hethub.runtime.checkpoint import CheckpointManager
from hethub.runtime.emulate.pace import kept_pace
from hethub.runtime.loop.build import BUILDING_SECONDS, rebuild
from hethub.runtime.loop.display import TrainingDisplay
from hethub.runtime.loop.plan import Planned
from hethub.runtime.loop.read import Data
from hethub.runtime.loop.replanning import make_replanner
from hethub.runtime.loop.step_report import StepOutcome
from hethub.runtime.loop.stop_signal import StopSignal
from hethub.runtime.loop.trainer import TrainingRank
from hethub.runtime.measure.clock import clock_offset
from hethub.runtime.metrics import StepMetrics, perplexity
from hethub.runtime.pace import Pace, StepPace
from hethub.runtime.run_folder import SETTLING_STEPS, RunFolder
from hethub.runtime.sinks import Sinks, StepProfiler
from hethub.spec.errors import RunFailed, after_writing
from hethub.spec.job import Job, LogSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.plan import PlanSpec

TRACED_STEPS = 3  # the last steps of a run, kept for its trace
RETRIES = 10  # of a failed checkpoint, before the next one is due


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended, on rank 0."""

    folder: Path
    last_step: int
    stopped_early: bool
    first_loss: float
    last_loss: float
    predicted_step_seconds: float
    measured_step_seconds: float  # median


@dataclass(frozen=True, kw_only=True)
class RunSummary(Ended):
    """`spans` are every rank's actions of the last steps, on rank 0's clock."""

    layout: Layout
    emulation: dict[str, Any] | None  # how the pace was kept, where accelerators were emulated
    spans: list[Span] = field(repr=False)


def assumed_note(assumed: Sequence[str]) -> list[str]:
    """What is to be said beside a prediction that rests on accelerators of unknown speed."""
    return [f"the speed of {', '.join(assumed)} is assumed, not measured (hethub profile)"] if assumed else []


class StepLoop:
    """The steps of any run on one rank, `done` steps behind it; rank 0 writes the run folder and speaks.

    What a plan of layers and a program do unlike each other, they fill in below.
    """

    trainer: Any
    items = "tokens"  # what a rate counts

    def __init__(self, world: World, job: Job, data: Data | None, folder: RunFolder, done: int) -> None:
        self.world, self.job, self.data, self.folder, self.done = world, job, data, folder, done
        self.last = job.spec.train.steps
        self._losses: list[float] = []
        self._seconds: list[float] = []

    # -- what a kind of run fills in -------------------------------------------------------------------------------

    @property
    def _prediction(self) -> dict[str, Any]:
        """What prediction.json has."""
        raise NotImplementedError

    def _start_folder(self, chosen: dict[str, Any]) -> None:
        """Begins the run folder, or goes on in it; `chosen`: how the ranks are connected."""
        raise NotImplementedError

    def _told(self) -> list[str]:
        """What is to be said of the plan."""
        raise NotImplementedError

    def _save(self, step: int, *, ends: bool) -> str:
        """Saves the state behind `step`, complete on return where the run ends with it; what the log says of it."""
        raise NotImplementedError

    def _elapsed(self, seconds: float) -> float:
        """Seconds of a step that took so many."""
        return seconds

    def _note(self, step: int, outcome: StepOutcome) -> None:
        """After a step's line."""

    def _saved(self, step: int) -> None:
        """After a checkpoint behind which the run goes on."""

    # -- what all do -----------------------------------------------------------------------------------------------

    @property
    def _speaks(self) -> bool:
        return self.world.rank == 0

    @property
    def _predicted_seconds(self) -> float:
        return float(self._prediction["step_seconds"])

    def _train(self, warnings: Sequence[str], told: Sequence[str]) -> tuple[int, bool]:
        """Trains up to the job's last step, or until a signal asks to save and exit: the last step, and whether it
        came too early."""
        first, stopped, step = self.done + 1, False, self.done
        log = self.job.spec.log
        self._display = TrainingDisplay(
            first, self.last, every=log.every_steps, num_ranks=self.world.size, shows=self._speaks, items=self.items
        )
        writes = self._speaks and self.done < self.last  # else nothing is trained, and what is there stays as it is
        notes = self._open() if writes else []
        self._profiler = StepProfiler(log.profile_steps, self.folder.path, self.world.rank, self._say)
        wanted = log if writes else LogSpec()
        self._sinks = Sinks(wanted, self.folder.path, self.job.spec.to_dict(), self._say, first_step=first)
        with after_writing(), StopSignal(speaks=self._speaks) as signals, self._display, self._sinks:
            for line in self._opening([*warnings, *notes], told):
                self._say(line)
            with self._saving():
                for step in range(first, self.last + 1):
                    if stopped := self._step(step, signals):
                        break
            self._profiler.behind(step, ends=True, complete=self.trainer.flush)
        return step, stopped and step < self.last

    def _saving(self) -> AbstractContextManager[None]:
        """Context around all steps. A trainer that writes checkpoints beside its steps waits for the last one at its end."""
        return nullcontext()

    def _open(self) -> list[str]:
        """Begins the run folder, or goes on in it; what is to be said of losses there."""
        self._start_folder({"islands": self.world.islands, "relays": self.world.relays, **self.world.counters()})
        return self.folder.cut_behind(self.done)

    def _opening(self, warnings: Sequence[str], told: Sequence[str]) -> list[str]:
        notes, repeats = ([], []) if self.data is None else self.data.epochs(self.job.spec.train, self.done)
        lines = [f"warning: {warning}" for warning in [*warnings, *repeats]]
        lines += [*notes, *told, f"run folder {self.folder.path}", *self._told()]
        if self.done:
            lines.append(f"resumed behind step {self.done}")
        lines += self.trainer.schedule.notes
        traced, is_traced = self.job.spec.log.profile_steps, (self.folder.path / "profile").exists()
        if traced is not None and traced[1] <= self.done < self.last and not is_traced:
            lines.append(f"log.profile_steps {list(traced)} lie behind the resumed step: nothing will be traced")
        if self.done >= self.last:
            lines.append(f"all {self.last} steps are trained already; raise train.steps to go on")
        return lines

    def _say(self, text: str) -> None:
        """Say a line on the display and in log.txt."""
        self._display.say(text)
        if self._speaks:
            self.folder.log(text)

    def _step(self, step: int, signals: StopSignal) -> bool:
        self._profiler.before(step)
        start = monotonic()
        outcome = self.trainer.run_step(step, stop_requested=lambda: signals.requested)
        seconds = self._elapsed(monotonic() - start)
        self._losses.append(outcome.loss)
        self._seconds.append(seconds)
        ends = outcome.stop_requested or step == self.last
        self._profiler.behind(step, complete=self.trainer.flush)
        held_out = None if outcome.stop_requested and step < self.last else self._evaluate(step)  # a stop is urgent
        if self._speaks:
            metrics = self.trainer.metrics(step, outcome, seconds, self._predicted_seconds)
            metrics = metrics if held_out is None else metrics.with_evaluation(held_out)
            self._show(replace(metrics, mfu=self._mfu(seconds)))
        self._note(step, outcome)
        if ends or self._is_due(step):
            text = self._save(step, ends=ends)
            if self._speaks:
                self.folder.log(text)
            if not ends:
                self._saved(step)
        return bool(outcome.stop_requested)

    def _is_due(self, step: int) -> bool:
        """Whether a checkpoint is, though the run goes on."""
        every = self.job.spec.checkpoint.every_steps
        return every is not None and step % every == 0

    def _show(self, metrics: StepMetrics) -> None:
        """A step's line wherever it goes: sinks have evaluations from there alone, so these go there whenever they are."""
        self.folder.append(metrics)
        line = self._display.step(metrics)
        if line is not None:
            self.folder.log(line)
        if line is not None or metrics.eval_loss is not None:
            self._sinks.write(metrics.to_dict())

    def _mfu(self, seconds: float) -> float | None:
        """Return the MFU in percent of a step that took so many seconds, from the predicted MFU and step."""
        predicted = self._prediction["mfu"]
        return None if predicted is None else float(predicted) * self._predicted_seconds / seconds

    def _evaluate(self, step: int) -> float | None:
        """The loss on held-out samples, where the job wants it behind this step."""
        wanted = self.job.spec.eval
        if self.data is None or self.data.held_out is None or wanted is None:
            return None
        if step % wanted.every_steps and step != self.last:
            return None
        loss: float = self.trainer.evaluate(self.data.held_out, wanted.batches)
        self._say(f"step {step}: held-out loss {loss:.4f}, perplexity {perplexity(loss):.6g}")
        return loss

    def _ended(self, last_step: int, stopped: bool) -> dict[str, Any]:
        """The fields of `Ended`."""
        return {
            "folder": self.folder.path,
            "last_step": last_step,
            "stopped_early": stopped,
            "first_loss": self._losses[0],
            "last_loss": self._losses[-1],
            "predicted_step_seconds": self._predicted_seconds,
            "measured_step_seconds": statistics.median(self._seconds[SETTLING_STEPS:] or self._seconds),
        }


class TrainingLoop(StepLoop):
    """A trainer with its weights in place."""

    def __init__(
        self,
        world: World,
        job: Job,
        data: Data,
        planned: Planned,
        trainer: TrainingRank,
        store: CheckpointManager,
        done: int,
    ) -> None:
        super().__init__(world, job, data, planned.folder, done)
        self.planned, self.trainer, self.store = planned, trainer, store
        self._replanner = make_replanner(job, world.device, planned.layout, planned.profile)
        self._begun = done  # the step behind which the present trainer began
        self._is_unsaved = False  # the newest checkpoint has failed
        self._spans: list[Iterable[Span]] = []
        self._paces: list[StepPace] = []

    def run(self, warnings: Sequence[str] = ()) -> RunSummary | None:
        """Trains up to the job's last step, or until a signal asks to save and exit."""
        if self._speaks:
            self.store.note = self.folder.log
        before = clock_offset(self.world)
        step, stopped = self._train(warnings, self.planned.notes)
        offset = (before + clock_offset(self.world)) / 2
        return self._finish(step, stopped, offset) if self._losses else None

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """A checkpoint under way is completed where all ranks together find that training cannot go on; a run that ends
        has completed its last."""
        try:
            yield
        except RunFailed as error:
            if error.agreed:
                self.store.wait()
            raise

    @property
    def _prediction(self) -> dict[str, Any]:
        return self.planned.prediction

    def _start_folder(self, chosen: dict[str, Any]) -> None:
        # Before the plan: a start that is cut off between the two leaves no plan beside what other ranks had measured.
        self.folder.write_profile(None if self.planned.profile is None else self.planned.profile.to_dict())
        self.folder.start(self.job, self.planned.layout, self.planned.prediction, chosen)

    def _told(self) -> list[str]:
        plan, prediction = self.planned.layout.plan, self.planned.prediction
        stages = "; ".join(
            f"layers {stage.layers_text} on ranks {' and '.join(str(list(r.ranks)) for r in stage.replicas)}"
            for stage in plan.stages
        )
        predicted = f"predicted {prediction['step_seconds']:.4g} s a step"
        lines = [f"plan ({prediction['strategy']}), schedule {plan.schedule}: {stages}", predicted]
        cluster, profile = self.planned.layout.cluster, self.planned.profile
        lines += assumed_note(assumed_speeds(cluster, plan.precision, profile, plan.ranks))
        if self.trainer.pace.time_scale is not None:
            lines.append(f"emulated on CPUs: every emulated second takes {self.trainer.pace.time_scale:g} real ones")
        return lines

    def _elapsed(self, seconds: float) -> float:
        return self.trainer.pace.seconds(seconds)

    def _note(self, step: int, outcome: StepOutcome) -> None:
        if self.trainer.step_pace is not None:
            self._paces.append(self.trainer.step_pace)
        if outcome.save_failed:
            self._is_settled()
        self._spans = [*self._spans[-TRACED_STEPS + 1 :], self.trainer.spans]
        if self._replanner is not None and step - self._begun > SETTLING_STEPS:
            for row in self._replanner.note(step, outcome.busy_seconds, self.world):
                self._say(row["text"])
                if self._speaks:
                    self.folder.append_straggler(row)

    def _is_due(self, step: int) -> bool:
        every = self.job.spec.checkpoint.every_steps or 1
        return super()._is_due(step) or (self._is_unsaved and step % max(1, every // RETRIES) == 0)

    def _save(self, step: int, *, ends: bool) -> str:
        """Behind a failed one it is complete on return as well. Raises RunFailed where it fails though it is its turn."""
        blocking = not self._is_settled() or ends
        try:
            self.trainer.save(self.store, step, blocking=blocking)
        except RunFailed as error:
            if ends or super()._is_due(step) or not error.agreed:
                raise
            return str(error)
        self._is_unsaved = False
        return f"checkpoint of step {step}{'' if blocking else ' begun'}"

    def _is_settled(self) -> bool:
        """Waits for the checkpoint under way; whether the newest one stands. Where it has failed, the run goes on."""
        try:
            self.store.wait()
        except RunFailed as error:
            if not error.agreed:
                raise
            self._is_unsaved = True
            self._say(f"warning: {error} Training goes on and tries again; it ends where the next due one fails, too.")
        return not self._is_unsaved

    def _saved(self, step: int) -> None:
        """Goes on from the checkpoint just begun under a better plan, where ranks turned out slower and the job wants
        it."""
        found = self._replanner.chosen(self.world) if self._replanner is not None else None
        if self._replanner is None or found is None or not self._is_settled():
            return
        self.world.barrier()
        pace, data = self._drop_trainer(), self.data
        assert data is not None
        layout = bind(PlanSpec.model_validate(found["plan"]), self.job.model, self.planned.layout.cluster)
        prediction = {"strategy": "replanned", **found["prediction"]}
        self.planned = replace(self.planned, layout=layout, prediction=prediction)
        self.trainer = rebuild(layout, self.world, self.job, data.training, pace.on(layout))
        self.trainer.restore(self.store, self.store.path_of(step))
        # Ranks read unequal amounts; in a step they would wait for the slowest of them no longer than for a message.
        self.world.all_gather_objects(None, timedelta(seconds=BUILDING_SECONDS))
        self._replanner.follow(layout)
        self._begun, self._spans, self._seconds, self._paces = step, [], [], []
        self._say(f"step {step}: goes on under a new plan, predicted {self._predicted_seconds:.4g} s a step")
        if self._speaks:
            self.folder.write_plan(self.job, layout, prediction)
            self.folder.append_straggler({"step": step, "text": "new plan", "prediction": prediction})

    def _drop_trainer(self) -> Pace:
        """The trainer's pace; the trainer is gone and its memory free: two states need not fit on a device."""
        pace = self.trainer.pace
        del self.trainer
        self.world.device.release_memory()
        return pace

    def _finish(self, last_step: int, stopped: bool, offset: float) -> RunSummary | None:
        seconds = self.trainer.pace.seconds
        spans = [
            (*span[:3], seconds(span.start_seconds + offset), seconds(span.stop_seconds + offset))
            for s in self._spans
            for span in s
        ]
        rows = self.world.all_gather_objects(spans)
        counters = self.world.all_gather_objects(self.world.counters())
        scale, paces = self.trainer.pace.time_scale, self._paces[SETTLING_STEPS:] or self._paces
        emulation = None if scale is None else kept_pace(self.world, scale, paces)
        if not self._speaks:
            return None
        self.folder.write_counters(counters)
        measured = None if self._replanner is None else self._replanner.measured()
        if measured is not None:
            self.folder.write_calibration(measured.to_dict())
        if emulation is not None:
            self.folder.write_emulation(emulation)
        return RunSummary(
            **self._ended(last_step, stopped),
            layout=self.planned.layout,
            emulation=emulation,
            spans=[Span(*span) for row in rows for span in row],
        )
