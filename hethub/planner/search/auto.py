"""`auto`: all settings cut exactly and estimated, the best judged by the predictor, then improved step by step."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hethub.planner.candidate.candidate import Draft, to_draft
from hethub.planner.candidate.settings import Line, orders
from hethub.planner.estimate.estimator import Surrogate
from hethub.planner.estimate.microbatch_sizes import fitted
from hethub.planner.evaluate.evaluator import Judge, Verdict
from hethub.planner.exhaustive.search import search_tiny
from hethub.planner.generate.cuts import Best, Entry, best_cuts, reordered
from hethub.planner.generate.families import FAMILIES, Family
from hethub.planner.generate.kind_stages import kind_drafts
from hethub.planner.generate.partition import Partitioner, Setting
from hethub.planner.generate.small import MOST_UNITS, small_drafts
from hethub.planner.generate.table import Table
from hethub.planner.problem.problem import Problem
from hethub.planner.search.effort import Effort
from hethub.planner.search.neighbours import neighbourhoods, neighbours, with_room

FAMILY_FINALISTS = 4  # judged of each family
FAMILY_MICROBATCHES = 200_000  # replayed for these: unlike replicas, of which a family's plans are made, take many
FAR = 1.15  # times the best: a family's draft estimated to take longer is not judged, and small changes lead no further
NEAR = 1.05  # times the shortest estimate: the most with which drafts of one kind a stage are looked at
MOST_LEADERS = 3  # times as many finalists: looked at for some that can be judged
WHOLE_FINALISTS = 3  # of its drafts that carry their plan
WHOLE_MICROBATCHES = 1_000_000  # of these, since equal replicas are replayed once
TOGETHER, MOST_STARTS = 32, 64  # drafts weighed at once, and in all once one is known that fits
MOST_FREE_STAGES = 16  # of lines with free numbers of replicas


def search(problem: Problem, judge: Judge, effort: Effort) -> Verdict | None:
    """The best plan found, or None where none fits. Every family's leaders are judged, but for those that are proved
    or by far estimated to be slower, so the answer is not worse than a family's."""
    table, counts = judge.table, not judge.ignore_memory
    best = best_cuts(problem, table, effort.cuts, memory_counts=counts)
    families = _families_drafts(problem, judge, best)
    judge.microbatches_left = effort.microbatches
    _judge_start(judge, families)
    cuts = [*best.cuts, *best.pure] if problem.forbidden else best.cuts  # the best may all be mixtures
    found = promising(problem, judge, effort, table, cuts, memory_counts=counts)
    apart = [] if effort.whole or judge.out_of_time else kinds_apart(problem, judge, effort, found)
    ends = _descended(judge, apart, (effort.descents + 1) // 2, effort.behind)
    ends += _descended(judge, found, effort.descents, effort.behind, ends)
    _judge_leaders(judge, [*ends, *found, *apart], effort)
    if not judge.fitting:
        few = thriftiest(problem, table)
        cuts = best_cuts(problem, few, effort.cuts, memory_counts=False).cuts
        _judge_all(judge, promising(problem, judge, effort, few, cuts, memory_counts=False))
    if effort.whole:
        search_tiny(problem, judge)
    _climb_leaders(judge, effort)
    for drafts in families.values():
        judge.microbatches_left = FAMILY_MICROBATCHES
        _judge_all(judge, filter(partial(_is_near, judge), leading(judge, list(filter(judge.may_win, drafts)))))
    judge.microbatches_left = WHOLE_MICROBATCHES
    for name, drafts in families.items():
        _judge_whole(problem, judge, name, drafts)
    return judge.best


def _families_drafts(problem: Problem, judge: Judge, best: Best) -> dict[str, list[Draft]]:
    """Every family's drafts; HETHUB's are the pure ones of the cuts made anyway."""
    drafts = {name: list(family.drafts(problem, judge.costs)) for name, family in FAMILIES.items() if name != "hethub"}
    return {"hethub": [entry.draft(problem) for entry in best.pure], **drafts}


def _judge_start(judge: Judge, families: Mapping[str, Sequence[Draft]]) -> None:
    """Judges the plan of a family with the shortest estimate, from which the search starts."""
    surrogate = judge.surrogate
    unlike = dict.fromkeys(draft for drafts in families.values() for draft in drafts)
    surrogate.bound(unlike)
    every = sorted(unlike, key=surrogate.least)
    start, shortest = None, float("inf")
    for first in range(0, len(every), TOGETHER):
        some = every[first : first + TOGETHER]
        known_enough = start is not None and first >= MOST_STARTS
        if known_enough or surrogate.least(some[0]) >= shortest or judge.out_of_time:
            break
        own = min(surrogate.below(some, shortest), key=surrogate.seconds, default=None)
        if own is not None:
            start, shortest = own, surrogate.seconds(own)
    if start is not None:
        judge(start)
    judge.mark_start()


def _descended(
    judge: Judge, found: Sequence[Draft], descents: int, behind: float, others: Sequence[Draft] = ()
) -> list[Draft]:
    """Where descents from the best and the unlike ones among the drafts found end; `others` have ended before. One
    that is `behind` these gives up."""
    unlike = {draft.shape: draft for draft in reversed(found)}
    starting = list(dict.fromkeys([*found[: (descents + 1) // 2], *reversed(unlike.values())]))
    passed: set[Draft] = set()  # where one descent has been, another need not go on
    ends: list[Draft] = []
    for draft in starting[:descents]:
        best = min(map(judge.surrogate.seconds, [*others, *ends]), default=float("inf"))
        ends.append(descend(judge, draft, passed, behind * best))
    return ends


def _judge_leaders(judge: Judge, drafts: Iterable[Draft], effort: Effort) -> None:
    """Judges the drafts with the smallest estimates, as long as these leave room below the best plan. Those that are
    no plan, or take too many microbatches to be replayed, leave their place to others."""
    surrogate, judged = judge.surrogate, 0
    for draft in sorted(dict.fromkeys(drafts), key=surrogate.seconds)[: MOST_LEADERS * effort.finalists]:
        if judged < effort.finalists and surrogate.seconds(draft) * effort.optimism < judge.best_seconds:
            judged += judge_or_fit(judge, draft)


def _climb_leaders(judge: Judge, effort: Effort) -> None:
    """Climbs from the best plans, and the best of some arrangements; where nothing fits, from the one least over
    memory."""
    movable = [verdict for verdict in judge.fitting.values() if verdict.draft.plan is None]
    ranked: list[Verdict] = sorted(movable, key=lambda verdict: verdict.seconds)
    unlike = {verdict.draft.shape: verdict for verdict in reversed(ranked)}
    others = sorted(unlike.values(), key=lambda verdict: verdict.seconds)[: effort.arrangements]
    leaders = list({verdict.draft: verdict for verdict in [*ranked[: effort.climbs], *others]}.values())
    if not leaders and judge.closest is not None and judge.closest.draft.plan is None and effort.climbs:
        leaders = [judge.closest]
    passed: set[Draft] = set()
    for leader in leaders:
        if leader.draft not in judge.fitting or leader.seconds < FAR * judge.best_seconds:
            climb(leader, judge, effort, passed)


def _is_near(judge: Judge, draft: Draft) -> bool:
    """Whether a draft that can be estimated may be better than the best, estimates being off by far less than this."""
    return judge.surrogate.seconds(draft) < FAR * judge.best_seconds


def _judge_whole(problem: Problem, judge: Judge, name: str, drafts: Sequence[Draft]) -> None:
    """Judges a family's plans that the search cannot move about, where they may be better than the best so far; of
    those that its system ranks, none behind one that is far from it."""
    if judge.out_of_time:
        return
    family = FAMILIES[name]
    for draft in filter(judge.may_win, _whole(problem, judge, family, drafts, judge.best_seconds)):
        verdict = judge.within_time(draft)
        if family.ranked and verdict is not None and verdict.seconds > FAR * judge.best_seconds:
            break


def _judge_all(judge: Judge, drafts: Iterable[Draft]) -> None:
    for draft in drafts:
        judge.within_time(draft)


def leading(judge: Judge, drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts with the smallest estimates that are likely to fit; where no plan is known that does, the smallest of
    all if none of these is likely to."""
    unlike = list(dict.fromkeys(drafts))
    judge.surrogate.weigh(unlike)
    fitting = [draft for draft in unlike if judge.surrogate.likely_fits(draft)]
    wanted = fitting if fitting or judge.best else unlike
    return heapq.nsmallest(FAMILY_FINALISTS, wanted, key=judge.surrogate.seconds)


def _whole(problem: Problem, judge: Judge, family: Family, plain: Sequence[Draft], limit_seconds: float) -> list[Draft]:
    """Of a family's drafts that carry their plan and may take less than the limit, the first of those that its system
    ranks, else those whose busiest replica computes least."""
    made = dict.fromkeys(family.whole(problem, judge.surrogate, plain, limit_seconds))
    if family.ranked:
        return list(made)[:WHOLE_FINALISTS]
    return heapq.nsmallest(WHOLE_FINALISTS, made, key=judge.surrogate.least)


def search_family(problem: Problem, judge: Judge, family: Family) -> Verdict | None:
    """The family's best plan among its leaders, or None where none fits."""
    judge.microbatches_left = FAMILY_MICROBATCHES
    plain = list(family.drafts(problem, judge.costs))
    _judge_all(judge, leading(judge, plain))
    judge.microbatches_left = WHOLE_MICROBATCHES
    _judge_all(judge, _whole(problem, judge, family, plain, judge.best_seconds))
    return judge.best


def search_whole(problem: Problem, judge: Judge, names: Iterable[str]) -> Verdict | None:
    """The best plan under a schedule that only families propose, or None where none fits."""
    judge.microbatches_left = WHOLE_MICROBATCHES
    for name in names:
        plain = list(FAMILIES[name].drafts(problem, judge.costs))
        _judge_all(judge, _whole(problem, judge, FAMILIES[name], plain, float("inf")))
    return judge.best


def thriftiest(problem: Problem, table: Table) -> Table:
    """The combinations that need the least memory, for where no cut fitted."""
    least = (problem.recomputes[-1], problem.micro_batches[0])
    rows = [row for row, c in enumerate(table.combinations) if (c.recompute, c.micro_batches[0]) == least]
    return table.only(rows)


def promising(
    problem: Problem, judge: Judge, effort: Effort, table: Table, cuts: Sequence[Entry], *, memory_counts: bool
) -> list[Draft]:
    """The drafts with the smallest estimates, best first: equal cuts of all lines, then free ones where they can
    win."""
    entries = [*cuts, *reordered(problem, table, cuts, memory_counts=memory_counts)]
    found: dict[Draft, float] = {}
    _add_with_slacks(found, problem, judge, [entry.draft(problem) for entry in entries], effort.finalists)
    best = min(found.values(), default=float("inf"))
    if not effort.whole:
        found.update(small_drafts(problem, table, judge.surrogate, best, memory_counts))
    if problem.constraints.dp is None and not judge.out_of_time:
        free = free_drafts(problem, judge, effort, table, best, memory_counts)
        _add_with_slacks(found, problem, judge, free, effort.finalists)
    ranked = sorted(found, key=found.__getitem__)
    shapes = {draft.shape: draft for draft in reversed(ranked)}  # the best of every arrangement of units
    unlike = sorted(shapes.values(), key=found.__getitem__)
    return list(dict.fromkeys([*ranked[: 2 * effort.finalists // 3], *unlike]))[: effort.finalists]


def kinds_apart(problem: Problem, judge: Judge, effort: Effort, found: Sequence[Draft]) -> list[Draft]:
    """The best drafts whose stages hold one kind each and every kind its own number of stages, by estimate; none that
    is far behind those found. Not for GPipe, whose stages hold all their microbatches at once."""
    if problem.schedule == "gpipe":
        return []
    fitting = filter(judge.surrogate.likely_fits, found)
    shortest = min(map(judge.surrogate.seconds, fitting), default=float("inf"))
    drafts = kind_drafts(problem, judge.surrogate, float(judge.table.bound[0]), shortest)
    estimates: dict[Draft, float] = {}
    _add_with_slacks(estimates, problem, judge, [with_room(draft, problem) for draft in drafts], effort.finalists)
    near = [draft for draft in estimates if judge.surrogate.is_faster(draft, NEAR * shortest)]
    return heapq.nsmallest(effort.finalists // 2, near, key=estimates.__getitem__)


def _add_with_slacks(
    found: dict[Draft, float], problem: Problem, judge: Judge, drafts: Sequence[Draft], wanted: int
) -> None:
    """Adds the drafts with their estimates to those found, and with as many microbatches in flight as their links
    need, or under other schedules, where that shortens the estimate and likely fits. The best first: drafts whose
    estimate would be above those of `wanted` unlike ones in any case stay as they are."""
    surrogate = judge.surrogate
    surrogate.weigh(drafts)
    found.update((draft, surrogate.seconds(draft)) for draft in drafts)
    modes: list[dict[str, Any]] = [{"schedule": schedule} for schedule in problem.other_schedules]
    if problem.capabilities.chooses_in_flight and problem.schedule == "1f1b":
        modes += [{"roomy": True}, *({"roomy": True, **mode} for mode in modes)]
    ranked = sorted((draft for draft in drafts if len(draft.stages) > 1), key=surrogate.seconds)
    for start in range(0, len(ranked), TOGETHER):
        limit = _last_wanted(found, wanted)
        near = [draft for draft in ranked[start : start + TOGETHER] if surrogate.floor(draft) < limit]
        others = {draft: [replace(draft, **mode) for mode in modes] for draft in near}
        surrogate.weigh(other for own in others.values() for other in own)
        for draft, own in others.items():
            better = (other for other in own if surrogate.is_faster(other, surrogate.seconds(draft)))
            found.update((other, surrogate.seconds(other)) for other in better)


def _last_wanted(found: Mapping[Draft, float], wanted: int) -> float:
    """The estimate of the last of so many best drafts of unlike shapes; infinite where there are not as many."""
    shapes: dict[object, float] = {}
    for draft, seconds in found.items():
        shapes[draft.shape] = min(seconds, shapes.get(draft.shape, seconds))
    return heapq.nsmallest(wanted, shapes.values())[-1] if len(shapes) >= wanted else float("inf")


def free_drafts(
    problem: Problem, judge: Judge, effort: Effort, table: Table, best: float, memory_counts: bool
) -> list[Draft]:
    """Partitions with free numbers of replicas, for combinations whose bound leaves room below `best`."""
    drafts: list[Draft] = []
    spent = 0
    for bound, combination in zip(table.bound, table.combinations, strict=True):
        for order in orders(problem):
            units = Line(order, 1).units(problem, combination.degrees)
            if len(units) <= MOST_UNITS:  # small_drafts has tried every partition
                continue
            setting = Setting(units, combination.micro_batches, combination.recompute)
            depths = _depths(problem, setting)
            spent += 8 * max(depths, default=0) * problem.model.layers**2
            if bound >= best or spent > effort.free_cells or judge.out_of_time:
                return drafts
            partitioner = Partitioner(problem, judge.costs, setting, memory_counts=memory_counts)
            for partition in partitioner.partitions(depths, best):
                drafts.append(to_draft(problem, partition.stages, units, combination))
    return drafts


def _depths(problem: Problem, setting: Setting) -> list[int]:
    """The numbers of stages worth trying with free numbers of replicas."""
    deepest = min(problem.model.layers, len(setting.line), MOST_FREE_STAGES)
    return [depth for depth in range(1, deepest + 1) if problem.constraints.pp in (None, depth)]


WORTHWHILE = 1e-2  # a gain for which no other sort of change is looked at
MOST_CHANGES = 60


def descend(judge: Judge, draft: Draft, passed: set[Draft], hopeless: float = float("inf")) -> Draft:
    """Where the estimate has no better neighbour: many small changes, none of them judged. Ends early on a draft that
    is among those `passed`, to which its own are added, and after a small gain above `hopeless` seconds."""
    surrogate = judge.surrogate
    for _ in range(MOST_CHANGES):
        if draft in passed or judge.out_of_time:
            break
        passed.add(draft)
        better, before = _downhill(surrogate, draft), surrogate.seconds(draft)
        if better is None:
            break
        draft = better
        if surrogate.seconds(draft) > max(hopeless, (1 - WORTHWHILE) * before):
            break
    return draft


def _downhill(surrogate: Surrogate, draft: Draft) -> Draft | None:
    """The best neighbour of the first sort among which one is worth while, or the best of all; None where none is
    better."""
    least, best = surrogate.seconds(draft) * (1 - 1e-6), None
    enough = surrogate.seconds(draft) * (1 - WORTHWHILE)
    for near in neighbourhoods(draft, surrogate):
        own = min(surrogate.below(near, least), key=surrogate.seconds, default=None)
        if own is not None:
            least, best = surrogate.seconds(own), own
        if least < enough:
            break
    return best


def judge_or_fit(judge: Judge, draft: Draft) -> bool:
    """Whether a draft is a plan. Judges it, and where it turns out not to fit, what is left of it with smaller
    microbatches."""
    verdict = judge.within_time(draft)
    if verdict is not None and not verdict.fits and (smaller := fitted(draft, judge.surrogate)) is not None:
        judge(smaller)
    return verdict is not None


def climb(verdict: Verdict, judge: Judge, effort: Effort, passed: set[Draft]) -> Verdict:
    """The best neighbour of the best neighbour …; of each step's neighbours the judge sees those estimated best. Ends
    early on a draft that is among those `passed`, to which its own are added."""
    best = verdict
    for _ in range(effort.steps):
        if best.draft in passed:
            break
        passed.add(best.draft)
        better = _step(best, judge, effort)
        if better is best:
            break
        best = better
    return best


def _step(best: Verdict, judge: Judge, effort: Effort) -> Verdict:
    surrogate, ranked = judge.surrogate, neighbours(best.draft, judge.surrogate)
    if best.fits:
        most = surrogate.seconds(best.draft) * effort.uphill
        ranked = heapq.nsmallest(effort.tried_per_step, surrogate.below(ranked, most), key=surrogate.seconds)
    for draft in ranked:
        if judge.out_of_time:
            break
        candidate = judge(draft)
        if candidate is not None and judge.better(candidate, best):
            return candidate
    return best
