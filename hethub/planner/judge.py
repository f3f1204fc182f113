"""The judge: every plan the search considers is bound and predicted here, each once, with full cost."""

import time
from typing import NamedTuple

from hethub.planner.costs import UnitCosts
from hethub.planner.draft import Draft, complete
from hethub.planner.problem import Problem
from hethub.predictor import Prediction, predict
from hethub.spec.errors import BadInput
from hethub.spec.layout import bind
from hethub.spec.plan import PlanSpec


class Verdict(NamedTuple):
    """A plan with its prediction and the draft it came from."""

    draft: Draft
    plan: PlanSpec
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds

    @property
    def over_bytes(self) -> int:
        """Bytes over the limit, over all ranks, before any reserve; what the search drives to zero where nothing fits."""
        return sum(max(0, entry.bytes - entry.limit) for entry in self.prediction.memory)


class Judge:
    """Binds and predicts drafts. Counts what it judged, keeps the best that fit, and watches the time limit."""

    def __init__(self, problem: Problem, costs: UnitCosts, *, ignore_memory: bool = False) -> None:
        self.problem, self.costs, self.ignore_memory = problem, costs, ignore_memory
        self.started = time.perf_counter()
        self.limit_seconds = problem.constraints.time_limit_seconds
        self._known: dict[Draft, Verdict | None] = {}
        self.fitting: dict[Draft, Verdict] = {}
        self.closest: Verdict | None = None  # the least over memory, where none fits

    @property
    def candidates(self) -> int:
        """How many drafts were judged."""
        return len(self._known)

    @property
    def out_of_time(self) -> bool:
        return self.limit_seconds is not None and time.perf_counter() - self.started > self.limit_seconds

    def __call__(self, draft: Draft) -> Verdict | None:
        """The verdict on a draft, or None where it is no valid plan."""
        if draft not in self._known:
            verdict = self._known[draft] = self._judge(draft)
            if verdict is not None:
                self._note(verdict)
        return self._known[draft]

    def _judge(self, draft: Draft) -> Verdict | None:
        plan = complete(draft, self.problem, self.costs)
        if plan is None:
            return None
        try:
            layout = bind(plan, self.problem.model, self.problem.cluster)
        except BadInput:  # too few tiles in flight, or heads that do not divide: no plan
            return None
        return Verdict(draft, plan, predict(layout, reserve=self.problem.constraints.reserve))

    def _note(self, verdict: Verdict) -> None:
        if verdict.prediction.fits or self.ignore_memory:
            self.fitting[verdict.draft] = verdict
        elif self.closest is None or _excess(verdict) < _excess(self.closest):
            self.closest = verdict

    def better(self, one: Verdict | None, other: Verdict | None) -> bool:
        """Whether `one` is to be preferred: it fits and the other does not, or it is faster, or less over memory."""
        if one is None or other is None:
            return one is not None
        return self._rank(one) < self._rank(other)

    def _rank(self, verdict: Verdict) -> tuple[bool, float]:
        fits = verdict.prediction.fits or self.ignore_memory
        return (not fits, verdict.seconds if fits else float(_excess(verdict)))

    @property
    def best(self) -> Verdict | None:
        """The fastest plan that fits."""
        return min(self.fitting.values(), key=lambda verdict: verdict.seconds, default=None)


def _excess(verdict: Verdict) -> float:
    """How far the fullest rank is beyond its memory, as a fraction of it."""
    return max(entry.bytes / entry.limit for entry in verdict.prediction.memory)
