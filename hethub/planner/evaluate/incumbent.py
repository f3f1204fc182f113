"""The best plan so far: what a search has tried, what of it fits, and when its time is over."""

import time

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.evaluate.evaluator import Evaluation, Evaluator
from hethub.planner.problem.problem import Problem

STEADY = 1.05  # times the best step: up to there a plan may still have the smallest mean over the scenarios


class Incumbent:
    """The best of the candidates that were tried, each evaluated once, and the runners-up."""

    def __init__(self, problem: Problem, costs: Estimator | None = None) -> None:
        self.problem, self.costs = problem, costs or Estimator(problem)
        self.evaluator = Evaluator(problem, self.costs)
        self.tried: dict[Candidate, Evaluation | None] = {}
        self.fitting: dict[Candidate, Evaluation] = {}
        self.best: Evaluation | None = None  # the fastest plan that fits
        self.start: Evaluation | None = None  # the best before the search
        self.closest: Evaluation | None = None  # the least over memory, where none fits
        self.space_bound_seconds: float | None = None  # no plan of a space that was searched to its end is faster
        self.limit_seconds = self.problem.constraints.time_limit_seconds
        self._started, self._below = time.perf_counter(), float("inf")

    def beside(self, problem: Problem, below_seconds: float) -> "Incumbent":
        """For a search of some of the problem's machines, the first of each device type, which ends when this one's time is
        over: for plans below so many seconds, whatever is known here. Its candidates mean the same plans for both."""
        other = Incumbent(problem, self.costs)
        other._started, other._below = self._started, below_seconds
        return other

    @property
    def out_of_time(self) -> bool:
        return self.limit_seconds is not None and time.perf_counter() - self._started > self.limit_seconds

    def consider(self, candidate: Candidate) -> Evaluation | None:
        """The evaluation of a candidate, which may be the best from now on; None where it is no valid plan."""
        if candidate not in self.tried:
            self.tried[candidate] = self._noted(self.evaluator.evaluate(candidate))
        return self.tried[candidate]

    def within_time(self, candidate: Candidate) -> Evaluation | None:
        """The same, or None where time is up."""
        return None if self.out_of_time else self.consider(candidate)

    def _noted(self, found: Evaluation | None) -> Evaluation | None:
        if found is None:
            return None
        if found.fits:
            self._take(found)
        elif self.closest is None or found.fullness < self.closest.fullness:
            if not found.is_predictable:
                return None
            self.closest = found
        return found

    def _take(self, found: Evaluation) -> None:
        """Keeps a plan that fits."""
        self.fitting[found.candidate] = found
        if self.best is None or found.seconds < self.best.seconds:
            self.best = found

    @property
    def best_seconds(self) -> float:
        """The step of the fastest plan that fits, or what plans must be below; infinite where there is neither."""
        return min(self._below, self.best.seconds) if self.best else self._below

    @property
    def ranked(self) -> list[Evaluation]:
        """All plans that fit, the fastest first."""
        return sorted(self.fitting.values(), key=lambda evaluation: evaluation.seconds)

    def may_win(self, candidate: Candidate) -> bool:
        """Whether the candidate's busiest replica computes for so short a time that its plan may be the answer."""
        return self.costs.least(candidate) < STEADY * self.best_seconds

    def rank(self, evaluation: Evaluation) -> tuple[bool, float]:
        """What evaluations are compared by: those that fit first, by their step, then by how far they are over memory."""
        return (not evaluation.fits, evaluation.seconds if evaluation.fits else evaluation.fullness)

    def admit(self, other: "Incumbent") -> None:
        """Takes over what another search of the same problem tried, of one under other constraints what keeps to these."""

        def is_allowed(own: Evaluation | None) -> bool:
            return own is None or self.evaluator.is_allowed(own.candidate, own.plan)

        self.tried.update({candidate: own for candidate, own in other.tried.items() if is_allowed(own)})
        for own in filter(is_allowed, other.fitting.values()):
            self._take(own)
        closest = other.closest if is_allowed(other.closest) else None
        if closest is not None and (self.closest is None or closest.fullness < self.closest.fullness):
            self.closest = closest
