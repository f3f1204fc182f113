"""`auto`: all settings cut exactly and estimated, the best judged by the predictor, then improved step by step."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from hethub.planner.draft import Draft, DraftStage, Seat
from hethub.planner.equal import Combination, Cut, Sorts, cut_equally, sorts_of
from hethub.planner.judge import Judge, Verdict
from hethub.planner.moves import neighbours
from hethub.planner.partition import Partitioner, Setting
from hethub.planner.problem import Problem, Unit
from hethub.planner.settings import Line, combinations, lines, orders


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of the space is looked at before the answer is given."""

    cuts: int  # kept by rough estimate
    free_cells: int  # of the dynamic programme over lines with free numbers of replicas
    finalists: int  # judged by the predictor
    climbs: int
    steps: int
    tried_per_step: int
    tiles: int  # replayed one by one by the judge; plans whose stages are alike need none


def effort_for(problem: Problem, *, bound: bool = False) -> Effort:
    """More for small clusters, whose plans are judged in a millisecond; less for a part of the upper bound."""
    size = problem.size
    if size <= 16:
        full = Effort(cuts=96, free_cells=4_000_000, finalists=32, climbs=4, steps=40, tried_per_step=16, tiles=100_000)
    elif size <= 128:
        full = Effort(cuts=64, free_cells=2_000_000, finalists=24, climbs=2, steps=12, tried_per_step=8, tiles=20_000)
    else:
        full = Effort(cuts=64, free_cells=2_000_000, finalists=20, climbs=1, steps=8, tried_per_step=6, tiles=10_000)
    if not bound:
        return full
    return replace(
        full, finalists=full.finalists // 3, climbs=1, steps=full.steps // 2, tiles=full.tiles // 4, free_cells=full.free_cells // 4
    )


PER_COMBINATION = 3  # cuts kept of one combination, so that the finalists differ


def search(problem: Problem, judge: Judge, effort: Effort, starts: Iterable[Draft] = ()) -> Verdict | None:
    """The best plan found, or None where none fits; `starts` are judged first, so the answer is never worse than they."""
    judge.tiles_left = effort.tiles
    for draft in starts:
        judge(draft)
    every = [(c, sorts_of(problem, judge.costs, c)) for c in combinations(problem)]
    for memory_counts in (True, False):
        found = promising(problem, judge, effort, every, memory_counts=memory_counts and not judge.ignore_memory)
        for draft in found:
            if judge.out_of_time:
                break
            judge(draft)
        if judge.fitting or judge.ignore_memory:
            break
        every = thriftiest(problem, every)
    leaders = sorted(judge.fitting.values(), key=lambda verdict: verdict.seconds)[: effort.climbs]
    if not leaders and judge.closest is not None:
        leaders = [judge.closest]
    for leader in leaders:
        climb(leader, problem, judge, effort)
    return judge.best


def thriftiest(problem: Problem, every: Sequence[tuple[Combination, Sorts]]) -> list[tuple[Combination, Sorts]]:
    """The combinations that need the least memory, for where no cut fitted."""
    return [
        (c, sorts)
        for c, sorts in every
        if c.recompute == problem.recomputes[-1] and c.micro_batches[0] == problem.micro_batches[0]
    ]


def promising(
    problem: Problem,
    judge: Judge,
    effort: Effort,
    every: Sequence[tuple[Combination, Sorts]],
    *,
    memory_counts: bool = True,
) -> list[Draft]:
    """The drafts with the smallest estimates, best first: equal cuts of all lines, then free ones where they can win."""
    work = problem.batch.global_batch * problem.model.layers
    bounded = sorted(((work / sorts.rate, c, sorts) for c, sorts in every), key=lambda entry: entry[0])
    drafts = equal_drafts(problem, judge, effort, bounded, memory_counts)
    estimated = sorted(((judge.surrogate.seconds(d), i, d) for i, d in enumerate(drafts)), key=lambda e: e[:2])
    if problem.constraints.dp is None and not judge.out_of_time:
        best = estimated[0][0] if estimated else float("inf")
        free = free_drafts(problem, judge, effort, bounded, best, memory_counts)
        estimated += [(judge.surrogate.seconds(d), len(estimated) + i, d) for i, d in enumerate(free)]
        estimated.sort(key=lambda e: e[:2])
    return [draft for _, _, draft in estimated[: effort.finalists]]


Bounded = Sequence[tuple[float, Combination, Sorts]]


