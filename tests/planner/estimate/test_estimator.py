"""Estimates of many drafts at once: each is what it would be alone, and never less than what its slowest replica
computes."""

from dataclasses import replace
from typing import Any

import pytest

from hethub.planner.candidate.candidate import Draft, DraftStage, Seats
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Surrogate
from hethub.planner.estimate.stage_times import Placed, StageTimes
from hethub.planner.problem.problem import Batch, Problem, pose
from hethub.spec.job import ConstraintsSpec
from tests.planner.test_plan import TINY, cluster

SLOW, FAST = Seats(0, 1, 2, 1), Seats(1, 1, 3, 1)


def problem(tied_head: bool = False, **constraints: object) -> Problem:
    on = cluster(("amd", 4, 0.05, 4.0), ("nvidia", 4, 0.1, 4.0))
    model = TINY.replace(layers=12, tied_head=tied_head)
    return pose(model, on, Batch(24, 64, "fp32"), ConstraintsSpec.model_validate(constraints))


def stage(layers: int, *seats: Seats, **modes: Any) -> DraftStage:
    return DraftStage(layers, seats, **modes)


def every_draft() -> list[Draft]:
    """One to five stages, of one kind and mixed, in every mode that an estimate knows."""
    mixed = stage(3, SLOW, FAST)
    lines = [
        (stage(12, SLOW._replace(number=4), FAST._replace(number=4)),),
        (stage(4, SLOW._replace(number=2)), stage(8, FAST._replace(number=2))),
        (stage(6, SLOW, FAST, zero=0), stage(6, SLOW, FAST, recompute="full")),
        (mixed, stage(5, FAST), stage(4, SLOW._replace(micro_batch=64))),
        (stage(2, SLOW), stage(2, SLOW), mixed, stage(2, FAST), stage(3, FAST)),
    ]
    return [
        Draft(stages, roomy=roomy, even=even, schedule=schedule)  # type: ignore[arg-type]
        for stages in lines
        for roomy in (False, True)
        for even in (False, True)
        for schedule in (None, "zero_bubble")
    ]


@pytest.mark.parametrize("tied_head", [False, True])
def test_drafts_of_any_depth_are_estimated_together_as_alone(tied_head: bool) -> None:
    asked, drafts = problem(tied_head), every_draft()
    costs = UnitCosts(asked)
    together = Surrogate(asked, costs)
    together.weigh(drafts)
    for draft in drafts:
        alone = Surrogate(asked, costs)
        assert together.seconds(draft) == pytest.approx(alone.seconds(draft), rel=1e-12)
        assert together.holds(draft) == alone.holds(draft)
        assert len(together.holds(draft)) == len(draft.stages)
        assert together.likely_fits(draft) == alone.likely_fits(draft)
        assert together.slowest(draft) == alone.slowest(draft)


def test_no_estimate_is_below_what_the_busiest_replica_computes() -> None:
    asked, drafts = problem(), every_draft()
    weighed, bounded = (Surrogate(asked, UnitCosts(asked)) for _ in range(2))
    weighed.weigh(drafts)
    bounded.bound(drafts)
    for draft in drafts:
        assert bounded.least(draft) == weighed.least(draft)
        assert weighed.least(draft) <= weighed.seconds(draft)
        assert [weighed.samples(draft, s) for s in range(len(draft.stages))] == [
            bounded.samples(draft, s) for s in range(len(draft.stages))
        ]


def test_no_microbatches_in_flight_and_neither_schedule_bring_an_estimate_below_its_floor() -> None:
    asked, drafts = problem(), every_draft()
    surrogate = Surrogate(asked, UnitCosts(asked))
    for draft in drafts:
        for roomy in (False, True):
            for schedule in (None, "zero_bubble"):
                other = replace(draft, roomy=roomy, schedule=schedule)  # type: ignore[arg-type]
                assert surrogate.floor(draft) <= surrogate.seconds(other) * (1 + 1e-12)


def test_stages_of_unlike_widths_are_estimated_together_as_alone() -> None:
    asked = problem(zero=3)
    times = StageTimes(asked, UnitCosts(asked))
    stages = [
        Placed(one, place, even, "1f1b")
        for one in (stage(4, SLOW), stage(5, SLOW, FAST, zero=3), stage(2, SLOW, FAST, Seats(1, 2, 1, 1), zero=2))
        for place in range(4)
        for even in (False, True)
    ]
    together, division, room = times.estimates(stages)
    for index, one in enumerate(stages):
        alone = times.estimates([one])
        assert [figure[index] for figure in together] == pytest.approx([figure[0] for figure in alone[0]], rel=1e-12)
        width = len(one.stage.seats)
        assert division.taken[index, :width].tolist() == alone[1].taken[0].tolist()
        for sort, seats in enumerate(one.stage.seats):
            allowed = times.room(one.stage, seats, one.place, one.schedule, slack=1.02)
            assert [figure[index, sort] for figure in room] == pytest.approx(list(allowed))
