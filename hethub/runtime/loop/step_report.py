"""What a step reports: the outcome that all ranks agree on, and its line of metrics."""

import math
from dataclasses import dataclass

from hethub.communicator import World
from hethub.communicator.counters import since
from hethub.runtime.metrics import StepMetrics
from hethub.runtime.state.gradient_norm import global_norm, ordered_sum
from hethub.spec.layout.bind import Layout


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


class StepReporter:
    """Makes the lines of metrics.jsonl; it remembers what was communicated before, so that a line has its step's."""

    def __init__(self, world: World, layout: Layout) -> None:
        self._world = world
        self._tokens = layout.plan.global_batch * layout.plan.seq_len
        self._communicated = world.counters()

    def metrics(
        self,
        step: int,
        outcome: StepOutcome,
        *,
        step_seconds: float,
        predicted_step_seconds: float | None,
        lr: float,
        loss_scale: float,
        time_scale: float | None,
    ) -> StepMetrics:
        """The line of a step, with what this rank has communicated since the last line."""
        before, self._communicated = self._communicated, self._world.counters()
        return StepMetrics(
            step=step,
            loss=outcome.loss if math.isfinite(outcome.loss) else None,
            tokens=self._tokens,
            step_seconds=step_seconds,
            time_scale=time_scale,
            communication=since(before, self._communicated),
            predicted_step_seconds=predicted_step_seconds,
            tokens_per_second=self._tokens / step_seconds,
            grad_norm=outcome.grad_norm,
            lr=lr,
            memory_bytes=outcome.memory_bytes,
            loss_scale=loss_scale,
        )
