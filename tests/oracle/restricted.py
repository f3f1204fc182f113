"""`auto` inside the grid: a search that may answer with nothing but a point of it."""

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.evaluate.evaluation import Evaluation
from hethub.planner.evaluate.evaluator import Evaluator
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.plan import find
from hethub.planner.problem.problem import Problem
from hethub.spec.plan import PlanSpec
from tests.oracle.stage_grid import MICRO_BATCHES, RECOMPUTES, ZEROS


class GridEstimator(Estimator):
    """Estimates that lead a search nowhere but into the grid."""

    def is_possible(self, candidate: Candidate) -> bool:
        groups = [own for stage in candidate.stages for own in stage.groups]
        usual = not candidate.roomy and candidate.schedule is None
        usual = usual and all(stage.state_shares == () for stage in candidate.stages)
        inside = usual and all(own.micro_batch in MICRO_BATCHES and own.tp <= 2 for own in groups)
        return inside and super().is_possible(candidate)


class GridEvaluator(Evaluator):
    """Evaluates plans of the grid and no others."""

    def evaluate(self, candidate: Candidate) -> Evaluation | None:
        found = super().evaluate(candidate)
        return found if found is not None and is_in_grid(found.plan) else None


def grid_incumbent(problem: Problem) -> Incumbent:
    """Nothing tried yet, and nothing but the grid to try."""
    return Incumbent(GridEvaluator(problem, GridEstimator(problem)))


def restricted(problem: Problem) -> Evaluation:
    """The answer of `auto`, restricted to the grid."""
    found = find(problem, grid_incumbent(problem), "auto")
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
