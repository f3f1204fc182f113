"""Which source each sample of a weighted mixture comes from: no state, no table, sources evenly spread.

The first source takes every (1 / share)th sample, rounded; what is left is shared out among the others in the same way.
So after n samples each source has given its share of them to within one sample per source.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

_BITS = 24  # of a share, as a whole number: sums stay exact up to 2^39 samples
_HALF = 1 << (_BITS - 1)


def shares_of(weights: Sequence[float]) -> list[int]:
    """Return, for each source but the last, its share of what the sources before it leave, in units of 2^-24: never 0, never all."""
    exact = [Fraction(weight) for weight in weights]
    left = [sum(exact[index:]) for index in range(len(exact))]
    return [
        min(max(1, round(own / rest * 2**_BITS)), 2**_BITS - 1) for own, rest in zip(exact[:-1], left, strict=False)
    ]


def draws(indices: NDArray[np.int64], shares: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source of each sample, and how many samples that source has given before it."""
    sources = np.full_like(indices, len(shares))
    places = indices.copy()  # among what is left for this source and those after it
    for number, share in enumerate(shares):
        open_ = sources == len(shares)
        before, after = _taken(places, share), _taken(places + 1, share)
        chosen = open_ & (after > before)
        sources[chosen] = number
        places = np.where(chosen, before, np.where(open_, places - before, places))
    return sources, places


def counts(num_samples: int, shares: Sequence[int]) -> list[int]:
    """How many of the first `num_samples` samples each source gives."""
    found, left = [], num_samples
    for share in shares:
        found.append(int(_taken(np.int64(left), share)))
        left -= found[-1]
    return [*found, left]


def _taken(places: "NDArray[np.int64] | np.int64", share: int) -> NDArray[np.int64]:
    return np.asarray((places * share + _HALF) >> _BITS)
