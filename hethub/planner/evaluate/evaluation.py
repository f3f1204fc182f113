"""What is known of a candidate that was bound and predicted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from hethub.planner.candidate.candidate import Candidate
from hethub.predictor import Prediction, RankMemory
from hethub.spec.errors import BadInput
from hethub.spec.plan import PlanSpec


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A plan with the candidate it came from, its ranks' memory and whether they fit, and its prediction."""

    candidate: Candidate
    plan: PlanSpec
    memory: tuple[RankMemory, ...]
    fits: bool
    predicted: Callable[[], Prediction]

    @cached_property
    def fullness(self) -> float:
        """How much the fullest rank needs, as a fraction of its memory."""
        return max([entry.bytes / entry.limit for entry in self.memory])

    @cached_property
    def prediction(self) -> Prediction:
        """Made when first asked for: of most plans that do not fit nobody asks for it."""
        return self.predicted()

    @property
    def is_predictable(self) -> bool:
        """Whether there is a prediction: too few microbatches in flight, or a link without a speed, leave none."""
        try:
            _ = self.prediction
        except BadInput:
            return False
        return True

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds

    def of(self, candidate: Candidate) -> "Evaluation":
        """The same of another candidate that means the same plan."""
        return replace(self, candidate=candidate, predicted=partial(getattr, self, "prediction"))
