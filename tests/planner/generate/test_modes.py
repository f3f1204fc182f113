"""The modes that the stages of a cut may take."""

import pytest

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup
from hethub.planner.generate.modes import patterns
from tests.planner.problems import mixed

ALONE = ReplicaGroup(0, 1, 1, 1)
INTERLEAVED: dict[str, object] = {"schedule": "interleaved"}


@pytest.mark.parametrize(
    ("layers", "chunks"),
    [((20, 20), {2, 4, 5, 10, 20}), ((12, 8), {2, 4}), ((5, 7), {2, 4}), ((1, 3), set())],
)
def test_interleaved_chunks_are_even_where_they_can_be(layers: tuple[int, int], chunks: set[int]) -> None:
    """A published recipe of five chunks of four layers was faster than what powers of two had."""
    candidate = Candidate(tuple(CandidateStage(own, (ALONE,)) for own in layers))
    assert {own.chunks for own in patterns(mixed(), candidate) if own.schedule == "interleaved"} == chunks


@pytest.mark.parametrize(("replicas", "given", "chunks"), [(2, {}, set()), (1, {}, set()), (1, INTERLEAVED, {2, 3, 6})])
def test_one_stage_is_interleaved_if_that_is_asked_for(
    replicas: int, given: dict[str, object], chunks: set[int]
) -> None:
    """It is 1F1B; what its buckets of gradients win was 0.05 % of a step, in one of 27 reference plans."""
    candidate = Candidate((CandidateStage(6, (ALONE._replace(number=replicas),)),))
    assert {own.chunks for own in patterns(mixed(**given), candidate) if own.schedule == "interleaved"} == chunks


@pytest.mark.parametrize(
    ("schedule", "layers", "chunks"),
    [
        ("layered", (6, 6), {1}),
        ("ministages", (3, 2), {2}),
        ("ministages", (20, 16), {4, 16}),
        ("ministages", (3, 1), set()),
    ],
)
def test_what_is_asked_for_is_looked_at_where_nobody_else_would(
    schedule: str, layers: tuple[int, int], chunks: set[int]
) -> None:
    """`layered` over several stages was said to need more samples, as were stages of less than four layers."""
    candidate = Candidate(tuple(CandidateStage(own, (ALONE,)) for own in layers))
    assert {own.chunks for own in patterns(mixed(schedule=schedule), candidate)} == chunks
    assert not any(own.chunks in chunks for own in patterns(mixed(), candidate) if own.schedule == "layered")
