"""Micro-batches of any size: even ones, and those that memory allows."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hethub.planner.candidate.candidate import Candidate, CandidateStage, Pattern, ReplicaGroup
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.memory_model import ONLY
from hethub.planner.estimate.microbatch_sizes import even, fitted, resized
from hethub.planner.generate.cuts import best_cuts
from hethub.planner.generate.table import tabulate
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from tests.planner.problems import TINY, cluster, incumbent_of, mixed


@given(st.integers(1, 200), st.integers(1, 64))
def test_even_microbatches_are_as_many_and_as_equal_as_can_be(samples, size):
    found = even(samples, size)
    assert -(-samples // found) == -(-samples // size)
    assert found == 1 or -(-samples // (found - 1)) > -(-samples // found)


def test_resized_microbatches_change_in_number_and_no_further_than_asked():
    problem = mixed()
    estimator, changes = Estimator(problem), 0
    for candidate in best_cuts(problem, tabulate(problem, estimator.unit_costs), 20):
        for step in (-1, 0, 1):
            changed = resized(candidate, [(0, None)], estimator, step)
            assert changed.stages[1:] == candidate.stages[1:]
            assert changed.shape == candidate.shape
            taken = estimator.samples(candidate)[0]
            for before, after, most in zip(candidate.stages[0].groups, changed.stages[0].groups, taken, strict=True):
                assert (after.micro_batch - min(before.micro_batch, most)) * step >= 0
                usual = min(before.micro_batch, most)
                assert step >= 0 or after.micro_batch < usual or usual == 1  # smaller, not only evener
                changes += after.micro_batch != min(before.micro_batch, most)
    assert changes > 20


def test_candidates_over_memory_are_made_to_fit_with_the_largest_microbatches():
    model = TINY.replace(layers=8, hidden=512, ffn=2048, max_seq_len=2048)
    problem = pose(model, cluster(("amd", 2, 0.1, 16.0), ("nvidia", 2, 0.1, 16.0)), Batch(256, 2048, "fp32"))
    incumbent = incumbent_of(problem)
    incumbent.evaluator.microbatches_left = 10**6
    found = 0
    table = replace(tabulate(problem, incumbent.costs.unit_costs), memory_counts=False)
    for candidate in best_cuts(problem, table, 60):
        if incumbent.costs.likely_fits(candidate) or (smaller := fitted(candidate, incumbent.costs)) is None:
            continue
        found += 1
        evaluation = incumbent.consider(smaller)
        assert evaluation is not None
        assert all(entry.bytes <= 1.03 * entry.limit for entry in evaluation.prediction.memory)
        assert smaller.shape == candidate.shape
    assert found


def test_the_largest_microbatch_does_not_depend_on_what_was_asked_before():
    """ZeRO cuts state over all ranks of a stage: among two replicas a wider one leaves more room to the other."""
    model = TINY.replace(layers=16, hidden=1024, ffn=4096, vocab=8192)
    problem = pose(model, cluster(("amd", 2, 0.1, 8.0), ("nvidia", 8, 0.1, 8.0)), Batch(64, 128, "fp32"))
    one = ReplicaGroup(0, 1, 32, 1)
    narrow, wide = (Candidate((CandidateStage(16, (one, ReplicaGroup(1, tp, 32, 1))),)) for tp in (1, 8))

    def sizes(*asked: Candidate) -> dict[Candidate, int]:
        estimator = Estimator(problem)
        return {own: estimator.times.largest(own.stages[0], one, ONLY, own.pattern, 1) for own in asked}

    assert sizes(narrow, wide) == sizes(wide, narrow) == sizes(narrow) | sizes(wide)
    assert sizes(wide)[wide] > sizes(narrow)[narrow]


def test_the_largest_microbatch_is_the_same_up_to_whatever_size_above_it():
    problem = pose(TINY, cluster(("amd", 1, 0.1, 1.45)), Batch(64, 128, "fp32"))
    times = Estimator(problem).times

    def largest(asked: int, held: int = 1) -> int:
        own = ReplicaGroup(0, 1, asked, 1)
        return times.largest(CandidateStage(TINY.layers, (own,)), own, ONLY, Pattern("1f1b"), held)

    most = largest(64)
    assert 2 < most < 63
    assert [largest(asked) for asked in range(1, 65)] == [min(asked, most) for asked in range(1, 65)]
    assert largest(64, held=1_000_000) == 0
