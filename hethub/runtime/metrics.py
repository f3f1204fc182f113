"""What is kept of a step."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

_MOST_EXPONENT = 709.0  # of e, in a float


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    loss: float | None  # None where fp16 overflowed in the forward
    tokens: int  # or samples, of a module that brings batches of its own
    step_seconds: float
    predicted_step_seconds: float | None
    tokens_per_second: float
    grad_norm: float | None  # None where the step was skipped for an overflow of fp16
    lr: float
    memory_bytes: int  # of the rank with the most
    loss_scale: float = 1.0
    communication: dict[str, Any] | None = None  # of rank 0 in this step: operations with their legs, and links
    time_scale: float | None = None  # of an emulation: `step_seconds` are emulated, real seconds divided by this
    eval_loss: float | None = None  # on held-out samples, where they were looked at behind this step
    eval_perplexity: float | None = None
    # Model FLOPs over what the accelerators' dense peaks would do in the step; percent. None where it is not predicted.
    mfu: float | None = None

    def with_evaluation(self, loss: float) -> "StepMetrics":
        """Return these metrics with the loss and perplexity on held-out samples, if they are finite."""
        if not math.isfinite(loss):
            return self
        value = perplexity(loss)
        return replace(self, eval_loss=loss, eval_perplexity=value if math.isfinite(value) else None)

    def to_dict(self) -> dict[str, Any]:
        """Return the line of metrics.jsonl as a dictionary, without the keys of an evaluation where there was none."""
        return {key: value for key, value in asdict(self).items() if value is not None or not key.startswith("eval_")}


def perplexity(loss: float) -> float:
    """How many tokens a model with this mean loss chooses among, as it were."""
    return math.exp(loss) if loss < _MOST_EXPONENT else math.inf
