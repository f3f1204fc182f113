"""One rank of a run: with a part of the model it runs steps of the executor, the optimizer and checkpoints of its
state; without one it answers where all ranks are asked."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from hethub.communicator import World
from hethub.predictor.pipeline.timeline import Span
from hethub.runtime.checkpoint import CheckpointManager, CheckpointRecord, LoopState
from hethub.runtime.data import Dataset
from hethub.runtime.loop.batch_loader import BatchLoader
from hethub.runtime.loop.step_report import StepOutcome, StepReporter, gather_outcome, not_finite
from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.memory.host_arena import HostArena
from hethub.runtime.metrics import StepMetrics
from hethub.runtime.model.initial import initialise, load_hugging_face
from hethub.runtime.model.stage import Stage
from hethub.runtime.model.tensor_parallel import TensorGroup
from hethub.runtime.pace import Pace, StepPace
from hethub.runtime.pipeline.evaluator import Evaluator
from hethub.runtime.pipeline.executor import Executor
from hethub.runtime.state.gradient_norm import clip_scale, ordered_sum
from hethub.runtime.state.learning_rate import Schedule
from hethub.runtime.state.loss_scale import LossScale, initial_scale
from hethub.runtime.state.optimizer import Optimizer
from hethub.runtime.state.reduction import Reducer, build_groups
from hethub.runtime.state.stepping import Stepping
from hethub.runtime.state.storage import FlatStorage
from hethub.runtime.state.verify import verify_copies, verify_owners
from hethub.runtime.state.zero import ZeroManager
from hethub.spec.errors import BadInput
from hethub.spec.job import TrainSpec
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import Kind
from hethub.spec.layout.state import StateMap

VERIFY_EVERY = 100  # steps between comparisons of replicated parameters
EVALUATION = timedelta(hours=2)  # the longest


class TrainingRank:
    """What a rank does with all others: outcomes of steps, evaluations, checkpoints. Whatever needs a part of the model
    is empty here."""

    optimizer: Optimizer | None = None
    reducer: Reducer | None = None

    def __init__(
        self, layout: Layout, world: World, dataset: Dataset, train: TrainSpec, *, pace: Pace | None = None
    ) -> None:
        self.layout, self.world, self.dataset, self.train = layout, world, dataset, train
        self.pace = pace or Pace()
        self.step_pace: StepPace | None = None  # of the last step of an emulation
        self.schedule = Schedule(train)
        self._tokens = layout.plan.global_batch * layout.plan.seq_len
        self.loss_scale = LossScale(layout.plan.precision, initial=initial_scale(self._tokens))
        self.warnings: list[str] = []  # of what was restored
        self.updates = 0  # steps taken; fewer than steps trained where fp16 skipped some
        self._checkpoints: CheckpointManager | None = None  # that was asked to save last
        self._state = StateMap(layout)
        verify_owners(world, self._state)
        self._reporter = StepReporter(world)
        self._group_of = build_groups(world, self._state)

    # -- what a rank with a part of the model fills in -----------------------------------------------------------------

    def initialise(self) -> None:
        """Fills the weights from the job's seed."""

    def load_hugging_face(self, folder: Path) -> None:
        """Fills the weights from a folder of Hugging Face."""

    @property
    def spans(self) -> Iterable[Span]:
        """When the last step's actions ran on this rank; told once, and waited for then."""
        return ()

    @property
    def memory_bytes(self) -> int:
        """This rank's peak: the allocator's on a device, our own count of tensors on a CPU."""
        return 0

    def _compute(self, step: int) -> Tensor | float:
        """Runs the step's microbatches; the scaled loss, 0-d, where this rank speaks for it."""
        return 0.0

    def _square_sum(self) -> Tensor | float:
        """Return the sum of squares of the gradients that this rank counts in the norm, 0-d."""
        return 0.0

    def _conclude(self, scale: float) -> None:
        """Updates the parameters that are left, their gradients times `scale`."""

    def _gather(self) -> None:
        """Begins to send new weights to where they are needed."""

    def _held_out_loss(self, held_out: Dataset, batches: int) -> float:
        """The summed loss of batches that are not trained on, where this rank speaks for it."""
        return 0.0

    def _timed(self) -> AbstractContextManager[None]:
        """Context that times what follows the microbatches."""
        return nullcontext()

    # -- what all do ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Completes what goes on beside the next step."""

    def run_step(self, step: int, *, stop_requested: Callable[[], bool] = lambda: False) -> StepOutcome:
        """Trains step `step` (counted from 1) and returns what all ranks agree on.

        `stop_requested` is asked when the microbatches are done: a signal that comes during a step counts for that
        step.

        Raises RunFailed where the gradient is not finite, or copies of a parameter differ.
        """
        self.pace.start_step()
        loss = self._compute(step)
        with self._timed():
            square_sum = self._square_sum()  # begun before the loss is waited for
            outcome = gather_outcome(
                self.world,
                loss=float(loss),
                stop_requested=stop_requested(),
                save_failed=self._checkpoints is not None and self._checkpoints.has_failed,
                square_sum=float(square_sum),
                memory_bytes=self.memory_bytes,
                busy_seconds=self.pace.take_busy_seconds(),
                loss_scale=self.loss_scale.value,
            )
            self._update(step, outcome)
        if outcome.grad_norm is not None:
            self._gather()
        if step % VERIFY_EVERY == 0:
            self.flush()
            verify_copies(self.world, self.reducer, step)
        self.step_pace = self.pace.end_step()
        return outcome

    def evaluate(self, held_out: Dataset, batches: int) -> float:
        """The mean loss over the tokens of the first `batches` batches of held-out samples, on all ranks; nothing that
        is trained changes."""
        self.flush()
        # A rank without a part of the model is here at once, and waits for all batches of the others.
        losses = self.world.all_gather_objects(self._held_out_loss(held_out, batches), EVALUATION)
        global_batch = self.layout.plan.global_batch
        valid_tokens = sum(held_out.valid_tokens(number, global_batch) for number in range(batches))
        return ordered_sum(losses) / max(1, valid_tokens)

    def _update(self, step: int, outcome: StepOutcome) -> None:
        """Clips and steps; after an fp16 overflow all ranks skip the update."""
        overflow = outcome.grad_norm is None
        if overflow and self.loss_scale.is_lowest:
            raise not_finite(self.world.rank, step, outcome)
        if outcome.grad_norm is not None:
            self._conclude(clip_scale(outcome.grad_norm, self.train.grad_clip) / self.loss_scale.value)
            self.updates += 1
        self.loss_scale.update(overflow=overflow)

    def metrics(self, step: int, outcome: StepOutcome, step_seconds: float, predicted: float | None) -> StepMetrics:
        """The line of metrics.jsonl for a step."""
        return self._reporter.metrics(
            step,
            outcome,
            tokens=self._tokens,
            step_seconds=step_seconds,
            predicted_step_seconds=predicted,
            lr=self.schedule.rate(step),
            loss_scale=self.loss_scale.value,
            time_scale=self.pace.time_scale,
        )

    def save(self, checkpoints: CheckpointManager, step: int, *, blocking: bool) -> None:
        """Saves the state behind `step`; training may go on as soon as this returns."""
        self.flush()
        self._checkpoints = checkpoints
        extra = LoopState(
            step=step,
            seed=self.train.seed,
            tokens=self.dataset.fingerprint,
            loss_scale=self.loss_scale.value,
            good_steps=self.loss_scale.good_steps,
            schedule=self.schedule.state,
            samples=self.dataset.position(step, self.layout.plan.global_batch),
            sources=self.dataset.fingerprints,
        )
        precision, model = self.layout.plan.precision, self.layout.model
        record = CheckpointRecord(
            step=step, updates=self.updates, precision=precision, model=model, extra=extra,
            tokenizer=self.dataset.tokenizer, end_of_document=self.dataset.end_of_document,
        )  # fmt: skip
        checkpoints.save(record, self.optimizer, blocking=blocking)

    def restore(self, checkpoints: CheckpointManager, path: Path) -> int:
        """Takes up the state saved at `path`; returns the step it was saved behind.

        Raises BadInput where the data or the seed are not those of the checkpoint.
        """
        record = checkpoints.load(path, self.layout, self.optimizer)
        extra, self.updates = record.extra, record.updates
        if not self.dataset.is_of(extra.tokens):
            raise BadInput(
                _other(f"tokens of {self.dataset.changed(extra.sources)}", extra.tokens, self.dataset.fingerprint, path)
            )
        if extra.seed != self.train.seed:
            raise BadInput(_other("seed", extra.seed, self.train.seed, path))
        if extra.tokens != self.dataset.fingerprint and not self.dataset.predicts_all:
            self.warnings.append(
                "the checkpoint is of an earlier hethub, whose data.document_mask cut a conversation wherever a turn of it ends with the "
                "end of document; from here on conversations are kept whole"
            )
        if extra.schedule is not None:
            self.schedule.resume(extra.schedule, extra.step)
        if extra.samples is not None:
            self.dataset.resume(extra.step, extra.samples)
        self.loss_scale.value, self.loss_scale.good_steps = extra.loss_scale, extra.good_steps
        return extra.step


