"""The state of a search: the candidates it has tried, those that fit, the best plan so far, and its time limit."""

import time

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.evaluate.evaluator import Evaluation, Evaluator
from hethub.planner.problem.problem import Problem

STEADY = 1.05  # a plan up to this many times slower than the best may still have the smallest mean over the scenarios


class Incumbent:
    """The best of the candidates that were tried, each evaluated once, and the runners-up."""

    def __init__(self, problem: Problem, costs: Estimator | None = None) -> None:
        self.problem, self.costs = problem, costs or Estimator(problem)
        self.evaluator = Evaluator(problem, self.costs)
        self.tried: dict[Candidate, Evaluation | None] = {}
        self.fitting: dict[Candidate, Evaluation] = {}
        self.best: Evaluation | None = None  # the fastest plan that fits
        self.closest: Evaluation | None = None  # where none fits, the plan that exceeds memory the least
        self.space_bound_seconds: float | None = None  # no plan of a space that was searched to its end is faster
        self.limit_seconds = self.problem.constraints.time_limit_seconds
        self._started, self._below = time.perf_counter(), float("inf")

    def beside(self, problem: Problem, below_seconds: float) -> "Incumbent":
        """Return an incumbent for a search of a part of the machines (the first ones of each device type). It shares this one's
        time limit and looks for plans below `below_seconds`. A candidate means the same plan for both."""
        other = Incumbent(problem, self.costs)
        other._started, other._below = self._started, below_seconds
        return other

    @property
    def out_of_time(self) -> bool:
        return self.limit_seconds is not None and time.perf_counter() - self._started > self.limit_seconds

    def consider(self, candidate: Candidate) -> Evaluation | None:
        """Evaluate a candidate and remember it, perhaps as the best. Return its evaluation, or None where it is no valid plan."""
        if candidate not in self.tried:
            self.tried[candidate] = self._noted(self.evaluator.evaluate(candidate))
        return self.tried[candidate]

    def within_time(self, candidate: Candidate) -> Evaluation | None:
        """Do what `consider` does, or return None where the time is up."""
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
        """Remember a plan that fits."""
        self.fitting[found.candidate] = found
        if self.best is None or found.seconds < self.best.seconds:
            self.best = found

    @property
    def best_seconds(self) -> float:
        """The seconds that a better plan must stay below: the fastest fitting plan's step, or the limit of this search; infinite
        where there is neither."""
        return min(self._below, self.best.seconds) if self.best else self._below

    @property
    def ranked(self) -> list[Evaluation]:
        """All plans that fit, the fastest first."""
        return sorted(self.fitting.values(), key=lambda evaluation: evaluation.seconds)

    def may_win(self, candidate: Candidate) -> bool:
        """Whether the candidate's plan may be the answer, judged by the time that its busiest replica computes at least."""
        return self.costs.least(candidate) < STEADY * self.best_seconds

    def rank(self, evaluation: Evaluation) -> tuple[bool, float]:
        """The key by which evaluations are compared: plans that fit first, by their step; the others by how far they exceed memory."""
        return (not evaluation.fits, evaluation.seconds if evaluation.fits else evaluation.fullness)

    def admit(self, other: "Incumbent") -> None:
        """Take over what another search of the same problem tried. Where it had other constraints, only plans that satisfy these."""

        def is_allowed(own: Evaluation | None) -> bool:
            return own is None or self.evaluator.is_allowed(own.candidate, own.plan)

        self.tried.update({candidate: own for candidate, own in other.tried.items() if is_allowed(own)})
        for own in filter(is_allowed, other.fitting.values()):
            self._take(own)
        closest = other.closest if is_allowed(other.closest) else None
        if closest is not None and (self.closest is None or closest.fullness < self.closest.fullness):
            self.closest = closest