def equal_drafts(problem: Problem, judge: Judge, effort: Effort, bounded: Bounded, memory_counts: bool) -> list[Draft]:
    """The best equal cuts by rough estimate; a combination whose bound exceeds the worst kept is not cut at all."""
    kept: list[tuple[float, int, Combination, Line, Cut]] = []
    order = count()
    for bound, combination, sorts in bounded:
        if judge.out_of_time or (len(kept) == effort.cuts and bound >= -kept[0][0]):
            break
        own = []
        through = float(sorts.tile.min()) * problem.model.layers  # one tile through all layers at the fastest
        for line in lines(problem, tuple(int(n) for n in sorts.counts)):
            stages = int(sorts.counts.sum()) // line.replicas
            if len(kept) == effort.cuts and bound + through * (1 - 2 / (stages + 1)) >= -kept[0][0]:
                continue
            cut = cut_equally(problem, sorts, line.composition(sorts), memory_counts=memory_counts)
            if cut is not None:
                own.append((-cut.seconds, next(order), combination, line, cut))
        for entry in heapq.nlargest(PER_COMBINATION, own):
            if len(kept) < effort.cuts:
                heapq.heappush(kept, entry)
            elif entry > kept[0]:
                heapq.heapreplace(kept, entry)
    return [_equal_draft(problem, combination, line, cut) for _, _, combination, line, cut in kept]


def _equal_draft(problem: Problem, combination: Combination, line: Line, cut: Cut) -> Draft:
    sizes = [line.replicas] * len(cut.layers)
    units = line.units(problem, combination.degrees)
    return to_draft(problem, tuple(zip(cut.layers, sizes, strict=True)), units, combination)


def free_drafts(
    problem: Problem, judge: Judge, effort: Effort, bounded: Bounded, best: float, memory_counts: bool
) -> list[Draft]:
    """Partitions with free numbers of replicas, for combinations whose bound leaves room below `best`."""
    drafts: list[Draft] = []
    spent = 0
    for bound, combination, _ in bounded:
        for order in orders(problem):
            units = Line(order, 1).units(problem, combination.degrees)
            setting = Setting(units, combination.micro_batches, combination.recompute)
            depths = _depths(problem, setting)
            spent += 8 * max(depths, default=0) * problem.model.layers**2
            if bound >= best or spent > effort.free_cells or judge.out_of_time:
                return drafts
            partitioner = Partitioner(problem, judge.costs, setting, memory_counts=memory_counts)
            for partition in partitioner.partitions(depths, best):
                drafts.append(to_draft(problem, partition.stages, units, combination))
    return drafts


MOST_FREE_STAGES = 16


def _depths(problem: Problem, setting: Setting) -> list[int]:
    """The numbers of stages worth trying with free numbers of replicas."""
    deepest = min(problem.model.layers, len(setting.line), MOST_FREE_STAGES)
    return [depth for depth in range(1, deepest + 1) if problem.constraints.pp in (None, depth)]


def to_draft(
    problem: Problem, stages: Sequence[tuple[int, int]], units: Sequence[Unit], combination: Combination
) -> Draft:
    """Stages of (layers, number of units) as a draft: units in line order, micro-batches by kind."""
    drafted, position = [], 0
    for layers, size in stages:
        own = sorted(units[position : position + size], key=lambda unit: unit.ranks)  # one spelling of equal plans
        position += size
        seats = tuple(Seat(unit, combination.micro_batches[unit.kind]) for unit in own)
        drafted.append(DraftStage(layers, seats, combination.recompute, max(problem.zeros)))
    return Draft(tuple(drafted))


def climb(verdict: Verdict, problem: Problem, judge: Judge, effort: Effort) -> Verdict:
    """The best neighbour of the best neighbour …; of each step's neighbours the judge sees those estimated best."""
    best = verdict
    for _ in range(effort.steps):
        better = _step(best, problem, judge, effort)
        if better is best:
            return best
        best = better
    return best


def _step(best: Verdict, problem: Problem, judge: Judge, effort: Effort) -> Verdict:
    slowest = judge.surrogate.slowest(best.draft)
    near = {draft: None for draft in neighbours(best.draft, problem, slowest)}
    if best.prediction.fits:
        ranked = sorted(near, key=judge.surrogate.seconds)[: effort.tried_per_step]
    else:
        ranked = list(near)
    for draft in ranked:
        if judge.out_of_time:
            break
        candidate = judge(draft)
        if candidate is not None and judge.better(candidate, best):
            return candidate
    return best
