"""Loop: the steps of a run on one rank, and what is kept and shown of them."""

import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from hethub.communicator import World
from hethub.predictor.pipeline.timeline import Span
from hethub.runtime.checkpoint import CheckpointManager
from hethub.runtime.data import Dataset
from hethub.runtime.loop.build import make_trainer
from hethub.runtime.loop.display import TrainingDisplay
from hethub.runtime.loop.plan import Planned
from hethub.runtime.loop.replanning import make_replanner
from hethub.runtime.loop.stop_signal import StopSignal
from hethub.runtime.loop.trainer import Trainer
from hethub.runtime.measure.clock import clock_offset
from hethub.runtime.pace import Pace, StepPace
from hethub.spec.errors import RunFailed
from hethub.spec.job import Job
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.plan import PlanSpec

TRACED_STEPS = 3  # the last steps of a run, kept for its trace
SETTLING_STEPS = 2  # the first steps, which warm up and count memory, left out of the measured time


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How a run ended, on rank 0; `spans` are every rank's actions of the last steps, on rank 0's clock."""

    folder: Path
    last_step: int
    stopped_early: bool
    first_loss: float
    last_loss: float
    predicted_step_seconds: float
    measured_step_seconds: float  # median
    layout: Layout
    emulation: dict[str, Any] | None  # how the pace was kept, where accelerators were emulated
    spans: list[Span] = field(repr=False)


class TrainingLoop:
    """A trainer with its weights in place, `done` steps behind them; rank 0 writes the run folder and speaks."""

    def __init__(
        self,
        world: World,
        job: Job,
        dataset: Dataset,
        planned: Planned,
        trainer: Trainer,
        store: CheckpointManager,
        done: int,
    ) -> None:
        self.world, self.job, self.dataset, self.planned = world, job, dataset, planned
        self.trainer, self.store, self.done, self.last = trainer, store, done, job.spec.train.steps
        self._replanner = make_replanner(job, world.device, planned.layout, planned.profile)
        self._begun = done  # the step behind which the present trainer began
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._spans: list[list[Span]] = []
        self._paces: list[StepPace] = []

    @property
    def _speaks(self) -> bool:
        return self.world.rank == 0

    def run(self, warnings: Sequence[str] = ()) -> RunSummary | None:
        """Trains up to the job's last step, or until a signal asks to save and exit."""
        first, stopped, step = self.done + 1, False, self.done
        display = TrainingDisplay(first, self.last, shows=self._speaks)
        notes = self._open() if self._speaks else []
        before = clock_offset(self.world)
        with StopSignal() as signals, display:
            for line in self._opening([*warnings, *notes]):
                self._say(line, display)
            with self._saving():
                for step in range(first, self.last + 1):
                    stopped = self._step(step, signals, display)
                    if stopped:
                        break
        offset = (before + clock_offset(self.world)) / 2
        return self._finish(step, stopped and step < self.last, offset) if self._losses else None

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """A checkpoint under way is completed, also where all ranks together find that training cannot go on."""
        try:
            yield
        except RunFailed as error:
            if error.agreed:
                self.store.wait()
            raise
        self.store.wait()

    def _open(self) -> list[str]:
        """Begins the run folder, or goes on in it; what is to be said of losses there."""
        folder = self.planned.folder
        chosen = {"islands": self.world.islands, "relays": self.world.relays, **self.world.counters()}
        folder.start(self.job, self.planned.layout, self.planned.prediction, chosen)
        if self.planned.profile is not None:
            folder.write_profile(self.planned.profile.to_dict())
        return folder.cut_metrics(self.done)

    def _opening(self, warnings: Sequence[str]) -> list[str]:
        plan, prediction, folder = self.planned.layout.plan, self.planned.prediction, self.planned.folder
        stages = "; ".join(
            f"layers [{stage.layers[0][0]}, {stage.layers[-1][1]}) on ranks {' and '.join(str(list(r.ranks)) for r in stage.replicas)}"
            for stage in plan.stages
        )
        lines = [f"warning: {warning}" for warning in warnings]
        lines += self.planned.notes
        lines.append(f"run folder {folder.path}")
        lines.append(f"plan ({prediction['strategy']}), schedule {plan.schedule}: {stages}")
        lines.append(f"predicted {prediction['step_seconds']:.4g} s a step")
        if self.trainer.pace.time_scale is not None:
            lines.append(f"emulated on CPUs: every emulated second takes {self.trainer.pace.time_scale:g} real ones")
        if self.done:
            lines.append(f"resumed behind step {self.done}")
        if self.done >= self.last:
            lines.append(f"all {self.last} steps are trained already; raise train.steps to go on")
        return lines

    def _say(self, text: str, display: TrainingDisplay) -> None:
        """To whoever watches, and to log.txt."""
        display.say(text)
        if self._speaks:
            self.planned.folder.log(text)

    def _step(self, step: int, signals: StopSignal, display: TrainingDisplay) -> bool:
        start = monotonic()
        outcome = self.trainer.run_step(step, stop_requested=lambda: signals.requested)
        seconds = self.trainer.pace.seconds(monotonic() - start)
        if self.trainer.step_pace is not None:
            self._paces.append(self.trainer.step_pace)
        self._losses.append(outcome.loss)
        self._seconds.append(seconds)
        self._spans = [*self._spans[-TRACED_STEPS + 1 :], self.trainer.spans]
        if self._speaks:
            metrics = self.trainer.metrics(step, outcome, seconds, self.planned.prediction["step_seconds"])
            self.planned.folder.append(metrics)
            display.step(metrics)
        if self._replanner is not None and step - self._begun > SETTLING_STEPS:
            for row in self._replanner.note(step, outcome.busy_seconds, plans=self._speaks):
                self._say(row["text"], display)
                if self._speaks:
                    self.planned.folder.append_straggler(row)
        ends = outcome.stop_requested or step == self.last
        every = self.job.spec.checkpoint.every_steps
        if ends or (every is not None and step % every == 0):
            self.trainer.save(self.store, step, blocking=ends)
            if self._speaks:
                self.planned.folder.log(f"checkpoint of step {step}{'' if ends else ' begun'}")
            if not ends:
                self._replan(step, display)
        return outcome.stop_requested

    def _replan(self, step: int, display: TrainingDisplay) -> None:
        """Goes on from the checkpoint just begun under a better plan, where ranks turned out slower and the job wants
        it."""
        found = self._replanner.chosen(self.world) if self._replanner is not None else None
        if self._replanner is None or found is None:
            return
        self.store.release()
        self.world.barrier()
        pace = self._drop_trainer()
        layout = bind(PlanSpec.model_validate(found["plan"]), self.job.model, self.planned.layout.cluster)
        prediction = {"strategy": "replanned", **found["prediction"]}
        self.planned = replace(self.planned, layout=layout, prediction=prediction)
        self.trainer = make_trainer(layout, self.world, self.job, self.dataset, pace.on(layout))
        path = self.store.latest()
        assert path is not None
        self.trainer.restore(self.store, path)
        self._replanner.follow(layout)
        self._begun, self._spans, self._seconds, self._paces = step, [], [], []
        self._say(f"step {step}: goes on under a new plan, predicted {found['step_seconds']:.4g} s a step", display)
        if self._speaks:
            self.planned.folder.write_plan(layout, prediction)
            self.planned.folder.append_straggler({"step": step, "text": "new plan", "prediction": prediction})

    def _drop_trainer(self) -> Pace:
        """The trainer's pace; the trainer is gone and its memory free: two states need not fit on a device."""
        pace = self.trainer.pace
        del self.trainer
        gc.collect()
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
        emulation = self._emulation()
        if not self._speaks:
            return None
        self.planned.folder.write_counters(counters)
        if emulation is not None:
            self.planned.folder.write_emulation(emulation)
        return RunSummary(
            folder=self.planned.folder.path,
            last_step=last_step,
            stopped_early=stopped,
            first_loss=self._losses[0],
            last_loss=self._losses[-1],
            predicted_step_seconds=self.planned.prediction["step_seconds"],
            measured_step_seconds=statistics.median(self._seconds[SETTLING_STEPS:] or self._seconds),
            layout=self.planned.layout,
            emulation=emulation,
            spans=[Span(*span) for row in rows for span in row],
        )

    def _emulation(self) -> dict[str, Any] | None:
        """How much of the emulated time, by rank, real work came too late for; None where nothing is emulated."""
        if self.trainer.pace.time_scale is None:
            return None
        settled = self._paces[SETTLING_STEPS:] or self._paces
        emulated = sum(pace.emulated_seconds for pace in settled)
        overrun = 100.0 * sum(pace.overrun_seconds for pace in settled) / emulated
        rows: list[float] = self.world.all_gather_objects(overrun)
        return {
            "time_scale": self.trainer.pace.time_scale,
            "overrun_percent": max(rows),
            "overrun_percent_by_rank": rows,
        }
