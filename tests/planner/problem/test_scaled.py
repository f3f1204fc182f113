"""Clusters with better figures."""

from hethub.planner.plan import answer
from hethub.planner.problem.scaled import Scale, scaled
from tests.planner.problems import mixed


def test_faster_links_and_compute_never_make_the_best_plan_slower():
    problem = mixed()
    best = answer(problem)
    better = problem.on(
        scaled(problem.cluster, Scale(compute={k.accelerator.name: 1.1 for k in problem.device_types}, in_node=1.1))
    )
    assert answer(better).seconds <= best.seconds
