"""Plans bound and predicted, each once."""

from dataclasses import replace

import pytest

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup
from hethub.planner.evaluate.evaluator import raised
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.predictor import predict
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import bind
from tests.planner.problems import TINY, cluster, every_plan, incumbent_of, mixed


@pytest.mark.parametrize("sizes", [(1, 4), (2, 5)])
def test_plans_with_too_few_microbatches_in_flight_are_raised_to_the_default(sizes):
    problem = pose(TINY, cluster(("amd", 2, 0.1, 4.0), ("nvidia", 2, 0.1, 4.0)), Batch(24, 64, "fp32"))
    candidate = Candidate(
        tuple(CandidateStage(3, (ReplicaGroup(device_type, 1, size, 2),)) for device_type, size in enumerate(sizes))
    )
    plan = incumbent_of(problem).consider(candidate).plan
    low = plan.replace(
        stages=tuple(
            stage.replace(replicas=tuple(replica.replace(in_flight=1) for replica in stage.replicas))
            for stage in plan.stages
        )
    )
    with pytest.raises(BadInput, match="in_flight is 1"):
        bind(low, problem.model, problem.cluster)
    held = bind(raised(low), problem.model, problem.cluster).in_flight
    assert held[1] == [1, 1]  # enough where nothing waits
    assert min(held[0]) > 1


def test_a_plan_is_evaluated_once_for_all_candidates_that_mean_it():
    problem = mixed()
    incumbent = incumbent_of(problem)
    (evaluation, *_) = [v for v in every_plan(problem) if len(v.plan.stages) == 1]
    one, other = (incumbent.consider(replace(evaluation.candidate, name=name)) for name in ("", "again"))
    assert one.plan is other.plan
    assert one.prediction is other.prediction
    assert one.candidate != other.candidate
    assert len(incumbent.tried) == 2


def test_a_plan_over_memory_is_predicted_only_where_it_is_the_closest_or_asked_for():
    problem = pose(TINY, cluster(("amd", 2, 0.05, 0.001), ("nvidia", 2, 0.1, 0.001)), Batch(16, 64, "fp32"))
    incumbent = incumbent_of(problem)
    candidates = [
        Candidate(tuple(CandidateStage(3, (ReplicaGroup(device_type, 1, size, 2),)) for device_type in range(2)))
        for size in (2, 4, 1)
    ]
    evaluations = [incumbent.consider(candidate) for candidate in candidates]
    assert incumbent.closest is evaluations[2]
    assert not incumbent.fitting
    assert [evaluation and "prediction" in vars(evaluation) for evaluation in evaluations] == [True, False, True]
    second = evaluations[1]
    assert second is not None
    assert second.fullness > 1
    reserve = problem.constraints.reserve
    assert second.prediction == predict(bind(second.plan, problem.model, problem.cluster), reserve=reserve)
