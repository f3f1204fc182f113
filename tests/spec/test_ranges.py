"""Range arithmetic against sets of integers and exact fractions."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hethub.spec.ranges import Range, covers_exactly, from_sizes, merge, overlap, refine, split, split_by_shares

edges = st.integers(-20, 20)
ranges = st.builds(lambda a, b: Range(min(a, b), max(a, b)), edges, edges)
partitions = st.lists(st.lists(ranges, max_size=5), max_size=4)
shares = st.lists(st.one_of(st.integers(0, 50), st.floats(0, 10), st.fractions(0, 5)), min_size=1, max_size=8).filter(
    lambda values: sum(map(Fraction, values)) > 0
)


def integers(r: Range) -> set[int]:
    return set(range(r.start, r.stop))


def union(given_ranges: list[Range]) -> set[int]:
    return set().union(*map(integers, given_ranges))


@given(ranges, ranges)
def test_overlap_is_the_intersection(a: Range, b: Range) -> None:
    assert integers(overlap(a, b)) == integers(a) & integers(b)
    assert overlap(a, b).size >= 0
    assert bool(overlap(a, b)) == bool(integers(a) & integers(b))


@given(ranges, ranges)
def test_contains_is_the_subset_relation(a: Range, b: Range) -> None:
    if b:
        assert a.contains(b) == (integers(b) <= integers(a))


@given(st.integers(0, 500), shares, st.integers(1, 16))
def test_split_by_shares_covers_all_and_is_proportional_within_one_unit(
    units: int, given_shares: list, unit: int
) -> None:
    total = units * unit
    parts = split_by_shares(total, given_shares, unit)
    assert parts[0].start == 0
    assert parts[-1].stop == total
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    whole = sum(map(Fraction, given_shares))
    for part, share in zip(parts, given_shares, strict=True):
        assert part.size % unit == 0
        assert abs(part.size - total * Fraction(share) / whole) < unit


@given(st.integers(0, 500), shares)
def test_the_units_left_over_go_to_the_largest_remainders_in_order(total: int, given_shares: list) -> None:
    whole = sum(map(Fraction, given_shares))
    ideal = [total * Fraction(share) / whole for share in given_shares]
    extra = [part.size - int(value) for part, value in zip(split_by_shares(total, given_shares), ideal, strict=True)]
    ranked = sorted(range(len(ideal)), key=lambda i: (-(ideal[i] - int(ideal[i])), i))
    assert [extra[i] for i in ranked] == sorted(extra, reverse=True)
    assert set(extra) <= {0, 1}


@given(st.integers(0, 100), st.integers(1, 12))
def test_split_differs_by_one_and_larger_parts_come_first(total: int, parts: int) -> None:
    sizes = [r.size for r in split(total, parts)]
    assert sum(sizes) == total
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("total", "given_shares", "unit", "message"),
    [
        (10, [0, 0], 1, "positive sum"),
        (10, [2, -1], 1, "non-negative"),
        (10, [1, 1], 4, "10 is not a multiple of the unit 4"),
    ],
)
def test_impossible_splits_are_refused(total: int, given_shares: list, unit: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_by_shares(total, given_shares, unit)


@given(partitions)
def test_refine_cuts_at_every_edge_and_keeps_gaps_out(given_partitions: list[list[Range]]) -> None:
    flat = [r for partition in given_partitions for r in partition]
    pieces = refine(flat)
    assert union(pieces) == union(flat)
    assert sum(piece.size for piece in pieces) == len(union(flat))
    for piece in pieces:
        assert piece
        for r in flat:
            common = overlap(piece, r)
            assert not common or common == piece  # no edge inside a piece
    # Coarsest: between two touching pieces there is an edge of a given range.
    edges_given = {edge for r in flat if r for edge in r}
    assert all(a.stop in edges_given for a in pieces)


@given(st.lists(ranges, max_size=8))
def test_merge_keeps_the_integers_and_leaves_gaps_between(given_ranges: list[Range]) -> None:
    merged = merge(given_ranges)
    assert union(merged) == union(given_ranges)
    assert all(a.stop < b.start for a, b in itertools.pairwise(merged))


@given(st.lists(ranges, max_size=6), ranges)
def test_covering_exactly_means_every_integer_once(given_ranges: list[Range], whole: Range) -> None:
    counted = sorted(i for r in given_ranges for i in integers(r))
    assert covers_exactly(given_ranges, whole) == (counted == sorted(integers(whole)))


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(-5, 5), st.randoms())
def test_consecutive_ranges_cover_all_in_any_order(sizes: list[int], start: int, random) -> None:
    parts = [part.shift(start) for part in from_sizes(sizes)]
    whole = Range(start, start + sum(sizes))
    random.shuffle(parts)
    assert covers_exactly(parts, whole)
    if any(parts):
        assert not covers_exactly([*parts, next(part for part in parts if part)], whole)
