"""The best equal cuts over all settings by rough estimate, without looking at settings that cannot be among them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from hethub.planner.draft import Draft, to_draft
from hethub.planner.equal import cut_equally, room_for
from hethub.planner.problem import Combination, Problem
from hethub.planner.settings import Line, main_orders, orders
from hethub.planner.table import Table

PER_COMBINATION = 3  # cuts kept of one combination, so that the finalists differ
REORDERED = 8  # leading cuts tried with the kinds in every order
ESTIMATE_ERR = 1.4  # rough estimates leave out reductions and waits; never off by more than this where checked
PURE_CUTS = 32  # kept of those whose stages hold one kind each
FIRST_LOOK, BATCH = 512, 4096  # lines cut at once

SIDE_BY_SIDE = -1  # in place of an order


@dataclass(frozen=True)
class Entry:
    """A cut with its setting and estimated step."""

    seconds: float
    row: int
    combination: Combination
    line: Line
    layers: tuple[int, ...]

    def draft(self, problem: Problem) -> Draft:
        sizes = [(layers, self.line.replicas) for layers in self.layers]
        return to_draft(problem, sizes, self.line.units(problem, self.combination.degrees), self.combination)


class Lines(NamedTuple):
    """Lines of equally many replicas per stage, as arrays: combination, order (an index, or side by side), stages."""

    rows: np.ndarray
    orders: np.ndarray
    stages: np.ndarray

    def at(self, chosen: np.ndarray) -> "Lines":
        return Lines(*(part[chosen] for part in self))

    def replicas(self, table: Table) -> np.ndarray:
        replicas: np.ndarray = table.counts[self.rows].sum(axis=1) // self.stages
        return replicas


class Best(NamedTuple):
    """The best cuts of all, and of those whose stages hold one kind each; best first."""

    cuts: list[Entry]
    pure: list[Entry]


class _Kept:
    """The `number` best entries so far, few of each combination, and below which estimate a new one would enter."""

    def __init__(self, number: int) -> None:
        self.number, self.limit, self.worst = number, float("inf"), float("inf")
        self.entries: list[Entry] = []

    def add(self, entries: Sequence[Entry]) -> None:
        per_combination: Counter[int] = Counter()
        kept: list[Entry] = []
        for entry in sorted([*self.entries, *entries], key=lambda entry: entry.seconds):
            if len(kept) == self.number:
                break
            if per_combination[entry.row] < PER_COMBINATION:
                per_combination[entry.row] += 1
                kept.append(entry)
        self.entries = kept
        if kept:
            self.worst = kept[-1].seconds if len(kept) == self.number else float("inf")
            self.limit = min(self.worst, ESTIMATE_ERR * kept[0].seconds)


def best_cuts(problem: Problem, table: Table, number: int, *, memory_counts: bool = True) -> Best:
    """The `number` best cuts, and the best pure ones, in one pass over all settings.

    A setting is not cut where one tile's way through all layers and the busy time of perfect balance exceed the worst
    kept, or the best by more than the estimate can err.
    """
    tried = main_orders(problem)
    lines = _all_lines(problem, table, len(tried))
    if memory_counts:
        lines = lines.at(room_for(problem, table, lines.rows, lines.replicas(table)))
    least = table.bound[lines.rows] + table.through[lines.rows] * (1 - 2 / (lines.stages + 1))
    ranked = np.argsort(least, kind="stable")
    lines, least = lines.at(ranked), least[ranked]
    pure = _is_pure(table, lines)
    kept, kept_pure = _Kept(number), _Kept(PURE_CUTS)
    start, stop = 0, FIRST_LOOK
    while start < len(least) and least[start] < max(kept.limit, kept_pure.limit):
        own = np.arange(start, min(stop, len(least)))
        limits = np.where(pure[own], max(kept.limit, kept_pure.limit), kept.limit)
        own = own[least[own] < limits]
        limits = np.where(pure[own], max(kept.worst, kept_pure.worst), kept.worst)
        entries = _cut(problem, table, lines.at(own), tried, limits, memory_counts=memory_counts)
        kept.add(list(entries.values()))
        kept_pure.add([entry for i, entry in entries.items() if pure[own[i]]])
        start, stop = stop, stop + BATCH
    return Best(kept.entries, kept_pure.entries)


def reordered(problem: Problem, table: Table, leaders: Sequence[Entry], *, memory_counts: bool) -> list[Entry]:
    """The leading cuts with the kinds in every order that was not looked at before."""
    every = orders(problem)
    seen = {(entry.row, entry.line) for entry in leaders}
    wanted = []
    for entry in leaders[:REORDERED]:
        for index, order in enumerate(every):
            line = replace(entry.line, order=order)
            if not entry.line.side_by_side and len(entry.layers) > 1 and (entry.row, line) not in seen:
                seen.add((entry.row, line))
                wanted.append((entry.row, index, len(entry.layers)))
    if not wanted:
        return []
    lines, limits = Lines(*np.array(wanted).T), np.full(len(wanted), np.inf)
    return list(_cut(problem, table, lines, every, limits, memory_counts=memory_counts).values())


def _all_lines(problem: Problem, table: Table, num_orders: int) -> Lines:
    """Every number of stages that divides a combination's units evenly, in the main orders and side by side."""
    given, units = problem.constraints, table.counts.sum(axis=1)
    unlike = (table.counts > 0).sum(axis=1) > 1
    found = []
    for stages in range(1, min(problem.model.layers, int(units.max())) + 1):
        if given.pp not in (None, stages):
            continue
        able = units % stages == 0
        if given.dp is not None:
            able &= units // stages == given.dp
        rows = np.nonzero(able)[0]
        found += [(rows, order, stages) for order in range(num_orders if stages > 1 else 1)]
        if stages > 1:
            even = able & unlike & (table.counts % stages == 0).all(axis=1)
            found.append((np.nonzero(even)[0], SIDE_BY_SIDE, stages))
    return Lines(
        np.concatenate([rows for rows, _, _ in found] or [np.zeros(0, dtype=np.int64)]),
        np.concatenate([np.full(len(rows), order) for rows, order, _ in found] or [np.zeros(0, dtype=np.int64)]),
        np.concatenate([np.full(len(rows), stages) for rows, _, stages in found] or [np.zeros(0, dtype=np.int64)]),
    )


