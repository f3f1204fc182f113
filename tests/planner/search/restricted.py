"""`auto` inside the grid: a search that may answer with nothing but a point of it."""

from unittest.mock import patch

from hethub.planner.candidate.candidate import Candidate, Pattern
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.evaluate.evaluator import Evaluation, Evaluator
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.planner.search import auto, neighbours
from hethub.planner.search.effort import effort_for
from hethub.spec.job import ConstraintsSpec
from hethub.spec.plan import PlanSpec
from tests.oracle.question import Question, random_question
from tests.oracle.stage_grid import MICRO_BATCHES, RECOMPUTES, ZEROS


def problem_of(question: Question) -> Problem:
    """The oracle's question as the planner's."""
    batch = Batch(question.global_batch, question.seq_len, question.precision)
    given = ConstraintsSpec(schedule="1f1b", max_micro_batch=MICRO_BATCHES[-1], reserve=question.reserve)
    return pose(question.model, question.cluster, batch, given)


def grid_problem(seed: int, size: int) -> Problem:
    """A random cluster's question."""
    return problem_of(random_question(seed, size))


class GridEstimator(Estimator):
    """Estimates that lead a search nowhere but into the grid."""

    def is_possible(self, candidate: Candidate) -> bool:
        groups = [own for stage in candidate.stages for own in stage.groups]
        usual = not candidate.extra_in_flight and candidate.pattern == Pattern("1f1b")
        inside = usual and all(own.micro_batch in MICRO_BATCHES and own.tp <= 2 for own in groups)
        inside = inside and not any(stage.offload for stage in candidate.stages)
        return inside and super().is_possible(candidate)


class GridEvaluator(Evaluator):
    """Evaluates plans of the grid and no others."""

    def evaluate(self, candidate: Candidate) -> Evaluation | None:
        found = super().evaluate(candidate)
        return found if found is not None and is_in_grid(found.plan) else None


def grid_incumbent(problem: Problem) -> Incumbent:
    """Nothing tried yet, and nothing but the grid to try."""
    incumbent = Incumbent(problem, GridEstimator(problem))
    incumbent.evaluator = GridEvaluator(problem, incumbent.costs)
    return incumbent


def restricted(problem: Problem) -> Evaluation:
    """The answer of `auto`, restricted to the grid, which leaves microbatches of unlike sizes no room in flight: what the
    search gives room stays as it is, or it would be no point."""
    with patch.object(neighbours, "with_room", _as_it_is), patch.object(auto, "with_room", _as_it_is):
        found = auto.search(grid_incumbent(problem), effort_for(problem))
    assert found is not None, "no plan fits"
    return found


def _as_it_is(candidate: Candidate) -> Candidate:
    return candidate


def unrestricted(problem: Problem) -> Evaluation:
    """The same with what the grid has not: microbatches in flight, offload, larger degrees."""
    found = auto.search(Incumbent(problem), effort_for(problem))
    assert found is not None, "no plan fits"
    return found


def is_in_grid(plan: PlanSpec) -> bool:
    """Whether a plan is a point of the grid."""
    stages, replicas = plan.stages, [replica for stage in plan.stages for replica in stage.replicas]
    return (
        plan.schedule == "1f1b"
        and all(len(s.layers) == 1 and not s.offload and not s.state_shares for s in stages)
        and all(s.zero in ZEROS and s.recompute in RECOMPUTES for s in stages)
        and all(r.tp <= 2 and r.tensor_shares is None and r.in_flight is None for r in replicas)
        and all(r.micro_batch in MICRO_BATCHES or r.micro_batch == r.samples < MICRO_BATCHES[-1] for r in replicas)
    )
