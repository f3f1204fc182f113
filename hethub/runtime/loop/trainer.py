"""The training loop of one rank: steps of the executor, the global norm, the optimizer, and what is reported of
them."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from hethub.communicator import World
from hethub.communicator.counters import since
from hethub.predictor.pipeline.timeline import Span
from hethub.runtime.checkpoint import CheckpointStore
from hethub.runtime.data import Dataset
from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.memory.host_arena import HostArena
from hethub.runtime.model.initial import initialise
from hethub.runtime.model.stage import MicrobatchInput, Stage
from hethub.runtime.model.tensor_parallel import TensorGroup
from hethub.runtime.pace import Pace, StepPace
from hethub.runtime.pipeline.executor import Executor
from hethub.runtime.run_folder import StepMetrics
from hethub.runtime.state.optimizer import LossScale, Optimizer, clip_scale, learning_rate, ordered_sum
from hethub.runtime.state.reduction import Reducer, build_groups
from hethub.runtime.state.stepping import Stepping
from hethub.runtime.state.storage import FlatStorage
from hethub.runtime.state.verify import verify_copies, verify_owners
from hethub.runtime.state.zero import ZeroManager
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import TrainSpec
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import Kind
from hethub.spec.layout.state import StateMap, steps_per_chunk
from hethub.spec.ranges import Range
from hethub.spec.schedule.microbatches import MicrobatchRange

VERIFY_EVERY = 100  # steps between comparisons of replicated parameters
COUNTED_STEPS = 2  # steps whose memory is counted tensor by tensor; the following ones are alike


@dataclass(frozen=True)
class StepOutcome:
    """What all ranks know after a step."""

    loss: float
    grad_norm: float | None
    memory_bytes: int
    stop_requested: bool
    # By rank, what it computed by kind of action, the last update in place of this step's; None where nobody looked.
    busy_seconds: tuple[dict[str, float] | None, ...]


class Trainer:
    """One rank of a run: its part of the model, its optimizer, and one method that trains a step with all the
    others."""

    def __init__(
        self,
        layout: Layout,
        world: World,
        dataset: Dataset,
        train: TrainSpec,
        *,
        document_mask: bool = False,
        pace: Pace | None = None,
    ) -> None:
        self.layout, self.world, self.dataset, self.train = layout, world, dataset, train
        self._document_mask = document_mask
        self.pace = pace or Pace()
        self.step_pace: StepPace | None = None  # of the last step of an emulation
        self.assignment = layout.assignments[world.rank]
        self.state = StateMap(layout)
        verify_owners(world, self.state)
        self.device = world.device
        self._communicated = world.counters()
        replica = layout.replica(self.assignment.stage, self.assignment.replica)
        group_of = build_groups(world, self.state)
        self.arena = HostArena(self.device, self.pace)
        self.storage = FlatStorage(
            self.state, self.assignment, layout.plan.precision, self.device.torch_device, self.arena
        )
        self.stage = Stage(
            layout, self.assignment, self.storage, TensorGroup(group_of(replica.ranks) if replica.tp > 1 else None)
        )
        self.reducer = Reducer(self.state, self.storage, group_of, replica.ranks)
        self._meter = MemoryMeter([self.storage.weights, self.storage.grads, self.stage.cos, self.stage.sin])
        self.optimizer = Optimizer(self.storage, self.reducer, train, self.arena, self._meter)
        self.stepping = Stepping(
            self.optimizer,
            self.reducer,
            self.pace,
            per_chunk=steps_per_chunk(layout),
            waits_for_norm=train.grad_clip is not None or layout.plan.precision == "fp16",
        )
        self.zero_manager = ZeroManager(self.reducer, self._meter, self.stepping, self.arena)
        self.executor = Executor(layout, self.assignment, world, self.stage, self.zero_manager, self.pace)
        self.loss_scale = LossScale(layout.plan.precision)
        self._steps_counted = 0
        self._speaks_for_loss = self.stage.is_last and self.assignment.position == 0

    def initialise(self) -> None:
        """Fills the weights from the job's seed."""
        initialise(self.storage, self.layout.model, self.train.seed)
        self.optimizer.reload_masters()

    def run_step(self, step: int, *, stop_requested: Callable[[], bool] = lambda: False) -> StepOutcome:
        """Trains step `step` (counted from 1) and returns what all ranks agree on.

        `stop_requested` is asked when the microbatches are done: a signal that comes during a step counts for that
        step.

        Raises RunFailed where the loss is not finite, or copies of a parameter differ.
        """
        self.pace.start_step()
        self.stepping.begin(step)
        valid_tokens = self.dataset.valid_tokens(step - 1, self.layout.plan.global_batch)
        with self._counting_memory():
            loss = self.executor.run_step(self._loader(step), self.loss_scale.value / valid_tokens)
        with self.executor.timed(Kind.STEP):
            outcome = self._agree(loss, stop_requested())
            self._update(step, outcome)
        if outcome.grad_norm is not None:
            with self.executor.timed(Kind.GATHER):
                self.stepping.gather()
        if step % VERIFY_EVERY == 0:
            self.stepping.flush()
            verify_copies(self.world, self.reducer, step)
        self.step_pace = self.pace.end_step()
        return outcome

    def _counting_memory(self):  # type: ignore[no-untyped-def]
        if self.device.is_gpu or self._steps_counted == COUNTED_STEPS:
            return nullcontext()
        self._steps_counted += 1
        return self._meter.counting()

    @property
    def spans(self) -> list[Span]:
        """When the last step's actions ran on this rank."""
        return self.executor.log.spans

    @property
    def memory_bytes(self) -> int:
        """This rank's peak: the allocator's on a device, our own count of tensors on a CPU."""
        reserved = self.device.peak_memory_bytes()
        if reserved is not None:
            return reserved
        fixed = self.storage.device_bytes + self.stage.cos.nbytes + self.stage.sin.nbytes
        return self.pace.memory_bytes(fixed + self.optimizer.device_bytes + self._meter.peak_bytes)

    def _agree(self, loss: float, stop_requested: bool) -> StepOutcome:
        """Loss, norm, memory and the wish to stop, over all ranks, added in rank order so that all have the same
        bits."""
        own = [
            loss if self._speaks_for_loss else 0.0,
            self.stepping.square_sum(),
            self.memory_bytes,
            stop_requested,
            self.pace.take_busy_seconds(),
        ]
        losses, squares, memory, stops, busy = zip(*self.world.all_gather_objects(own), strict=True)
        square_sum = ordered_sum(squares)
        norm = math.sqrt(square_sum) / self.loss_scale.value if math.isfinite(square_sum) else None
        return StepOutcome(ordered_sum(losses) / self.loss_scale.value, norm, max(memory), any(stops), busy)

    def _update(self, step: int, outcome: StepOutcome) -> None:
        """Clips and steps; an fp16 overflow skips the update on all ranks together."""
        overflow = outcome.grad_norm is None
        if overflow and self.loss_scale.is_lowest:
            raise RunFailed.everywhere(
                self.world.rank,
                f"step {step}: the gradient is not finite (loss {outcome.loss}). Lower train.lr, set train.grad_clip, or check the data; "
                "the last checkpoint is not affected.",
            )
        if outcome.grad_norm is not None:
            scale = clip_scale(outcome.grad_norm, self.train.grad_clip) / self.loss_scale.value
            self.stepping.conclude(scale)
        self.loss_scale.update(overflow=overflow)

    def _loader(self, step: int) -> Callable[[MicrobatchRange], MicrobatchInput]:
        batch = self.layout.plan.global_batch

        def load(microbatch: MicrobatchRange) -> MicrobatchInput:
            if not (self.stage.is_first or self.stage.is_last or self._document_mask):
                return MicrobatchInput(batch=microbatch.samples.size)
            return self._microbatch_input(step, batch, microbatch.samples)

        return load

    def _microbatch_input(self, step: int, global_batch: int, samples: Range) -> MicrobatchInput:
        rows = self.dataset.samples(step - 1, global_batch, samples.start, samples.stop)  # (batch, seq + 1)
        tokens = torch.from_numpy(rows).to(self.device.torch_device)
        segments = None
        if self._document_mask:
            segments = torch.from_numpy(self.dataset.documents(rows)).to(self.device.torch_device)
        return MicrobatchInput(batch=samples.size, tokens=tokens[:, :-1], targets=tokens[:, 1:], segments=segments)

    def save(self, store: CheckpointStore, step: int, *, blocking: bool) -> None:
        """Saves the state behind `step`; training may go on as soon as this returns."""
        self.stepping.flush()
        extra = {
            "step": step,
            "seed": self.train.seed,
            "tokens": self.dataset.fingerprint(),
            "loss_scale": self.loss_scale.value,
            "good_steps": self.loss_scale.good_steps,
        }
        store.save(step, self.optimizer, extra, blocking=blocking)

    def restore(self, store: CheckpointStore, path: Path) -> int:
        """Takes up the state saved at `path`; returns the step it was saved behind.

        Raises BadInput where the data or the seed are not those of the checkpoint.
        """
        extra = store.load(path, self.optimizer)
        for key, own in (("tokens", self.dataset.fingerprint()), ("seed", self.train.seed)):
            if extra[key] != own:
                raise BadInput(
                    f"{path}: the checkpoint was trained with {key} {extra[key]}, the job has {own}; the batches would not go on "
                    "where they stopped. Give the same data, train.seq_len and train.seed, or start a new run from exported weights."
                )
        self.loss_scale.value, self.loss_scale.good_steps = extra["loss_scale"], extra["good_steps"]
        return int(extra["step"])

    def metrics(self, step: int, outcome: StepOutcome, step_seconds: float, predicted: float | None) -> StepMetrics:
        """The line of metrics.jsonl for a step, with what this rank has communicated since the last one."""
        before, self._communicated = self._communicated, self.world.counters()
        tokens = self.layout.plan.global_batch * self.layout.plan.seq_len
        return StepMetrics(
            step=step,
            loss=outcome.loss if math.isfinite(outcome.loss) else None,
            tokens=tokens,
            step_seconds=step_seconds,
            time_scale=self.pace.time_scale,
            communication=since(before, self._communicated),
            predicted_step_seconds=predicted,
            tokens_per_second=tokens / step_seconds,
            grad_norm=outcome.grad_norm,
            lr=learning_rate(self.train, step),
            memory_bytes=outcome.memory_bytes,
            loss_scale=self.loss_scale.value,
        )