def _other(key: str, saved: object, own: object, path: Path) -> str:
    return (
        f"{path}: the checkpoint was trained with {key} {saved}, the job has {own}; the batches would not go on where they stopped. "
        "Give the same data, tokenizer with what lies beside it, train.seq_len and train.seed (and `--set data.bos=false "
        "--accept-changes` where an earlier hethub began the run), or start a new run from exported weights."
    )


class Trainer(TrainingRank):
    """A rank that the plan gives a part of the model and its optimizer."""

    optimizer: Optimizer
    reducer: Reducer

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
        super().__init__(layout, world, dataset, train, pace=pace)
        assignment, state, group_of = layout.assignment_of[world.rank], self._state, self._group_of
        self._assignment, self._document_mask = assignment, document_mask
        replica = layout.replica(assignment.stage, assignment.replica)
        self.arena = HostArena(world.device, self.pace)
        self.storage = FlatStorage(state, assignment, layout.plan.precision, world.device.torch_device, self.arena)
        tensor_group = TensorGroup(group_of(replica.ranks) if replica.tp > 1 else None, self.pace)
        self.stage = Stage(layout, assignment, self.storage, tensor_group)
        self._batches = BatchLoader(dataset, self.stage, document_mask=document_mask)
        self.reducer = Reducer(state, self.storage, group_of, replica.ranks)
        self._meter = MemoryMeter([self.storage.weights, self.storage.grads, self.stage.cos, self.stage.sin])
        self.optimizer = Optimizer(self.storage, self.reducer, train, self.arena, self._meter)
        self.schedule = self.optimizer.schedule
        self.stepping = Stepping(
            self.optimizer,
            self.reducer,
            self.pace,
            per_chunk=layout.plan.steps_chunk_by_chunk,
            waits_for_norm=train.grad_clip is not None or layout.plan.precision == "fp16",
        )
        self.zero_manager = ZeroManager(self.reducer, self._meter, self.stepping, self.arena)
        self.executor = Executor(layout, assignment, world, self.stage, self.zero_manager, self.pace)
        self._speaks_for_loss = self.stage.is_last and assignment.position == 0

    def initialise(self) -> None:
        initialise(self.storage, self.layout.model, self.train.seed)
        self.optimizer.reload_masters()

    def load_hugging_face(self, folder: Path) -> None:
        weights = load_hugging_face(self.storage, self.layout.model, folder)
        self.optimizer.reload_masters(weights.read)  # a half precision has rounded what the weights hold of them

    def _compute(self, step: int) -> Tensor | float:
        self.stepping.begin(step)
        valid_tokens = self.dataset.valid_tokens(step - 1, self.layout.plan.global_batch)
        # A device's allocator knows its peak.
        with nullcontext() if self.world.device.is_gpu else self._meter.counting_step():
            loss = self.executor.run_step(
                partial(self._batches.load, step), self.loss_scale.value / max(1, valid_tokens)
            )
        return loss if self._speaks_for_loss else 0.0

    def _square_sum(self) -> Tensor:
        return self.stepping.square_sum()

    def _conclude(self, scale: float) -> None:
        self.stepping.conclude(scale)

    def _gather(self) -> None:
        with self.executor.timed(Kind.GATHER):
            self.stepping.gather()

    def flush(self) -> None:
        self.stepping.flush()

    def _timed(self) -> AbstractContextManager[None]:
        return self.executor.timed(Kind.STEP)

    @cached_property
    def _evaluator(self) -> Evaluator:
        """Made by all ranks together, which connect for it."""
        manager = ZeroManager(self.reducer, self._meter, trains=False)
        return Evaluator(self.layout, self._assignment, self.world, self.stage, manager, Pace())

    def _held_out_loss(self, held_out: Dataset, batches: int) -> float:
        batch_of = BatchLoader(held_out, self.stage, document_mask=self._document_mask)
        own = sum(self._evaluator.run(partial(batch_of.load, number + 1)) for number in range(batches))
        return own if self._speaks_for_loss else 0.0

    @property
    def spans(self) -> Iterable[Span]:
        return self.executor.log.spans

    @property
    def memory_bytes(self) -> int:
        reserved = self.world.device.peak_memory_bytes()
        if reserved is not None:
            return reserved
        fixed = self.storage.device_bytes + self.stage.cos.nbytes + self.stage.sin.nbytes
        return self.pace.memory_bytes(fixed + self.optimizer.device_bytes + self._meter.peak_bytes)
