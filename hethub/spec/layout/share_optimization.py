"""The linear programme behind state shares: who steps how much of every group, so that the totals are the shares."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

Owners = tuple[tuple[int, ...], int]  # the ranks that may own elements of a group, and the group's size


class ShareOptimization:
    """The linear programme: one amount per (group, owner), then one deviation each, then the unnamed ranks' maximum."""

    def __init__(self, groups: Sequence[Owners], total: int, shares: Mapping[int, float]) -> None:
        self.groups, self.total, self.shares = groups, total, shares
        self.columns, count = [], 0
        for owners, _ in groups:
            self.columns.append(range(count, count + len(owners)))
            count += len(owners)
        self.num_amounts = count
        self.ranks = sorted({rank for owners, _ in groups for rank in owners})
        self.num_columns = 2 * count + 1

    def _row(self, entries: Mapping[int, float]) -> np.ndarray:
        row = np.zeros(self.num_columns)
        for column, value in entries.items():
            row[column] = value
        return row

    def _total_of(self, rank: int) -> dict[int, float]:
        """The coefficients of one rank's total."""
        return {
            column: 1.0
            for (owners, _), columns in zip(self.groups, self.columns, strict=True)
            for owner, column in zip(owners, columns, strict=True)
            if owner == rank
        }

    def solve(self) -> np.ndarray | None:
        """The amounts, or None where the named shares cannot be met."""
        cost = np.concatenate([np.zeros(self.num_amounts), np.ones(self.num_amounts), [4.0 * self.num_amounts]])
        above, bounds = self._deviations()
        for rank in self.ranks:
            if rank not in self.shares:
                above.append(self._row({**self._total_of(rank), self.num_columns - 1: -1.0}))
                bounds.append(0.0)
        equal, values = self._equalities(self.shares)
        result = self._minimise(cost, equal, values, above, bounds)
        return None if result is None else result[: self.num_amounts]

    def _deviations(self) -> tuple[list[np.ndarray], list[float]]:
        """Rows that make column n + i at least the distance of amount i from an even spread weighted by the shares."""
        weights = self._weights()
        above, bounds = [], []
        for (owners, size), columns in zip(self.groups, self.columns, strict=True):
            whole = sum(weights[rank] for rank in owners) or 1.0
            for rank, column in zip(owners, columns, strict=True):
                even = size * weights[rank] / whole
                for sign in (1.0, -1.0):
                    above.append(self._row({column: sign, self.num_amounts + column: -1.0}))
                    bounds.append(sign * even)
        return above, bounds

    def _weights(self) -> dict[int, float]:
        unnamed = [rank for rank in self.ranks if rank not in self.shares]
        rest = max(0.0, 1.0 - sum(self.shares.values())) / max(len(unnamed), 1)
        return {rank: self.shares.get(rank, rest) for rank in self.ranks}

    def _equalities(self, shares: Mapping[int, float]) -> tuple[list[np.ndarray], list[float]]:
        rows = [self._row(dict.fromkeys(columns, 1.0)) for columns in self.columns]
        values = [float(size) for _, size in self.groups]
        for rank, share in shares.items():
            rows.append(self._row(self._total_of(rank)))
            values.append(share * self.total)
        return rows, values

    def _minimise(
        self,
        cost: np.ndarray,
        equal: list[np.ndarray],
        values: list[float],
        above: list[np.ndarray],
        bounds: list[float],
    ) -> np.ndarray | None:
        from scipy.optimize import linprog  # local: importing it takes longer than most commands run

        scale = 1.0 / max(self.total, 1)
        result = linprog(
            cost,
            A_ub=np.array(above) if above else None,
            b_ub=np.array(bounds) * scale if above else None,
            A_eq=np.array(equal),
            b_eq=np.array(values) * scale,
            method="highs",
        )
        return result.x / scale if result.success else None

    def explain(self, stage: int) -> str:
        """Why the shares cannot be met: the first named rank that asks for too much or too little, and its limits."""
        for rank, share in self.shares.items():
            others = {other: value for other, value in self.shares.items() if other != rank}
            largest, least = self._extreme(rank, others, -1.0), self._extreme(rank, others, 1.0)
            if largest is not None and least is not None:
                if _down(largest) < _up(least):
                    return (
                        f"stages[{stage}].state_shares: rank {rank} is given {share:g} of the stage's state, but with the tensors it holds "
                        f"and the other shares it owns {least:.6g} whatever it is given; leave it out of state_shares."
                    )
                limit = f"at most {_down(largest):.6g}" if share > largest else f"at least {_up(least):.6g}"
                return (
                    f"stages[{stage}].state_shares: rank {rank} is given {share:g} of the stage's state, but with the tensors it holds and "
                    f"the other shares it can own {limit}; give it {limit}, or change the tensor shares."
                )
        return (
            f"stages[{stage}].state_shares: the shares {dict(self.shares)} cannot be met together, since some tensors have only "
            "holders whose shares are too small; raise their shares or name fewer ranks."
        )

    def _extreme(self, rank: int, others: Mapping[int, float], sign: float) -> float | None:
        """The largest (sign -1) or smallest (sign 1) fraction that `rank` can own when `others` keep their shares."""
        cost = sign * self._row(self._total_of(rank))
        result = self._minimise(cost, *self._equalities(others), [], [])
        return None if result is None else float(np.dot(result, self._row(self._total_of(rank)))) / max(self.total, 1)


def _down(fraction: float) -> float:
    """The fraction with six decimals, not above it (but for the solver's own error), so that what is offered is
    accepted."""
    return max(0.0, math.floor(fraction * 1e6 + 1e-3) / 1e6)


def _up(fraction: float) -> float:
    return math.ceil(fraction * 1e6 - 1e-3) / 1e6
