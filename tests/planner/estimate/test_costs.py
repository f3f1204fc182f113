"""What guides the search, beside the predictor."""

import pytest

from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Estimator
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.spec.layout.bind import bind
from hethub.spec.plan import PlanSpec
from hethub.spec.schedule.microbatches import sizes_of
from tests.planner.problems import every_plan, kind_of, mixed


@pytest.mark.parametrize(
    ("given", "number"), [({"pp": 1}, 12), ({"pp": 2}, 12), ({"pp": 4}, 12), ({"tp": 2, "recompute": "full"}, 6)]
)
def test_unit_costs_are_the_predictors(given, number):
    problem = mixed(**given)
    plans = every_plan(problem, 12)
    assert len(plans) >= number
    for evaluation in plans:
        layout = bind(evaluation.plan, problem.model, problem.cluster)
        full, last = PlanCosts(layout, HETHUB, packaged()), layout.num_stages - 1
        costs = UnitCosts(problem)
        for s, stage in enumerate(evaluation.candidate.stages):
            for r, replica in enumerate(evaluation.plan.stages[s].replicas):
                rate = costs.rate(kind_of(problem, replica), replica.tp, replica.micro_batch, stage.recompute)
                mine, theirs = (
                    rate.microbatch(stage.layers, s == 0, s == last),
                    full.microbatch(s, r, replica.micro_batch),
                )
                assert mine.forward == pytest.approx(theirs.forward.total, rel=1e-6)
                assert mine.backward == pytest.approx(theirs.backward.total, rel=1e-6)


def is_alike(plan: PlanSpec) -> bool:
    """Whether all stages have the same replicas under 1F1B or GPipe, of equal microbatches or with microbatches in flight
    given."""
    if plan.schedule not in ("1f1b", "gpipe") or any(map(plan.runs_in_rounds, range(len(plan.stages)))):
        return False
    first, *others = {sizes_of(stage.replicas) for stage in plan.stages}
    return not others and (len(set(first)) == 1 or all(r.in_flight for stage in plan.stages for r in stage.replicas))


@pytest.mark.parametrize("stages", [2, 4])
def test_the_estimate_is_near_the_prediction(stages):
    problem = mixed(pp=stages)
    estimator = Estimator(problem)
    alike = [evaluation for evaluation in every_plan(problem) if is_alike(evaluation.plan)]
    assert len(alike) > 8
    for evaluation in alike:
        assert estimator.seconds(evaluation.candidate) == pytest.approx(evaluation.seconds, rel=0.1)
