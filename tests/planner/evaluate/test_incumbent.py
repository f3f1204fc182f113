"""What a search knows, and what another takes over of it."""

import time

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.spec.job import ConstraintsSpec
from tests.planner.problems import TINY, cluster, incumbent_of, mixed

ONE = Candidate((CandidateStage(6, (ReplicaGroup(0, 1, 2, 2), ReplicaGroup(1, 1, 2, 2))),))
TWO = Candidate(tuple(CandidateStage(3, (ReplicaGroup(device_type, 1, 2, 2),)) for device_type in range(2)))


def test_of_a_search_under_other_constraints_only_what_keeps_to_these_is_taken_over() -> None:
    free, asked = incumbent_of(mixed()), incumbent_of(mixed(pp=2))
    for candidate in (ONE, TWO):
        assert free.consider(candidate)
    asked.admit(free)
    assert list(asked.fitting) == list(asked.tried) == [TWO]


def test_the_one_least_over_memory_of_both_searches_is_the_closest() -> None:
    small = pose(TINY, cluster(("amd", 2, 0.05, 0.001), ("nvidia", 2, 0.1, 0.001)), Batch(16, 64, "fp32"))
    least, most = (incumbent_of(small) for _ in range(2))
    for incumbent, size in ((least, 1), (most, 8)):
        incumbent.consider(Candidate(tuple(CandidateStage(3, (ReplicaGroup(own, 1, size, 2),)) for own in range(2))))
    assert least.closest
    assert most.closest
    assert least.closest.fullness < most.closest.fullness
    closest = least.closest
    most.admit(least)
    least.admit(most)
    assert most.closest is least.closest is closest
    other = Incumbent(small.with_constraints(ConstraintsSpec(pp=1)))
    other.admit(least)
    assert other.closest is None


def test_a_search_of_some_machines_ends_when_the_whole_one_does_and_looks_below_what_it_was_given() -> None:
    whole = incumbent_of(mixed(time_limit_seconds=0.05))
    time.sleep(0.06)
    part = whole.beside(whole.problem, 1e-3)
    assert whole.out_of_time
    assert part.out_of_time
    assert part.within_time(ONE) is None
    assert part.best_seconds == 1e-3
    assert part.consider(ONE)
    assert part.best_seconds == 1e-3 < part.ranked[0].seconds


def test_the_best_is_the_fastest_that_fits_however_it_was_found() -> None:
    """Also of what is taken over from another search."""
    one, other = incumbent_of(mixed()), incumbent_of(mixed())
    for incumbent, candidates in ((one, (ONE,)), (other, (TWO, ONE))):
        for candidate in candidates:
            incumbent.consider(candidate)
            assert incumbent.best is incumbent.ranked[0]
    one.admit(other)
    other.admit(one)
    assert one.best
    assert other.best
    assert one.best.candidate == one.ranked[0].candidate == other.best.candidate == other.ranked[0].candidate
