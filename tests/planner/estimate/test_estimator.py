"""Estimates of many candidates at once: each is what it would be alone, and never less than what its slowest replica
computes."""

from dataclasses import replace
from typing import Any

import pytest

from hethub.planner.candidate.candidate import Candidate, CandidateStage, Pattern, ReplicaGroup
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.stage_figures import Placed
from hethub.planner.estimate.stage_times import StageTimes
from hethub.planner.evaluate.evaluator import Evaluator
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.spec.job import ConstraintsSpec
from tests.planner.problems import TINY, cluster

SLOW, FAST = ReplicaGroup(0, 1, 2, 1), ReplicaGroup(1, 1, 3, 1)


def problem(tied_head: bool = False, **constraints: object) -> Problem:
    on = cluster(("amd", 4, 0.05, 4.0), ("nvidia", 4, 0.1, 4.0))
    model = TINY.replace(layers=12, tied_head=tied_head)
    return pose(model, on, Batch(24, 64, "fp32"), ConstraintsSpec.model_validate(constraints))


def stage(layers: int, *groups: ReplicaGroup, **modes: Any) -> CandidateStage:
    return CandidateStage(layers, groups, **modes)


def every_candidate() -> list[Candidate]:
    """One to five stages, of one device type and mixed, in every mode that an estimate knows."""
    mixed = stage(3, SLOW, FAST)
    lines = [
        (stage(12, SLOW._replace(number=4), FAST._replace(number=4)),),
        (stage(4, SLOW._replace(number=2)), stage(8, FAST._replace(number=2))),
        (stage(6, SLOW, FAST, zero=0), stage(6, SLOW, FAST, recompute="full")),
        (mixed, stage(5, FAST), stage(4, SLOW._replace(micro_batch=64))),
        (stage(2, SLOW), stage(2, SLOW), mixed, stage(2, FAST), stage(3, FAST)),
    ]
    return [
        Candidate(stages, extra_in_flight=extra_in_flight, even=even, pattern=Pattern(schedule))  # type: ignore[arg-type]
        for stages in lines
        for extra_in_flight in (False, True)
        for even in (False, True)
        for schedule in ("1f1b", "zero_bubble")
    ]


@pytest.mark.parametrize("tied_head", [False, True])
def test_candidates_of_any_depth_are_estimated_together_as_alone(tied_head: bool) -> None:
    asked, candidates = problem(tied_head), every_candidate()
    together = Estimator(asked)
    together.estimate(candidates)
    for candidate in candidates:
        alone = Estimator(asked)
        assert together.seconds(candidate) == pytest.approx(alone.seconds(candidate), rel=1e-12)
        assert together.of(candidate).holds == alone.of(candidate).holds
        assert len(together.of(candidate).holds) == len(candidate.stages)
        assert together.likely_fits(candidate) == alone.likely_fits(candidate)
        assert together.of(candidate).slowest == alone.of(candidate).slowest


def test_no_estimate_is_below_what_the_busiest_replica_computes() -> None:
    asked, candidates = problem(), every_candidate()
    estimated, bounded = (Estimator(asked) for _ in range(2))
    estimated.estimate(candidates)
    bounded.bound(candidates)
    for candidate in candidates:
        assert bounded.least(candidate) == estimated.least(candidate)
        assert estimated.least(candidate) <= estimated.seconds(candidate)
        thrown_away = any(own.recompute == "full" for own in candidate.stages)  # nothing is left to put off
        possible = not (thrown_away and candidate.pattern.schedule == "zero_bubble")
        assert (estimated.seconds(candidate) < float("inf")) == possible
        assert [estimated.samples(candidate, s) for s in range(len(candidate.stages))] == [
            bounded.samples(candidate, s) for s in range(len(candidate.stages))
        ]


@pytest.mark.parametrize("gbps", [0.1, 0.2, 2.0])
@pytest.mark.parametrize("pattern", [Pattern("interleaved", 2), Pattern("interleaved", 4), Pattern("ministages", 4)])
def test_chunks_over_slow_links_are_estimated_as_they_are_predicted(pattern: Pattern, gbps: float) -> None:
    """Once nothing was said of the messages between chunks: half of what is predicted, and less."""
    on = cluster(("amd", 2, 0.05, 4.0), ("nvidia", 2, 0.05, 4.0))
    on = on.replace(nodes=tuple(node.replace(gbps_per_nic=gbps) for node in on.nodes))
    asked = pose(TINY.replace(layers=16), on, Batch(16, 64, "fp32"), ConstraintsSpec())
    costs = Estimator(asked)
    one = Candidate(
        (stage(8, SLOW._replace(micro_batch=1, number=2)), stage(8, FAST._replace(micro_batch=1, number=2)))
    )
    found = Evaluator(asked, costs).evaluate(replace(one, pattern=pattern))
    assert found is not None
    assert costs.seconds(found.candidate) == pytest.approx(found.seconds, rel=0.05)


def test_stages_of_unlike_widths_are_estimated_together_as_alone() -> None:
    asked = problem(zero=3)
    times = StageTimes(asked, UnitCosts(asked))
    stages = [
        Placed(one, place, even, Pattern("1f1b"))
        for one in (
            stage(4, SLOW),
            stage(5, SLOW, FAST, zero=3),
            stage(2, SLOW, FAST, ReplicaGroup(1, 2, 1, 1), zero=2),
        )
        for place in range(4)
        for even in (False, True)
    ]
    together, division, room = times.estimates(stages)
    for index, one in enumerate(stages):
        alone = times.estimates([one])
        assert [figure[index] for figure in together] == pytest.approx([figure[0] for figure in alone[0]], rel=1e-12)
        width = len(one.stage.groups)
        assert division.taken[index, :width].tolist() == alone[1].taken[0].tolist()
        for sort, group in enumerate(one.stage.groups):
            allowed = times.room(one.stage, group, one.place, one.pattern, slack=1.02)
            assert [figure[index, sort] for figure in room] == pytest.approx(list(allowed))
