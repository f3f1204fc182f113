"""Candidates made into plans: which ranks, which ZeRO level, how many microbatches in flight."""

import pytest

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup, assign_units
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from tests.planner.problems import TINY, cluster, incumbent_of, mixed


def test_the_widest_replicas_of_a_stage_are_placed_first() -> None:
    """Of two machines of three, narrow ones first would leave one rank in one of them and no place for two pairs."""
    problem = pose(TINY, cluster(("amd", 3, 0.1, 4.0), ("amd", 3, 0.1, 4.0)), Batch(8, 64, "fp32"))
    stage = CandidateStage(6, (ReplicaGroup(0, 1, 1, 2), ReplicaGroup(0, 2, 1, 2)))
    assigned = assign_units(Candidate((stage,)), problem)
    assert assigned is not None
    assert [unit.ranks for unit, _ in assigned[0]] == [(0, 1), (2,), (3, 4), (5,)]


def test_a_stage_over_islands_shards_its_state_and_a_replica_alone_does_not() -> None:
    both = CandidateStage(3, (ReplicaGroup(0, 1, 1, 1), ReplicaGroup(1, 1, 1, 1)), zero=0)
    alone = CandidateStage(3, (ReplicaGroup(1, 1, 1, 1),), zero=3)
    found = incumbent_of(mixed()).consider(Candidate((both, alone)))
    assert found is not None
    assert [stage.zero for stage in found.plan.stages] == [1, 0]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (1, 3), (3, 2)])
def test_replicas_of_nearly_as_many_samples_hold_what_others_do_by_default(sizes: tuple[int, int]) -> None:
    """As many microbatches in flight as there are stages behind were given: of unlike sizes too few, and a step up to 1.7
    times as long, or no plan at all."""
    problem = pose(TINY, cluster(("amd", 4, 0.1, 4.0)), Batch(15, 64, "fp32"))
    stages = tuple(CandidateStage(3, (ReplicaGroup(0, 1, size, 2),)) for size in sizes)
    found = incumbent_of(problem).consider(Candidate(stages))
    assert found is not None
    assert {tuple(replica.samples for replica in stage.replicas) for stage in found.plan.stages} == {(8, 7)}
    assert all(replica.in_flight is None for stage in found.plan.stages for replica in stage.replicas)
