"""`auto` against the optimum of a stated grid on small random clusters; benchmarks/planner.py compares 200."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest

from tests.oracle.grid import Outcome, exhaustive
from tests.oracle.question import random_question
from tests.planner.search.restricted import problem_of, restricted, unrestricted


class Comparison(NamedTuple):
    """`auto`, restricted to the grid and not, beside the grid's optimum."""

    auto_seconds: float
    free_seconds: float
    outcome: Outcome

    @property
    def slower(self) -> float:
        """Auto's step over the optimum's."""
        return self.auto_seconds / self.outcome.seconds

    @property
    def slower_free(self) -> float:
        """The same where auto may answer with what is no point of the grid."""
        return self.free_seconds / self.outcome.seconds


@cache
def compare(seed: int, size: int, global_batch: int = 6, layers: int = 6) -> Comparison:
    """Auto against the whole grid of a random cluster."""
    question = random_question(seed, size, global_batch)
    question = replace(question, model=question.model.replace(layers=layers))
    problem = problem_of(question)
    auto = restricted(problem).seconds
    return Comparison(auto, unrestricted(problem).seconds, exhaustive(question, start=auto))


# One's optimum divides its state among unlike replicas, since what was thought to fit does not; the other's takes up an
# accelerator that was left unused (9.5 %).
FEW = (*range(12), 30128, 64138)
WORST = 1.02  # times the optimum, as is asked
LARGER = [pytest.param(seed, 4, marks=pytest.mark.slow) for seed in range(4)]


@pytest.mark.parametrize(("seed", "size"), [*((seed, 3) for seed in FEW), *LARGER])
def test_auto_is_near_the_grids_optimum(seed: int, size: int) -> None:
    found = compare(seed, size)
    assert found.slower <= WORST
    assert found.slower_free <= WORST
    assert found.outcome.lower_bound == found.outcome.seconds  # nothing was left out unproved
