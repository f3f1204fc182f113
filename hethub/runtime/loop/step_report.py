"""What a step reports: the outcome that all ranks agree on, and its line of metrics."""

import math
from dataclasses import dataclass

from hethub.communicator import World
from hethub.communicator.counters import since
from hethub.runtime.metrics import StepMetrics
from hethub.runtime.state.gradient_norm import global_norm, ordered_sum
from hethub.spec.errors import RunFailed


@dataclass(frozen=True)
class StepOutcome:
    """What all ranks know after a step."""

    loss: float
    grad_norm: float | None  # None where fp16 overflowed
    memory_bytes: int  # of the rank with the most
    stop_requested: bool
    save_failed: bool  # any rank's last checkpoint
    # By rank, what it computed by kind of action, the last update in place of this step's; None where nobody looked.
    busy_seconds: tuple[dict[str, float] | None, ...]


def gather_outcome(
    world: World,
    *,
    loss: float,
    square_sum: float,
    memory_bytes: int,
    stop_requested: bool,
    save_failed: bool = False,
    busy_seconds: dict[str, float] | None,
    loss_scale: float,
) -> StepOutcome:
    """The outcome over all ranks, from what each knows; sums in rank order, so that all have the same bits.

    Loss (0.0 on ranks that do not speak for it) and squares of gradients come multiplied by `loss_scale`.
    """
    own = [loss, square_sum, memory_bytes, stop_requested, save_failed, busy_seconds]
    losses, squares, memory, stops, failed, busy = zip(*world.all_gather_objects(own), strict=True)
    return StepOutcome(
        ordered_sum(losses) / loss_scale, global_norm(squares, loss_scale), max(memory), any(stops), any(failed), busy
    )


def not_finite(rank: int, step: int, outcome: StepOutcome) -> RunFailed:
    """What this rank raises, as all do, where a step's gradient is of no use."""
    return RunFailed.everywhere(
        rank,
        f"step {step}: the gradient is not finite (loss {outcome.loss}). Lower train.lr, set train.grad_clip, or check the data; "
        "the last checkpoint is not affected.",
    )


class StepReporter:
    """Makes the lines of metrics.jsonl; it remembers what was communicated before, so that a line has its step's."""

    def __init__(self, world: World) -> None:
        self._world, self._communicated = world, world.counters()

    def metrics(
        self,
        step: int,
        outcome: StepOutcome,
        *,
        tokens: int,
        step_seconds: float,
        predicted_step_seconds: float | None,
        lr: float,
        loss_scale: float = 1.0,
        time_scale: float | None = None,
    ) -> StepMetrics:
        """The line of a step over so many tokens, or samples, with what this rank has communicated since the last line."""
        before, self._communicated = self._communicated, self._world.counters()
        return StepMetrics(
            step=step,
            loss=outcome.loss if math.isfinite(outcome.loss) else None,
            tokens=tokens,
            step_seconds=step_seconds,
            time_scale=time_scale,
            communication=since(before, self._communicated),
            predicted_step_seconds=predicted_step_seconds,
            tokens_per_second=tokens / step_seconds,
            grad_norm=outcome.grad_norm,
            lr=lr,
            memory_bytes=outcome.memory_bytes,
            loss_scale=loss_scale,
        )
