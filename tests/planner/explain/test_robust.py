"""The plan that loses least where figures were wrong."""

from typing import Any

from hethub.planner.explain.robust import least_regret, scenarios
from tests.planner.problems import mixed


def test_regret_is_not_the_worst_step() -> None:
    """The first plan has the best worst step, and loses most where links are as they are; all scenarios count."""
    plans: list[Any] = ["bound by compute", "bound by links"]
    chosen = least_regret(plans, [[10.0, 9.0, 9.0], [10.1, 6.0, 6.0]])
    assert chosen is not None
    assert (chosen.evaluation, chosen.worst_step_seconds) == ("bound by links", 10.1)
    assert chosen.regret == 10.1 / 10.0
    assert least_regret([], []) is None


def test_no_scenario_is_slower_in_all_than_every_other() -> None:
    """Each kind is fast where another is slow, and links are slow or as they are."""
    problem = mixed()
    clusters = scenarios(problem)
    assert len(clusters) == 6
    speeds = [tuple(node.device.fp32_tflops for node in cluster.nodes) for cluster in clusters]
    assert len(set(speeds)) == 3
