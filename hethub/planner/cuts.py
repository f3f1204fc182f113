"""The best equal cuts over all settings by rough estimate, without looking at settings that cannot be among them."""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np

from hethub.planner.costs import UnitCosts
from hethub.planner.draft import Draft, to_draft
from hethub.planner.equal import Cut, Sorts, cut_equally, sorts_of
from hethub.planner.problem import Combination, Problem
from hethub.planner.settings import Line, combinations, lines, orders

PER_COMBINATION = 3  # cuts kept of one combination, so that the finalists differ
REORDERED = 8  # leading cuts tried with the kinds in every order
ESTIMATE_ERR = 1.4  # rough estimates leave out reductions and waits; never off by more than this where checked

Bounded = Sequence[tuple[float, Combination, Sorts]]


class Entry(NamedTuple):
    """A cut with its setting, as kept in a heap whose top is the worst: `key` is the negative estimate."""

    key: float
    number: int
    combination: Combination
    sorts: Sorts
    line: Line
    cut: Cut

    def draft(self, problem: Problem) -> Draft:
        sizes = [(layers, self.line.replicas) for layers in self.cut.layers]
        return to_draft(problem, sizes, self.line.units(problem, self.combination.degrees), self.combination)


class Kept:
    """The `number` best entries, and below which estimate a new one would enter."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.entries: list[Entry] = []
        self.best = float("inf")

    @property
    def limit(self) -> float:
        worst = -self.entries[0].key if len(self.entries) == self.number else float("inf")
        return min(worst, ESTIMATE_ERR * self.best)

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in heapq.nlargest(PER_COMBINATION, entries):
            self.best = min(self.best, -entry.key)
            if len(self.entries) < self.number:
                heapq.heappush(self.entries, entry)
            elif entry > self.entries[0]:
                heapq.heapreplace(self.entries, entry)


def bounded_combinations(problem: Problem, costs: UnitCosts) -> Bounded:
    """All combinations with the busy time of perfect balance, which none of their plans beats, smallest first."""
    work = problem.batch.global_batch * problem.model.layers
    every = [(c, sorts_of(problem, costs, c)) for c in combinations(problem)]
    return sorted(((work / sorts.rate, c, sorts) for c, sorts in every), key=lambda entry: entry[0])


def pure(composition: np.ndarray) -> bool:
    """Whether every stage holds one kind of unit only, as HETHUB's stages do."""
    return bool(np.all((composition > 0).sum(axis=1) == 1))


PURE_CUTS = 32  # kept of those whose stages hold one kind each


class Best(NamedTuple):
    """The best cuts of all, and of those whose stages hold one kind each; best first."""

    cuts: list[Entry]
    pure: list[Entry]


def best_cuts(problem: Problem, bounded: Bounded, number: int, *, memory_counts: bool = True) -> Best:
    """The `number` best cuts, and the best pure ones, in one pass over all settings.

    A setting is not cut where one tile's way through all layers and the busy time of perfect balance exceed the worst
    kept, or the best by more than the estimate can err.
    """
    kept, kept_pure = Kept(number), Kept(PURE_CUTS)
    order = count()
    sharded = max(problem.zeros) > 0
    for bound, combination, sorts in bounded:
        if bound >= max(kept.limit, kept_pure.limit):
            break
        through = float(sorts.tile.min()) * problem.model.layers
        units = int(sorts.counts.sum())
        own: list[Entry] = []
        own_pure: list[Entry] = []
        for line in lines(problem, tuple(int(n) for n in sorts.counts)):
            least = bound + through * (1 - 2 / (units // line.replicas + 1))
            if least >= max(kept.limit, kept_pure.limit):
                continue
            if memory_counts and not sorts.room_for(problem.model.layers, line.replicas, sharded):
                continue
            composition = line.composition(sorts)
            is_pure = pure(composition)
            if least >= kept.limit and not is_pure:
                continue
            cut = cut_equally(problem, sorts, composition, memory_counts=memory_counts)
            if cut is not None:
                entry = Entry(-cut.seconds, next(order), combination, sorts, line, cut)
                own.append(entry)
                own_pure += [entry] if is_pure else []
        kept.add(own)
        kept_pure.add(own_pure)
    return Best(sorted(kept.entries, reverse=True), sorted(kept_pure.entries, reverse=True))


def reordered(problem: Problem, leaders: Sequence[Entry], *, memory_counts: bool) -> list[Entry]:
    """The leading cuts with the kinds in every order that was not looked at before."""
    entries = []
    seen = {(e.combination, e.line) for e in leaders}
    for entry in leaders[:REORDERED]:
        for order in orders(problem):
            line = replace(entry.line, order=order)
            if entry.line.side_by_side or len(entry.cut.layers) == 1 or (entry.combination, line) in seen:
                continue
            seen.add((entry.combination, line))
            cut = cut_equally(problem, entry.sorts, line.composition(entry.sorts), memory_counts=memory_counts)
            if cut is not None:
                entries.append(entry._replace(line=line, cut=cut))
    return entries
