"""Plans bound and predicted, each once."""

from dataclasses import replace

import pytest

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup
from hethub.planner.evaluate.evaluator import keeps
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.predictor import predict
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from tests.planner.problems import TINY, cluster, every_plan, incumbent_of, mixed


def test_a_plan_is_evaluated_once_for_all_candidates_that_mean_it():
    problem = mixed()
    incumbent = incumbent_of(problem)
    (evaluation, *_) = [v for v in every_plan(problem) if len(v.plan.stages) == 1]
    one, other = (incumbent.consider(replace(evaluation.candidate, plan=plan)) for plan in (None, evaluation.plan))
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


@pytest.mark.parametrize(
    ("kept", "broken"),
    [
        ({"schedule": "1f1b"}, {"schedule": "gpipe"}),
        ({"tp": 1}, {"tp": 2}),
        ({"pp": 2}, {"pp": 1}),
        ({"micro_batch": 2}, {"micro_batch": 1}),
        ({"max_micro_batch": 2}, {"max_micro_batch": 1}),
        ({"recompute": "full"}, {"recompute": "none"}),
        ({"zero": 3}, {"zero": 0}),  # of the one stage that has something to shard
        ({}, {"dp": 2}),  # the other stage has one replica
    ],
)
def test_a_plan_keeps_to_constraints_or_does_not(kept: dict[str, object], broken: dict[str, object]) -> None:
    two, one = (
        CandidateStage(3, (ReplicaGroup(device_type, 1, 2, 2 - device_type),), recompute="full", zero=3)
        for device_type in range(2)
    )
    found = incumbent_of(mixed()).consider(Candidate((two, one)))
    assert found is not None
    assert [stage.zero for stage in found.plan.stages] == [3, 0]
    assert keeps(found.plan, ConstraintsSpec.model_validate(kept))
    assert not keeps(found.plan, ConstraintsSpec.model_validate(broken))


def test_of_equal_replicas_one_is_replayed_and_of_unlike_ones_all() -> None:
    """2,400 microbatches: 600 of one, which are always replayed, or all, which a search may have no time left for."""
    for speed, replayed in ((0.1, True), (0.2, False)):
        on = cluster(("amd", 2, 0.1, 4.0), ("amd", 2, speed, 4.0))
        problem = pose(TINY, on, Batch(2400, 64, "fp32"))
        incumbent = incumbent_of(problem)
        sorts = [(0, 4)] if replayed else [(0, 2), (1, 2)]
        eight, one = (
            Candidate((CandidateStage(6, tuple(ReplicaGroup(own, 1, size, number) for own, number in sorts)),))
            for size in (8, 1)
        )
        assert incumbent_of(problem).consider(one) is not None  # where nothing is known that fits
        known = incumbent.consider(eight)
        assert known is not None
        assert known.fits
        incumbent.evaluator.microbatches_left = 0
        assert (incumbent.consider(one) is not None) == replayed
