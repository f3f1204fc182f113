"""Plans chosen by their mean step over the scenarios, not by the step that is predicted."""

import pytest

from hethub.planner import plan
from hethub.planner.evaluate.outlook import SCENARIOS, Outlooks, _quantiles, errors_of
from hethub.planner.plan import answer
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.planner.problem.scaled import Scale, scaled
from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import bind
from hethub.spec.plan import ReplicaSpec, StageSpec
from tests.oracle.question import MODEL
from tests.planner.problems import MIXED, TINY, mixed


def test_every_figure_takes_sixteen_equally_likely_values_once() -> None:
    for name in ("links", "overlap", "a device type"):
        assert sorted(_quantiles(name)) == [(index + 0.5) / SCENARIOS for index in range(SCENARIOS)]
    assert _quantiles("links") != _quantiles("overlap")


def test_an_outlook_is_the_predictors_steps_on_other_clusters() -> None:
    problem = mixed()
    found = answer(problem).plan
    outlook = Outlooks(problem).of(found)
    slow = scaled(problem.cluster, Scale(in_node=0.6, network=0.6, bridge=0.6))
    seconds = predict(bind(found, problem.model, slow)).step_seconds
    assert outlook.links_at_60_percent_seconds == pytest.approx(seconds, rel=1e-12)
    assert outlook.p10_seconds <= outlook.objective_seconds <= outlook.p90_seconds


def test_unfitted_device_types_may_be_off_by_more() -> None:
    cluster = {"name": "two", "nodes": [
        {"name": "a", "accelerator": "A100-SXM4-80GB", "accelerators": 2, "nics": 1, "gbps_per_nic": 100},
        {"name": "b", "accelerator": "MI300X", "accelerators": 2, "nics": 1, "gbps_per_nic": 100},
    ]}  # fmt: skip
    problem = pose(TINY, ClusterSpec.model_validate(cluster), Batch(16, 64, "bf16"))
    compute = errors_of(problem).compute
    assert 0 < compute["A100-SXM4-80GB"] < compute["MI300X"]


def test_the_answer_has_the_smallest_mean_of_all_that_were_compared() -> None:
    for size in (4, 16, 48):
        found = plan(TINY, MIXED, (size, 64, "fp32"), with_bounds=False)
        others = [other for other in (*found.runners_up, found.best_on_point) if other is not None]
        means = [other.objective_seconds for other in others if other.objective_seconds is not None]
        assert all(found.outlook.objective_seconds <= mean for mean in means)


def test_a_plan_that_hides_gathers_behind_compute_loses_more_where_links_give_less() -> None:
    nodes = [
        {"name": "n", "count": 4, "accelerator": "H100-SXM5-80GB", "accelerators": 8, "nics": 1, "gbps_per_nic": 100}
    ]
    cluster = ClusterSpec.model_validate({"name": "knife", "nodes": nodes})
    problem, lost = pose(MODEL, cluster, Batch(256, 512, "bf16")), []
    replicas = tuple(ReplicaSpec(ranks=(rank,), micro_batch=1, samples=8) for rank in range(32))
    for zero in (1, 3):
        own = problem.plan("1f1b", [StageSpec(layers=((0, MODEL.layers),), replicas=replicas, zero=zero)])
        seconds = predict(bind(own, MODEL, cluster)).step_seconds
        lost.append(Outlooks(problem).of(own).links_at_60_percent_seconds / seconds)
    assert 1 < lost[0] < lost[1]
