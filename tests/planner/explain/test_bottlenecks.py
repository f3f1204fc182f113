"""What binds: which constraints are relaxed, and what that is worth."""

from dataclasses import replace

import pytest

from hethub.planner import plan
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.explain.bottlenecks import _best_rate
from hethub.planner.plan import find
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.planner.result import TWICE, Bottleneck
from hethub.planner.search.local_search import movable
from hethub.spec.job import ConstraintsSpec
from tests.planner.problems import MIXED, TINY


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    """On two stages: the slower accelerators hold one, the faster ones the other."""
    result = plan(TINY, MIXED, (16, 64, "fp32"), ConstraintsSpec(pp=2), with_bounds=False, explain=True)
    gains = [reason.faster_percent for reason in result.reasons]
    assert gains == sorted(gains, reverse=True)
    return {reason.constraint: reason.faster_percent for reason in result.reasons}


def test_every_figure_of_the_cluster_is_relaxed(found: dict[str, float]) -> None:
    assert set(found) == {
        "the speed of amd-0.05",
        "the speed of nvidia-0.1",
        "the accelerators' memory",
        "the links inside nodes",
        "the network between nodes",
        "the bridge between islands",
        TWICE,
    }


def test_what_is_busiest_binds_and_what_is_plenty_does_not(found: dict[str, float]) -> None:
    speeds = [found["the speed of amd-0.05"], found["the speed of nvidia-0.1"]]
    assert all(0.0 < gain <= 10.0 + 1e-9 for gain in speeds)
    assert sum(speeds) > 5.0  # compute is most of the step
    assert max(speeds) > found["the links inside nodes"]
    assert found["the accelerators' memory"] == 0.0  # four GiB for a model of a few million parameters
    assert found[TWICE] > 0.0  # the pipeline fills and drains once for twice the work


def test_a_whole_plan_does_not_stand_for_twice_the_batch() -> None:
    problem = pose(TINY, MIXED, Batch(16, 64, "fp32"), ConstraintsSpec(pp=2))
    incumbent = Incumbent(problem)
    best = find(incumbent, "auto")
    assert best is not None
    whole = replace(best.candidate, plan=best.plan)
    other = next(each.candidate for each in movable(incumbent) if each.candidate != best.candidate)
    twice = replace(problem, batch=Batch(32, 64, "fp32"))
    assert _best_rate([whole, other], twice) == _best_rate([other], twice)


def test_twice_the_batch_is_not_ten_percent_better() -> None:
    assert Bottleneck(TWICE, 13.6).sentence() == "twice the batch makes the best plan 13.6 % faster"
    assert Bottleneck("the speed of X", 7.7).sentence() == "the speed of X 10 % better makes the best plan 7.7 % faster"
    assert Bottleneck(TWICE, -1.4).sentence() == "twice the batch makes the best plan 1.4 % slower"
    assert Bottleneck(TWICE, -0.01).sentence() == "twice the batch makes the best plan 0.0 % faster"
