"""Samples by speed: exact divisions, and their end."""

from itertools import product

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hethub.planner.candidate.samples import Worker, divide, earliest_finish

workers = st.builds(
    lambda b, first, more: Worker(b, tuple(first + more * i for i in range(b))),
    st.integers(1, 4),
    st.floats(0.5, 4.0),
    st.just(0.0) | st.floats(0.1, 2.0),
)
LEVEL, STEEP = Worker(2, (4.0, 4.0)), Worker(1, (1.0,))  # two samples take as long as one: both end at once


@settings(deadline=None)
@example([LEVEL, LEVEL, LEVEL, STEEP], 7)
@given(st.lists(workers, min_size=2, max_size=3), st.integers(3, 12))
def test_samples_are_divided_with_the_earliest_finish(given_workers, total):
    counts = divide(total, given_workers)
    assert sum(counts) == total
    assert min(counts) >= 1
    found = max(w.seconds(n) for w, n in zip(given_workers, counts, strict=True))
    choices = (c for c in product(range(1, total + 1), repeat=len(given_workers)) if sum(c) == total)
    best = min(max(w.seconds(n) for w, n in zip(given_workers, c, strict=True)) for c in choices)
    assert found <= best * (1 + 1e-6)


@given(st.lists(st.floats(0.5, 4.0), min_size=2, max_size=3), st.integers(3, 12))
def test_the_earliest_finish_is_that_of_the_best_division(per_sample, total):
    choices = (c for c in product(range(1, total + 1), repeat=len(per_sample)) if sum(c) == total)
    best = min(max(n * seconds for n, seconds in zip(c, per_sample, strict=True)) for c in choices)
    own = np.array([[*per_sample, 1.0], [*per_sample, 9.0]])
    numbers = np.array([*(1 for _ in per_sample), 0])  # a sort that the case has not
    for case in (earliest_finish(total, own, numbers), earliest_finish(total, own[:, :-1], numbers[:-1])):
        assert (case <= best * (1 + 1e-6)).all()
        assert (case >= best * (1 - 1e-6)).all()
