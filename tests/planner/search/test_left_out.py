"""Accelerators that would only hold the others up are left unused, and no others."""

import pytest

from hethub.planner import plan
from hethub.planner.result import PlanResult
from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import bind
from tests.planner.problems import MIXED, TINY, cluster

SLOW = {**cluster(("amd", 2, 0.05, 4.0)).nodes[0].model_dump(exclude_unset=True), "gbps_per_nic": 0.01}
FAST = cluster(("nvidia", 2, 1.0, 4.0)).nodes[0].model_dump(exclude_unset=True)
QUESTION = (16, 64, "fp32")


def behind_a_slow_link() -> ClusterSpec:
    """Two slow accelerators that fast ones can reach at 10 Mbit/s, in the ranks before them."""
    nodes = [{**SLOW, "name": "far"}, {**FAST, "name": "here", "gbps_per_nic": 10}]
    return ClusterSpec.model_validate({"name": "far and here", "emulated": True, "nodes": nodes})


@pytest.fixture(scope="module")
def found() -> PlanResult:
    return plan(TINY, behind_a_slow_link(), QUESTION, with_bounds=False)


def test_what_only_holds_up_is_left_unused(found):
    whole = behind_a_slow_link()
    assert found.plan.unused == (0, 1)
    alone = plan(TINY, whole.replace(nodes=whole.nodes[1:]), QUESTION, with_bounds=False)
    shortest = [(own.best_on_point or own.prediction).step_seconds for own in (found, alone)]
    assert shortest[0] <= shortest[1]
    assert predict(bind(found.plan, TINY, whole)).step_seconds == found.prediction.step_seconds
    assert found.prediction.fits


def test_the_runners_up_say_what_all_of_them_would_give(found):
    assert any(not runner.plan.unused for runner in found.runners_up)
    shortest = found.best_on_point or found.prediction  # the answer is the best in the mean over scenarios
    assert all(runner.step_seconds >= shortest.step_seconds for runner in found.runners_up)


@pytest.mark.parametrize("small", [0, 1])
def test_what_has_no_room_for_anything_is_left_unused(small: int) -> None:
    """Its maker's libraries alone fill it. Once nothing fitted wherever such accelerators were among the others."""
    nodes = [("amd", 2, 1.0, 4.0), ("amd", 2, 0.05, 4.0)]
    nodes[small] = (*nodes[small][:3], 0.05)
    found = plan(TINY, cluster(*nodes), QUESTION, with_bounds=False)
    assert found.plan.unused == (2 * small, 2 * small + 1)


def test_what_helps_is_used():
    assert plan(TINY, MIXED, (48, 64, "fp32"), with_bounds=False).plan.unused == ()
