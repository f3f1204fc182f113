"""Estimates of many candidates at once: each is what it would be alone, and never less than what its slowest replica
computes."""

from dataclasses import replace
from typing import Any

import pytest

from hethub.planner.candidate.candidate import Candidate, CandidateStage, Pattern, ReplicaGroup
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.memory_probes import Mode
from hethub.planner.estimate.stage_figures import Placed
from hethub.planner.estimate.stage_times import StageTimes, _room
from hethub.planner.evaluate.evaluator import Evaluator
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec
from hethub.spec.plan import Offload, ScheduleName
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
        # Few microbatches on the first stage, which beside deeper candidates once got one fewer in flight.
        tuple(stage(4, own._replace(micro_batch=size)) for own, size in ((FAST, 4), (FAST, 1), (SLOW, 4))),
        tuple(stage(3, FAST) for _ in range(4)),
        (stage(2, SLOW), stage(2, SLOW), mixed, stage(2, FAST), stage(3, FAST)),
    ]
    return [
        Candidate(stages, extra_in_flight=extra_in_flight, even=even, pattern=Pattern(schedule))  # type: ignore[arg-type]
        for stages in lines
        for extra_in_flight in (0, 1, 2)
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
        assert estimated.samples(candidate) == bounded.samples(candidate)


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
            at = times._coefficients(*group[:3], Mode.of(one.stage, one.pattern), one.place)
            shards = one.stage.ranks / group.tp if one.stage.zero else 1
            allowed = _room(at, one.stage.layers, shards, 1.02 * asked.capacity(group.device_type))
            assert [figure[index, sort] for figure in room] == pytest.approx(list(allowed))


WIDE = TINY.replace(layers=8, hidden=2048, heads=16, kv_heads=16, ffn=5632, vocab=32000, max_seq_len=2048)
FOUR = ClusterSpec.model_validate(
    {
        "name": "four",
        "nodes": [
            {
                "name": "n", "count": 2, "accelerator": "A100-SXM4-80GB", "accelerators": 2, "nics": 1, "gbps_per_nic": 100,
                "host_memory_gb": 512,
            }
        ],
    }
)  # fmt: skip


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("offload", [(), ("optimizer",), ("parameters",), ("optimizer", "parameters")])
def test_what_replicas_sum_gather_and_fetch_is_estimated_as_it_is_predicted(
    zero: int, offload: tuple[Offload, ...]
) -> None:
    """A model of half a billion parameters over 100 Gbit/s: from one mode to another a step is up to twice as long."""
    asked = pose(WIDE, FOUR, Batch(32, 1024, "bf16"))
    costs = Estimator(asked)
    one = Candidate((CandidateStage(8, (ReplicaGroup(0, 1, 4, 4),), zero=zero, offload=offload),))
    found = Evaluator(asked, costs).evaluate(one)
    assert found is not None
    assert costs.seconds(one) == pytest.approx(found.seconds, rel=0.05)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize(("stages", "tied_head"), [(2, False), (2, True), (4, False)])
def test_few_microbatches_through_a_pipeline_are_estimated_as_they_are_predicted(
    stages: int, tied_head: bool, schedule: ScheduleName
) -> None:
    """Eight samples: fill, drain, what is reduced behind it, and the sum of a tied head's gradients are much of a step."""
    asked = pose(WIDE.replace(name="wide", tied_head=tied_head), FOUR, Batch(8, 1024, "bf16"))
    costs = Estimator(asked)
    own = stage(8 // stages, ReplicaGroup(0, 1, 1, 4 // stages))
    found = Evaluator(asked, costs).evaluate(Candidate((own,) * stages, pattern=Pattern(schedule)))
    assert found is not None
    assert costs.seconds(found.candidate) == pytest.approx(found.seconds, rel=0.05)
