"""Which part of every axis each rank gets: a linear programme, in whole atoms, in turns with the search."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from hethub.spec.errors import BadInput
from hethub.spec.program import memory_limits
from hethub.synthesis.costs import Model, Shares
from hethub.synthesis.program import TRAINING_COPIES, Execution, Living, runs_beside
from hethub.synthesis.rules import Cut
from hethub.synthesis.search import USUAL, Found, Problem, Search

MOST_ROUNDS = 6
MEMORY_ROUNDS = 6


@dataclass(frozen=True)
class Best:
    """The cheapest program that the alternation met."""

    found: Found
    rounds: int

    @property
    def seconds(self) -> float:
        """The seconds of the step, with sums of gradients beside compute."""
        return self.found.execution.step_seconds


def alternate(model: Model, limits: Sequence[float] | None, options: Search = USUAL) -> Best:
    """Search and ratios in turns until neither gains, from shares by speed and from equal ones; the best is kept whole.
    No turn begins once a program is found and the time limit is over.

    Raises BadInput where no program fits the ranks' memory.
    """
    best: Best | None = None
    failure: BadInput | None = None
    problem = Problem(model)
    ends = time.monotonic() + options.time_limit_seconds
    for start in starts(model, limits):
        if best is not None and time.monotonic() > ends:
            break
        try:
            reached = _from(model, problem, start, limits, options, ends)
        except BadInput as error:
            failure = error
            continue
        if best is None or reached.seconds < best.seconds:
            best = reached
    if best is None:
        assert failure is not None
        raise failure
    return best


def _from(
    model: Model, problem: Problem, shares: Shares, limits: Sequence[float] | None, options: Search, ends: float
) -> Best:
    visible = 1.0
    best = Best(problem.search(shares, limits, options), 1)
    for number in range(2, MOST_ROUNDS + 1):
        execution = best.found.execution
        before, visible = visible, execution.visible
        better = fit(model, execution, limits) or execution.shares
        if (better == execution.shares and visible == before) or time.monotonic() > ends:
            return best
        try:
            reached = Best(problem.search(better, limits, options, visible), number)
        except BadInput:  # nothing fits, or not in time, for these shares; it did for those before
            return best
        if reached.seconds >= best.seconds * (1.0 - 1e-6):
            return best
        best = reached
    return best


def starts(model: Model, limits: Sequence[float] | None) -> list[Shares]:
    """Shares by speed, equal ones, and shares by the memory that ranks may use."""
    memory = np.array(memory_limits(model.costs.cluster) if limits is None else limits, dtype=float)
    return list(dict.fromkeys([by_speed(model), even(model), _proportional(model, memory)]))


def by_speed(model: Model) -> Shares:
    """Return shares in which each rank has as much of every axis as it is fast at the whole step."""
    totals = np.zeros(model.costs.size)
    for operator in model.graph.operators:
        totals += model.costs.operator(model.graph, operator)[1]
    return _proportional(model, 1.0 / np.maximum(totals, 1e-30))


def even(model: Model) -> Shares:
    return _proportional(model, np.ones(model.costs.size))


def _proportional(model: Model, weights: np.ndarray) -> Shares:
    parts = (weights / weights.sum()).tolist()
    return tuple(rounded(parts, axis.atoms) for axis in model.rules.axes)


def rounded(parts: Sequence[float], atoms: int) -> tuple[int, ...]:
    """Whole atoms nearest to `parts` of them, by largest remainders."""
    exact = np.asarray(parts, dtype=float) * atoms
    floor = np.floor(exact + 1e-9).astype(int)
    for rank in np.argsort(-(exact - floor), kind="stable")[: atoms - int(floor.sum())]:
        floor[rank] += 1
    return tuple(int(n) for n in floor)


def fit(model: Model, execution: Execution, limits: Sequence[float] | None) -> Shares | None:
    """The best shares for an unchanged program, in whole atoms; None where it cuts nothing, or nothing fits."""
    problem = _Shares(model, execution)
    if not problem.axes:
        return None
    for _ in range(MEMORY_ROUNDS):
        shares = problem.solve()
        if shares is None or limits is None:
            return shares
        living = Living(Execution(model, execution.numbers, execution.kept, shares))
        over = [rank for rank, most in enumerate(limits) if living.peak[rank] > most]
        if not over:
            return shares
        for rank in over:
            problem.limit_memory(rank, living, shares, limits[rank])
    return None


Row = tuple[int, dict[int, float], float]  # rank, factors of its atoms by axis, and the bound that they stay under


class _Shares:
    """The linear programme: a number of atoms per axis and rank, and one variable per sum of slowest ranks."""

    def __init__(self, model: Model, execution: Execution) -> None:
        self._model, self._execution = model, execution
        self._size = model.costs.size
        self._scale = 1.0 / max(execution.seconds, 1e-12)
        # Sums of what each rank takes for a whole axis, by axis and proportions: the slowest rank's is paid for.
        self._slowest: dict[tuple[int, tuple[float, ...]], np.ndarray] = {}
        self._largest: dict[tuple[int, ...], float] = {}  # paid per largest piece of these axes
        self._smallest: dict[int, float] = {}  # paid for all but the smallest piece of an axis
        self._memory: list[Row] = []
        self._collect_operators()
        self._collect_moves()
        touched = {axis for axis, _ in self._slowest} | set(self._smallest) | {a for key in self._largest for a in key}
        self.axes = sorted(touched)

    def _collect_operators(self) -> None:
        model = self._model
        for number, rule in enumerate(self._execution.rules):
            axis = model.rules.axis_of(number, rule)
            self._pay_slowest(axis, model.costs.operator(model.graph, model.graph.operators[number])[1])
        for name, tensor in model.graph.stepped.items():
            state = self._execution.kept[name]
            axis = model.rules.axis(tensor, state) if isinstance(state, Cut) else None
            self._pay_slowest(axis, model.costs.update(model.graph.tensors[tensor]))

    def _pay_slowest(self, axis: int | None, seconds: np.ndarray) -> None:
        if axis is not None and seconds.max():
            # What slows the ranks down in the same proportions has the same slowest rank.
            key = axis, tuple(np.round(seconds / seconds.max(), 4).tolist())
            self._slowest[key] = self._slowest.get(key, np.zeros(self._size)) + seconds * self._scale

    def _collect_moves(self) -> None:
        rules, costs = self._model.rules, self._model.costs
        for move in (move for moves in self._execution.moves.values() for move in moves):
            states = [state for state in (move.source, move.target) if isinstance(state, Cut)]
            axes = tuple(sorted({rules.axis(move.tensor, state) for state in states}))
            paid = costs.reduce_scatter.slope * self._model.graph.tensors[move.tensor].num_bytes * self._scale
            if runs_beside(self._model.graph, move):
                paid *= self._execution.visible
            if move.collective in ("all-gather", "reduce-scatter"):
                equal = (self._size - 1) / self._size
                self._smallest[axes[0]] = self._smallest.get(axes[0], 0.0) + paid / equal
            elif move.collective in ("padded all-gather", "all-to-all"):
                paid *= self._size if move.collective == "padded all-gather" else 1
                self._largest[axes] = self._largest.get(axes, 0.0) + paid

    def limit_memory(self, rank: int, living: Living, shares: Shares, limit: float) -> None:
        """What lives on `rank` when most does under `shares` stays within `limit` bytes: pieces change with the shares, all
        else, buffers of moves among it, is taken as it is there."""
        graph, rules = self._model.graph, self._model.rules
        kept = [(graph.parameters[name], state) for name, state in self._execution.kept.items()]
        pieces: dict[int, float] = {}
        for times, (tensor, state) in [(TRAINING_COPIES, k) for k in kept] + [(1, e) for e in living.at_peak(rank)]:
            if isinstance(state, Cut):
                axis = rules.axis(tensor, state)
                pieces[axis] = pieces.get(axis, 0.0) + graph.tensors[tensor].num_bytes * times
        held = sum(size * shares[axis][rank] / rules.axes[axis].atoms for axis, size in pieces.items())
        terms = {axis: size / limit for axis, size in pieces.items()}
        self._memory.append((rank, terms, 1.0 - (living.peak[rank] - held) / limit))
        self.axes = sorted({*self.axes, *terms})

    def _paid(self) -> list[list[Row]]:
        """For each variable that is paid for, the rows that it is at least as large as."""
        ranks = range(self._size)
        slowest = [[(r, {axis: float(rest[r])}, 0.0) for r in ranks] for (axis, _), rest in self._slowest.items()]
        largest = [[(r, {axis: paid}, 0.0) for r in ranks for axis in axes] for axes, paid in self._largest.items()]
        smallest = [[(r, {axis: -paid}, -paid) for r in ranks] for axis, paid in self._smallest.items()]
        return [*slowest, *largest, *smallest]

    def solve(self) -> Shares | None:
        """Whole atoms of every axis and rank; axes that the program does not touch keep theirs.

        The best parts are made whole by largest remainders; where memory limits them, whole atoms are searched for.
        """
        size, axes, paid = self._size, self.axes, self._paid()
        place = {axis: number * size for number, axis in enumerate(axes)}
        atoms = {axis: self._model.rules.axes[axis].atoms for axis in axes}
        counts, columns = len(axes) * size, len(axes) * size + len(paid)
        rows = [(row, counts + number) for number, own in enumerate(paid) for row in own]
        rows += [(row, -1) for row in self._memory]
        matrix = lil_matrix((len(rows), columns))
        for number, ((rank, terms, _), variable) in enumerate(rows):
            for axis, factor in terms.items():
                matrix[number, place[axis] + rank] = factor / atoms[axis]
            if variable >= 0:
                matrix[number, variable] = -1.0
        sums = lil_matrix((len(axes), columns))
        for number, axis in enumerate(axes):
            sums[number, place[axis] : place[axis] + size] = 1.0
        totals = [atoms[axis] for axis in axes]
        answer = milp(
            [0.0] * counts + [1.0] * len(paid),
            integrality=[1 if self._memory else 0] * counts + [0] * len(paid),
            bounds=Bounds(0.0, [atoms[axis] for axis in axes for _ in range(size)] + [np.inf] * len(paid)),
            constraints=[
                LinearConstraint(matrix.tocsr(), ub=[bound for (_, _, bound), _ in rows]),
                LinearConstraint(sums.tocsr(), totals, totals),
            ],
            options={"mip_rel_gap": 1e-4, "time_limit": 10.0},
        )
        if answer.x is None:
            return None
        shares = list(self._execution.shares)
        for axis in axes:
            shares[axis] = rounded(answer.x[place[axis] : place[axis] + size] / atoms[axis], atoms[axis])
        return tuple(shares)
