"""Find the best cuts into equally wide stages by rough estimate. Settings that cannot be among the best are not cut."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import Candidate, to_candidate
from hethub.planner.generate.equal import Arrangements, Stages, cut_equally
from hethub.planner.generate.table import Table, orders
from hethub.planner.problem.problem import Problem

PER_SORT = 3  # cuts kept of one combination or number of stages, so that the finalists differ
ESTIMATE_ERR = 1.4  # rough estimates leave out reductions and waits; never off by more than this where checked
FIRST_LOOK, BATCH = 512, 4096  # lines cut at once

SIDE_BY_SIDE = -1  # in place of an order


class Cut(NamedTuple):
    """A cut with its estimated step: its combination (a row of the table), its order (see `Lines`), and the layers of each
    stage."""

    seconds: float
    row: int
    order: int
    layers: tuple[int, ...]


class Lines(NamedTuple):
    """Ways to line up units into stages of equally many replicas, as arrays [line].

    `rows` are combinations, `stages` numbers of stages. `orders` are indices of orders of the device types, one behind the
    other along the line, or SIDE_BY_SIDE, where every stage holds the same mixture of device types."""

    rows: np.ndarray
    orders: np.ndarray
    stages: np.ndarray

    def at(self, chosen: np.ndarray) -> "Lines":
        return Lines(*(part[chosen] for part in self))

    def replicas(self, table: Table) -> np.ndarray:
        return table.units[self.rows] // self.stages


def best_cuts(
    problem: Problem, table: Table, number: int, *, by_depth: bool = False, pure: bool = False
) -> list[Candidate]:
    """Return the `number` best cuts, the best first; if `pure`, only cuts whose stages hold one device type each.

    A lower bound of a line's step is the time of one microbatch through all layers and that of perfect balance. Lines are
    cut in the order of this bound until it exceeds the worst cut kept, or the best one by more than estimates can err.
    `by_depth` keeps a few cuts of each number of stages, instead of each combination.
    """
    tried = orders(problem, table.used)
    lines = _all_lines(problem, table, len(tried))
    if pure:
        lines = lines.at(_is_pure(table, lines))
    least = table.bound[lines.rows] + table.through[lines.rows] * (1 - 2 / (lines.stages + 1))
    ranked = np.argsort(least, kind="stable")
    lines, least = lines.at(ranked), least[ranked]
    kept: list[Cut] = []
    worst = limit = float("inf")  # below which estimate a new one would enter; what lines must be below
    start, stop = 0, FIRST_LOOK
    while start < len(least) and least[start] < limit:
        own = start + np.flatnonzero(least[start:stop] < limit)
        some = lines.at(own[np.argsort(lines.stages[own], kind="stable")])  # the shallow ones first among equals
        kept = _best([*kept, *_cut(problem, table, some, tried, worst)], number, by_depth)
        if len(kept) == number:
            worst = kept[-1].seconds
        limit = worst if by_depth or not kept else min(worst, ESTIMATE_ERR * kept[0].seconds)
        start, stop = stop, stop + BATCH
    return [_candidate(problem, table, tried, cut) for cut in kept]


def _cut(problem: Problem, table: Table, lines: Lines, tried: Sequence[tuple[int, ...]], below: float) -> Iterator[Cut]:
    """Return the best cut of each line whose estimate is below `below` seconds."""
    arranged = compositions(table, lines, tried)
    layers, seconds = cut_equally(problem, table, arranged)
    near = np.flatnonzero(seconds < below)
    each = (own[near].tolist() for own in (seconds, lines.rows, lines.orders))
    return map(Cut, *each, (tuple(layers[arranged.stages.at(one)].tolist()) for one in near.tolist()))


def _best(cuts: Iterable[Cut], number: int, by_depth: bool) -> list[Cut]:
    """Return the `number` best cuts, at most PER_SORT of each combination, or of each number of stages."""
    per_sort, kept = Counter[int](), list[Cut]()
    for cut in sorted(cuts, key=itemgetter(0)):
        sort = len(cut.layers) if by_depth else cut.row
        if per_sort[sort] < PER_SORT and len(kept) < number:
            per_sort[sort] += 1
            kept.append(cut)
    return kept


def _candidate(problem: Problem, table: Table, tried: Sequence[tuple[int, ...]], cut: Cut) -> Candidate:
    """Return the candidate of a cut: give its units to the stages, one device type after another or side by side."""
    combination, stages, beside = table.combinations[cut.row], len(cut.layers), cut.order == SIDE_BY_SIDE
    order = sorted(table.used) if beside else tried[cut.order]
    own = [problem.units(device_type, combination.degrees[device_type]) for device_type in order]
    lines = own if beside else [sum(own, ())]  # of each as many in every stage
    formed = [
        (layers, [unit for line in lines for unit in line[s * len(line) // stages : (s + 1) * len(line) // stages]])
        for s, layers in enumerate(cut.layers)
    ]
    return to_candidate(problem, formed, combination)


def _all_lines(problem: Problem, table: Table, num_orders: int) -> Lines:
    """Return a line for each number of stages that divides a combination's units evenly, in each order and side by side."""
    given, units = problem.constraints, table.units
    unlike = (table.counts > 0).sum(axis=1) > 1
    found = [(np.zeros(0, dtype=np.int64), 0, 1)]
    for stages in range(1, min(problem.model.layers, int(units.max())) + 1):
        if given.pp not in (None, stages):
            continue
        able = units % stages == 0
        if given.dp is not None:
            able &= units // stages == given.dp
        rows = np.flatnonzero(able)
        found += [(rows, order, stages) for order in range(num_orders if stages > 1 else 1)]
        if stages > 1:
            even = unlike[rows] & (table.counts[rows] % stages == 0).all(axis=1)
            found.append((rows[even], SIDE_BY_SIDE, stages))
    every, order, depth = zip(*found, strict=True)
    sizes = list(map(len, every))
    return Lines(np.concatenate(every), np.repeat(order, sizes), np.repeat(depth, sizes))


def _is_pure(table: Table, lines: Lines) -> np.ndarray:
    """Return which lines have only stages of one device type each, as HETHUB's plans have."""
    counts = table.counts[lines.rows]
    pure = (counts % lines.replicas(table)[:, None] == 0).all(axis=1) & (lines.orders != SIDE_BY_SIDE)
    return pure | ((counts > 0).sum(axis=1) == 1)


def compositions(table: Table, lines: Lines, tried: Sequence[tuple[int, ...]]) -> Arrangements:
    """Return how many replicas of each sort are in each stage of the lines."""
    counts, device_types, stages = table.counts[lines.rows], table.device_types[lines.rows], Stages(lines.stages)
    rank = np.zeros((len(tried), device_types.max() + 1), dtype=np.int64)
    for index, order in enumerate(tried):
        rank[index, list(order)] = range(len(order))
    place = rank[np.maximum(lines.orders, 0)[:, None], device_types] * counts.shape[1] + np.arange(counts.shape[1])
    before = place[:, None, :] < place[:, :, None]  # [line, sort, other]: whether the other comes first
    start = (before * counts[:, None, :]).sum(axis=2)
    replicas = lines.replicas(table).take(stages.of)
    edge = stages.before * replicas
    stop = np.minimum((start + counts).T.take(stages.of, axis=1), edge + replicas)
    composition = np.maximum(stop - np.maximum(start.T.take(stages.of, axis=1), edge), 0)
    beside = np.flatnonzero((lines.orders == SIDE_BY_SIDE).take(stages.of))
    composition[:, beside] = (counts // lines.stages[:, None]).T.take(stages.of[beside], axis=1)
    return Arrangements(lines.rows, stages, composition)
