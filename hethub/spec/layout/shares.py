"""State shares: how much of each group of elements every owner steps, so that the totals are the plan's fractions."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from hethub.spec.errors import BadInput
from hethub.spec.ranges import Range, nearly_equal, split_by_shares

# Of the elements that could be cut evenly: all of them would leave the smallest owner nothing of the other buckets, and
# the vendors' collectives take no empty parts.
EVEN_PART = 0.9

if TYPE_CHECKING:
    from hethub.spec.layout.share_optimization import Owners


def owner_fractions(
    stage: int, groups: Sequence["Owners"], total: int, shares: Mapping[int, float]
) -> list[dict[int, float]]:
    """Return for each group the fraction of it that each of its owners steps.

    Named ranks get exactly their share of the stage's `total` elements (up to rounding); the others share the rest as
    equally as the groups allow, and among equal totals every group is spread as evenly as it can be. A linear
    programme: minimise the unnamed ranks' largest total, then the distance from an even spread.

    Raises BadInput where the shares cannot be met, naming the largest possible value.
    """
    if not shares and len(groups) == 1:
        return [{rank: 1 / len(groups[0][0]) for rank in groups[0][0]}]
    return list(_solved(stage, tuple(groups), total, tuple(shares.items())))


@lru_cache(maxsize=256)  # a plan's memory and seconds ask for each rank
def _solved(
    stage: int, groups: tuple["Owners", ...], total: int, shares: tuple[tuple[int, float], ...]
) -> tuple[dict[int, float], ...]:
    # Here, since most plans name no shares, and numpy takes its time.
    from hethub.spec.layout.share_optimization import ShareOptimization

    optimization = ShareOptimization(groups, total, dict(shares))
    amounts = optimization.solve()
    if amounts is None:
        raise BadInput(optimization.explain(stage))
    return tuple(
        {rank: max(0.0, amounts[column]) / max(size, 1) for rank, column in zip(owners, columns, strict=True)}
        for (owners, size), columns in zip(groups, optimization.columns, strict=True)
    )


def cut_buckets(sizes: Sequence[int], fractions: Sequence[float]) -> list[list[Range]]:
    """Return for each bucket of `sizes` elements the range of it that each owner steps. The totals are `fractions` of all
    elements, exact to one element.

    Nearly as many buckets as the smallest fraction allows are cut evenly, spread over the whole, and only the others
    unevenly (Cephalo, arXiv 2411.01075): even collectives are the vendors' fast ones.
    """
    if len(set(fractions)) == 1:
        return [nearly_equal(size, len(fractions)) for size in sizes]
    left = [part.size for part in split_by_shares(sum(sizes), fractions)]
    limit = EVEN_PART * len(fractions) * min(fractions)
    result: list[list[Range]] = []
    even = seen = 0
    for size in sizes:
        seen += size
        parts = nearly_equal(size, len(fractions))
        fits = all(part.size <= rest for part, rest in zip(parts, left, strict=True))
        result.append(parts if even + size <= limit * seen and fits else [])
        if result[-1]:
            even += size
            left = [rest - part.size for part, rest in zip(parts, left, strict=True)]
    for index, size in enumerate(sizes):
        if not result[index]:
            result[index] = split_by_shares(size, left)
            left = [rest - part.size for part, rest in zip(result[index], left, strict=True)]
    return result
