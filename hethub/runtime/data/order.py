"""A seeded permutation with random access: no state, no table, the same numbers on every machine and NumPy."""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def permuted(positions: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where each position in [0, size) goes under the permutation of (seed, epoch).

    A Feistel network over the smallest domain of 4^k >= size, applied again to what falls outside [0, size)
    ("cycle walking", Black and Rogaway 2002): a bijection on the domain stays one on [0, size).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = _round_keys(seed, epoch)
    values = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := values >= np.uint64(size)).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection on [0, 4^half)."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half) | right


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    base = _mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(epoch)
    return _mix(_mix(base) + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), elementwise."""
    values = (values ^ (values >> _SHIFTS[0])) * _MULTIPLIERS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return values ^ (values >> _SHIFTS[2])
