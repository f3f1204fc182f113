"""Clusters with better figures."""

from hethub.planner.problem.scaled import Scale, scaled
from hethub.spec.cluster import ClusterSpec
from tests.planner.problems import answer, mixed


def test_faster_links_and_compute_never_make_the_best_plan_slower():
    problem = mixed()
    best = answer(problem)
    better = problem.on(
        scaled(problem.cluster, Scale(compute={k.accelerator.name: 1.1 for k in problem.device_types}, in_node=1.1))
    )
    assert answer(better).seconds <= best.seconds


def test_the_fastest_link_that_a_file_may_name_can_be_faster() -> None:
    """Twice as much is no mistaken unit: `plan --explain` ended with a traceback."""
    node = {"name": "a", "accelerator": "H100-SXM5-80GB", "accelerators": 8, "gbps_per_nic": 1e5}
    cluster = ClusterSpec.model_validate({"name": "fast", "nodes": [node]})
    assert scaled(cluster, Scale(network=2.0)).nodes[0].gbps == 2e5
