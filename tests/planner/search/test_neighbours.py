"""What is one change away from a plan."""

from dataclasses import replace

from hethub.planner.candidate.candidate import Candidate, CandidateStage, Pattern, ReplicaGroup
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.planner.search.neighbours import neighbours
from tests.planner.problems import TINY, cluster, incumbent_of, mixed

SLOW, FAST = ReplicaGroup(0, 1, 2, 2), ReplicaGroup(1, 1, 2, 2)
TWO = Candidate((CandidateStage(1, (SLOW,)), CandidateStage(5, (FAST,))))


def test_a_stage_fewer_and_a_stage_more_are_one_change_away():
    near = neighbours(TWO, incumbent_of(mixed()).costs)
    half = FAST._replace(number=1)
    assert Candidate((CandidateStage(6, (SLOW, FAST)),)) in near
    assert Candidate((CandidateStage(1, (SLOW,)), CandidateStage(2, (half,)), CandidateStage(3, (half,)))) in near


def test_a_fixed_number_of_stages_or_replicas_stays():
    for given in ({"pp": 2}, {"dp": 2}):
        near = neighbours(TWO, incumbent_of(mixed(**given)).costs)
        assert {len(candidate.stages) for candidate in near} == {2}


def test_unused_accelerators_join_a_stage_and_no_others_do():
    """One of three was left unused, though with it a step was 9.5 % shorter."""
    few = replace(TWO, stages=(CandidateStage(1, (SLOW._replace(number=1),)), TWO.stages[1]))
    costs = incumbent_of(mixed()).costs
    near = neighbours(few, costs)
    for size in (1, 2):
        joining = SLOW._replace(number=1, micro_batch=size)
        for index in (0, 1):
            more = few.stages[index].with_groups([*few.stages[index].groups, joining])
            assert few.with_stages({index: more}) in near
    used = [sum(own.number for stage in each.stages for own in stage.groups) for each in neighbours(TWO, costs)]
    assert max(used) <= 4


def test_of_one_stage_zero_bubble_is_1f1b():
    near = neighbours(replace(TWO, pattern=Pattern("zero_bubble")), incumbent_of(mixed()).costs)
    assert {own.pattern.schedule for own in near if len(own.stages) == 1} == {"1f1b"}


def test_another_schedule_keeps_the_microbatches_in_flight_that_it_may_choose():
    near = neighbours(replace(TWO, extra_in_flight=1), incumbent_of(mixed()).costs)
    levels = {
        schedule: {own.extra_in_flight for own in near if own.pattern.schedule == schedule}
        for schedule in ("zero_bubble", "gpipe")
    }
    assert levels == {"zero_bubble": {0, 1}, "gpipe": {0}}


def test_chunks_that_take_turns_stay_in_step():
    """Out of step every action waits for another stage's, which estimates do not see."""
    halves = Candidate((CandidateStage(3, (SLOW,)), CandidateStage(3, (FAST,))))
    turns = replace(halves, pattern=Pattern("interleaved", 3))
    costs = incumbent_of(mixed()).costs
    near = [own for own in neighbours(turns, costs) if own.pattern.schedule == "interleaved"]
    assert near
    assert all(own.is_in_step for own in near)
    assert not all(own.is_in_step for own in neighbours(halves, costs) if own.pattern.chunks == 1)


def test_all_layers_stay_and_every_stage_keeps_one() -> None:
    for near in neighbours(TWO, incumbent_of(mixed()).costs):
        assert sum(stage.layers for stage in near.stages) == 6
        assert min(stage.layers for stage in near.stages) >= 1
        assert all(stage.nudges == () or any(stage.nudges) for stage in near.stages)


def test_an_odd_number_of_replicas_has_no_twice_the_degree() -> None:
    """One of three would be left over."""
    problem = pose(TINY, cluster(("amd", 4, 0.1, 4.0)), Batch(16, 64, "fp32"))
    degrees = {
        number: {
            own.tp
            for near in neighbours(
                Candidate((CandidateStage(6, (SLOW._replace(number=number),)),)), incumbent_of(problem).costs
            )
            for own in near.stages[0].groups
        }
        for number in (3, 4)
    }
    assert degrees == {3: {1}, 4: {1, 2}}


def test_what_some_stages_offload_may_stay_on_the_device_in_all() -> None:
    """What some of all stages move is taken back from all of them, and not asked of the others."""
    one = SLOW._replace(number=1)
    plain = Candidate(tuple(CandidateStage(2, (own,)) for own in (one, one, FAST)))
    moved = [replace(stage, offload=("optimizer",)) for stage in plain.stages[:2]]
    near = neighbours(replace(plain, stages=(*moved, plain.stages[2])), incumbent_of(mixed()).costs)
    assert plain in near
