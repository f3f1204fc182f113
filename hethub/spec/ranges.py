"""Half-open ranges of integers: the one arithmetic behind samples, layers, heads, columns and training state."""

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import NamedTuple


class Range(NamedTuple):
    """The integers start, start + 1, … stop - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start

    def shift(self, offset: int) -> "Range":
        return Range(self.start + offset, self.stop + offset)

    def contains(self, other: "Range") -> bool:
        return self.start <= other.start and other.stop <= self.stop


def overlap(a: Range, b: Range) -> Range:
    """What both hold; empty (and false) where they are apart."""
    start = max(a.start, b.start)
    return Range(start, max(start, min(a.stop, b.stop)))


def split(total: int, parts: int) -> list[Range]:
    """`parts` ranges that cover [0, total), sizes equal but for the first `total % parts`, which are larger by one."""
    if parts < 1:
        raise ValueError(f"{total} cannot be split into {parts} parts")
    size, rest = divmod(total, parts)
    return from_sizes([size + 1] * rest + [size] * (parts - rest))


def nearly_equal(total: int, parts: int) -> list[Range]:
    """Split into equal ranges of which only the last is larger, by `total % parts`. Collectives only know equal parts, and take
    the end of the last one separately."""
    size, rest = divmod(total, parts)
    return from_sizes([size] * (parts - 1) + [size + rest])


def split_by_shares(total: int, shares: Sequence[float | Fraction], unit: int = 1) -> list[Range]:
    """Ranges that cover [0, total) with sizes in proportion to `shares`, each a multiple of `unit`.

    Largest remainders get the units left over, ties the one listed first, so sizes differ from exact proportion by
    less than one unit. Raises ValueError if `unit` does not divide `total` or the shares have no positive sum.
    """
    alike = Counter(shares)
    ratios = {share: share.as_integer_ratio() for share in alike}
    common = lcm(*(denominator for _, denominator in ratios.values()))
    exact = {share: numerator * (common // denominator) for share, (numerator, denominator) in ratios.items()}
    whole = sum(exact[share] * number for share, number in alike.items())
    if whole <= 0 or min(exact.values()) < 0:
        raise ValueError(f"shares {list(shares)} must be non-negative with a positive sum")
    if total % unit:
        raise ValueError(f"{total} is not a multiple of the unit {unit}")
    units = total // unit
    parts = {share: divmod(units * own, whole) for share, own in exact.items()}
    counts = [parts[share][0] for share in shares]
    remainders = [parts[share][1] for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: -remainders[i])
    for index in by_remainder[: units - sum(counts)]:
        counts[index] += 1
    return from_sizes([count * unit for count in counts])


def from_sizes(sizes: Iterable[int]) -> list[Range]:
    """Consecutive ranges of the given sizes, from 0 on."""
    return [Range(*edges) for edges in pairwise(accumulate(sizes, initial=0))]


def show_ranks(ranks: Sequence[int]) -> str:
    """0, 1, 2, 3 as 0-3; others are listed."""
    consecutive = all(b == a + 1 for a, b in pairwise(ranks))
    return f"{ranks[0]}-{ranks[-1]}" if consecutive and len(ranks) > 2 else ", ".join(map(str, ranks))


def refine(ranges: Iterable[Range]) -> list[Range]:
    """The coarsest consecutive ranges of which every given range is a union (gaps between all of them left out)."""
    given = [r for r in ranges if r]
    cuts = sorted({edge for r in given for edge in r})
    covered = merge(given)
    return [piece for piece in map(Range, cuts, cuts[1:]) if any(whole.contains(piece) for whole in covered)]


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Return the same integers as sorted ranges that neither touch nor overlap."""
    merged: list[Range] = []
    for r in sorted(r for r in ranges if r):
        if merged and r.start <= merged[-1].stop:
            merged[-1] = Range(merged[-1].start, max(merged[-1].stop, r.stop))
        else:
            merged.append(r)
    return merged


def covers_exactly(ranges: Iterable[Range], whole: Range) -> bool:
    """Whether the ranges hold every integer of `whole` once and nothing else, in any order."""
    position = whole.start
    for r in sorted(r for r in ranges if r):
        if r.start != position:
            return False
        position = r.stop
    return position == whole.stop