def _is_pure(table: Table, lines: Lines) -> np.ndarray:
    """Whether every stage holds one kind of unit only, as HETHUB's stages do."""
    counts = table.counts[lines.rows]
    pure: np.ndarray = (counts % lines.replicas(table)[:, None] == 0).all(axis=1) & (lines.orders != SIDE_BY_SIDE)
    return pure | ((counts > 0).sum(axis=1) == 1)


def compositions(table: Table, lines: Lines, tried: Sequence[tuple[int, ...]]) -> np.ndarray:
    """[line, stage, sort]: how many replicas of each sort a stage has; all lines have equally many stages."""
    stages = int(lines.stages[0])
    counts, kinds = table.counts[lines.rows], table.kinds[lines.rows]
    rank = np.array([[order.index(kind) for kind in range(len(order))] for order in tried])
    place = rank[np.maximum(lines.orders, 0)[:, None], kinds] * counts.shape[1] + np.arange(counts.shape[1])
    before = place[:, None, :] < place[:, :, None]  # [line, sort, other]: whether the other comes first
    start = (before * counts[:, None, :]).sum(axis=2)[:, None, :]
    edges = np.arange(stages + 1)[None, :, None] * lines.replicas(table)[:, None, None]
    stop = start + counts[:, None, :]
    inside = np.minimum(stop, edges[:, 1:]) - np.maximum(start, edges[:, :-1])
    even = np.broadcast_to((counts // stages)[:, None, :], inside.shape)
    together: np.ndarray = np.where((lines.orders == SIDE_BY_SIDE)[:, None, None], even, np.maximum(inside, 0))
    return together


def _cut(
    problem: Problem,
    table: Table,
    lines: Lines,
    tried: Sequence[tuple[int, ...]],
    limits: np.ndarray,
    *,
    memory_counts: bool,
) -> dict[int, Entry]:
    """The cuts of all lines that have one below the line's limit, by the line's index."""
    found = {}
    by_depth = sorted(range(len(lines.rows)), key=lambda i: int(lines.stages[i]))
    for _, group in groupby(by_depth, key=lambda i: int(lines.stages[i])):
        index = np.array(list(group))
        own = lines.at(index)
        cuts = cut_equally(problem, table, own.rows, compositions(table, own, tried), memory_counts=memory_counts)
        replicas = own.replicas(table)
        for i in np.nonzero(cuts.seconds < limits[index])[0]:
            together = own.orders[i] == SIDE_BY_SIDE
            order = tuple(range(len(problem.kinds))) if together else tried[own.orders[i]]
            found[int(index[i])] = Entry(
                seconds=float(cuts.seconds[i]),
                row=int(own.rows[i]),
                combination=table.combinations[own.rows[i]],
                line=Line(order, int(replicas[i]), bool(together)),
                layers=tuple(int(x) for x in cuts.layers[i]),
            )
    return found
