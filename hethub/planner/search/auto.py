"""`auto`: all settings cut exactly and estimated, the best evaluated by the predictor, then improved step by step."""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hethub.planner.candidate.candidate import EXTRA_IN_FLIGHT, Candidate, Pattern
from hethub.planner.evaluate.evaluator import Evaluation
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.generate import device_type_stages, modes, small
from hethub.planner.generate.cuts import Best, best_cuts
from hethub.planner.generate.families import FAMILIES, Family
from hethub.planner.generate.table import Table, tabulate
from hethub.planner.problem.problem import Problem
from hethub.planner.search.effort import Effort
from hethub.planner.search.left_out import parts
from hethub.planner.search.local_search import FAR, climb_leaders, descended, evaluate_all, evaluate_or_fit
from hethub.planner.search.neighbours import with_room

FAMILY_FINALISTS = 4  # evaluated of each family
FAMILY_MICROBATCHES = 200_000  # replayed for these: unlike replicas, of which a family's plans are made, take many
MOST_CUTS = 24  # looked at in every mode
FEW_CUTS = 4  # looked at in the thriftiest modes, where nothing fits by estimate
WHOLE_FINALISTS = 3  # of its candidates that carry their plan
WHOLE_MICROBATCHES = 1_000_000  # of these, since equal replicas are replayed once
AT_ONCE, MOST_STARTS = 32, 64  # candidates estimated at once, and in all once one is known that fits


def search(incumbent: Incumbent, effort: Effort) -> Evaluation | None:
    """The best plan found, or None where none fits. Every family's leaders are evaluated, but for those that are proved
    or by far estimated to be slower, so the answer is not worse than a family's."""
    problem, table = incumbent.problem, _table(incumbent)
    best = best_cuts(problem, table, effort.cuts)
    families = _families_candidates(incumbent, best)
    incumbent.evaluator.microbatches_left = effort.microbatches
    _evaluate_start(incumbent, families)
    look(incumbent, effort, table, best)
    if not incumbent.fitting:
        few = best_cuts(problem, thriftiest(problem, table), FEW_CUTS).cuts
        evaluate_all(incumbent, modes.thriftiest(problem, few))
        climb_leaders(incumbent, effort)
    for part in parts(incumbent):
        if incumbent.out_of_time:
            break
        own = incumbent.beside(part.problem, part.below_seconds)
        fewer = _table(own, part.device_types)
        if fewer.bound[0] < part.below_seconds:
            own.evaluator.microbatches_left = effort.microbatches
            look(own, effort, fewer, best_cuts(part.problem, fewer, effort.cuts))
            incumbent.admit(own)
    if incumbent.out_of_time:
        return incumbent.best
    climb_leaders(incumbent, effort)
    for candidates in families.values():
        incumbent.evaluator.microbatches_left = FAMILY_MICROBATCHES
        leaders = leading(incumbent, list(filter(incumbent.may_win, candidates)))
        evaluate_all(incumbent, filter(partial(_is_near, incumbent), leaders))
    return add_whole_plans(incumbent)


def look(incumbent: Incumbent, effort: Effort, table: Table, best: Best) -> None:
    """Evaluates the best of what is made of a table's combinations and its best cuts."""
    problem = incumbent.problem
    cuts = [*best.cuts, *best.pure] if problem.forbidden else best.cuts  # the best may all be mixtures
    found = promising(incumbent, effort, table, cuts)
    if incumbent.out_of_time:
        return
    apart = stages_by_device_type(incumbent, effort, table, found)
    moded = in_modes(incumbent, effort, table, [*found, *apart])
    if not any(_is_near(incumbent, candidate) for candidate in [*found, *apart, *moded]):
        return
    if {*problem.schedules} & {"gpipe", "1f1b", "zero_bubble"}:  # else they are seen as cuts alone
        ends = descended(incumbent, apart, (effort.descents + 1) // 2, effort.behind)
        ends += descended(incumbent, found, effort.descents, effort.behind, ends)
        _evaluate_leaders(incumbent, [*ends, *found, *apart], effort)
    # Apart, since estimates of other modes are off by something else: the leaders of one must not crowd out the others'.
    ends = descended(incumbent, moded, (effort.descents + 1) // 2, effort.behind)
    _evaluate_leaders(incumbent, [*ends, *moded], effort)


def _table(incumbent: Incumbent, used: Collection[int] | None = None) -> Table:
    """The combinations of the device types used."""
    table = tabulate(incumbent.problem, incumbent.costs.unit_costs, used)
    return replace(table, memory_counts=not incumbent.evaluator.ignore_memory)


def add_whole_plans(incumbent: Incumbent) -> Evaluation | None:
    """The best plan found and of the families' own schedules, rounds and offloading, which no search moves about."""
    incumbent.evaluator.microbatches_left = WHOLE_MICROBATCHES
    for family in FAMILIES.values():
        _evaluate_whole(incumbent, family)
    return incumbent.best


def _families_candidates(incumbent: Incumbent, best: Best) -> dict[str, list[Candidate]]:
    """Every family's candidates, first those of the families whose candidates are the pure ones of the cuts made."""
    cut = {name: best.pure for name, family in FAMILIES.items() if family.are_pure_cuts}
    others = {name: family for name, family in FAMILIES.items() if not family.are_pure_cuts}
    return cut | {name: list(family.propose(incumbent.problem, incumbent.costs)) for name, family in others.items()}


def _evaluate_start(incumbent: Incumbent, families: Mapping[str, Sequence[Candidate]]) -> None:
    """Evaluates the plan of a family with the shortest estimate, from which the search starts."""
    costs = incumbent.costs
    unlike = dict.fromkeys(candidate for candidates in families.values() for candidate in candidates)
    costs.bound(unlike)
    every = sorted(unlike, key=costs.least)
    start, shortest = None, float("inf")
    for first in range(0, len(every), AT_ONCE):
        some = every[first : first + AT_ONCE]
        known_enough = start is not None and first >= MOST_STARTS
        if known_enough or costs.least(some[0]) >= shortest or incumbent.out_of_time:
            break
        own = min(costs.below(some, shortest), key=costs.seconds, default=None)
        if own is not None:
            start, shortest = own, costs.seconds(own)
    if start is not None:
        incumbent.consider(start)
    incumbent.start = incumbent.best


def _evaluate_leaders(incumbent: Incumbent, candidates: Iterable[Candidate], effort: Effort) -> None:
    """Evaluates the candidates with the smallest estimates, as long as these leave room below the best plan."""
    seconds = incumbent.costs.seconds
    for candidate in heapq.nsmallest(effort.finalists, dict.fromkeys(candidates), key=seconds):
        if seconds(candidate) * effort.optimism < incumbent.best_seconds:
            evaluate_or_fit(incumbent, candidate)


def _is_near(incumbent: Incumbent, candidate: Candidate) -> bool:
    """Whether a candidate that can be estimated may be better than the best, estimates being off by far less than
    this."""
    return incumbent.costs.seconds(candidate) < FAR * incumbent.best_seconds


def _evaluate_whole(incumbent: Incumbent, family: Family) -> None:
    """Evaluates a family's plans that the search cannot move about, where they may be better than the best so far; of
    those that its system ranks, none behind one that is far from it."""
    if incumbent.out_of_time:
        return
    for candidate in filter(incumbent.may_win, _whole(incumbent, family, incumbent.hopeful_seconds)):
        evaluation = incumbent.within_time(candidate)
        if family.ranked and evaluation is not None and evaluation.seconds > FAR * incumbent.best_seconds:
            break


def leading(incumbent: Incumbent, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the smallest estimates that are likely to fit; where no plan is known that does, the smallest
    of all if none of these is likely to."""
    unlike = list(dict.fromkeys(candidates))
    incumbent.costs.estimate(unlike)
    fitting = [candidate for candidate in unlike if incumbent.costs.likely_fits(candidate)]
    wanted = fitting if fitting or incumbent.best else unlike
    return heapq.nsmallest(FAMILY_FINALISTS, wanted, key=incumbent.costs.seconds)


def _whole(incumbent: Incumbent, family: Family, limit_seconds: float) -> list[Candidate]:
    """Of a family's candidates that carry their plan and may take less than the limit, the first of those that its
    system ranks, else those whose busiest replica computes least."""
    made = dict.fromkeys(family.propose_whole(incumbent.problem, incumbent.costs, limit_seconds=limit_seconds))
    if family.ranked:
        return list(made)[:WHOLE_FINALISTS]
    return heapq.nsmallest(WHOLE_FINALISTS, made, key=incumbent.costs.least)


def search_family(incumbent: Incumbent, family: Family) -> Evaluation | None:
    """The family's best plan among its leaders, or None where none fits."""
    incumbent.evaluator.microbatches_left = FAMILY_MICROBATCHES
    evaluate_all(incumbent, leading(incumbent, list(family.propose(incumbent.problem, incumbent.costs))))
    incumbent.evaluator.microbatches_left = WHOLE_MICROBATCHES
    evaluate_all(incumbent, _whole(incumbent, family, incumbent.best_seconds))
    return incumbent.best


def in_modes(incumbent: Incumbent, effort: Effort, table: Table, found: Sequence[Candidate]) -> list[Candidate]:
    """The best candidates, by estimate, among those found and the cuts that would be best with more memory, in every
    mode that they may take."""
    problem, costs, allowed = incumbent.problem, incumbent.costs, {*incumbent.problem.schedules}
    larger = best_cuts(problem, replace(table, memory_counts=False), effort.cuts, by_depth=True).cuts
    every = [*found, *larger]
    costs.estimate(every)
    cuts = {candidate.shape: candidate for candidate in sorted(every, key=costs.seconds, reverse=True)}
    known = [own for own in found if costs.likely_fits(own) and own.pattern.schedule in allowed]
    shortest = min(map(costs.seconds, known), default=float("inf"))
    chosen = heapq.nsmallest(MOST_CUTS, cuts.values(), key=costs.seconds)
    made = dict.fromkeys(modes.propose(problem, costs, chosen, shortest))
    ranked = sorted(made, key=costs.seconds)
    unlike = {(own.shape, own.pattern): own for own in reversed(ranked)}
    best = sorted(unlike.values(), key=costs.seconds)
    return list(dict.fromkeys([*ranked[: effort.finalists // 2], *best]))[: effort.finalists]


def thriftiest(problem: Problem, table: Table) -> Table:
    """The combinations that need the least memory, for where no cut fitted; as much as they need."""
    least = (problem.recomputes[-1], problem.micro_batches[0])
    first = min(table.used)
    rows = [row for row, c in enumerate(table.combinations) if (c.recompute, c.micro_batches[first]) == least]
    return replace(table.only(rows), memory_counts=False)


def promising(incumbent: Incumbent, effort: Effort, table: Table, cuts: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the smallest estimates, best first: equal cuts of all lines, and of a handful of accelerators
    every arrangement that can win."""
    costs, found = incumbent.costs, dict[Candidate, float]()
    _add_with_slacks(found, incumbent, cuts, effort.finalists)
    best = min(found.values(), default=float("inf"))
    cut = small.propose(incumbent.problem, costs, table, best)
    found.update((candidate, costs.seconds(candidate)) for candidate in incumbent.while_in_time(cut))
    ranked = sorted(found, key=found.__getitem__)
    shapes = {candidate.shape: candidate for candidate in reversed(ranked)}  # the best of every arrangement of units
    unlike = sorted(shapes.values(), key=found.__getitem__)
    return list(dict.fromkeys([*ranked[: 2 * effort.finalists // 3], *unlike]))[: effort.finalists]


def stages_by_device_type(
    incumbent: Incumbent, effort: Effort, table: Table, found: Sequence[Candidate]
) -> list[Candidate]:
    """The best candidates whose stages hold one device type each and every device type its own number of stages, by estimate; none
    that is behind those found. Not for GPipe, whose stages hold all their microbatches at once."""
    problem, costs = incumbent.problem, incumbent.costs
    if problem.schedule == "gpipe":
        return []
    shortest = min(map(costs.seconds, filter(costs.likely_fits, found)), default=float("inf"))
    proposed = device_type_stages.propose(problem, costs, table, shortest)
    estimates: dict[Candidate, float] = {}
    _add_with_slacks(estimates, incumbent, [with_room(own) for own in proposed], effort.finalists)
    faster = [candidate for candidate in estimates if costs.is_faster(candidate, shortest)]
    return heapq.nsmallest(effort.finalists // 2, faster, key=estimates.__getitem__)


def _add_with_slacks(
    found: dict[Candidate, float], incumbent: Incumbent, candidates: Sequence[Candidate], wanted: int
) -> None:
    """Adds the candidates with their estimates to those found, and with as many microbatches in flight as their links
    need, or under other schedules, where that shortens the estimate and likely fits. The best first: candidates whose
    estimate would be above those of `wanted` unlike ones in any case stay as they are."""
    problem, costs = incumbent.problem, incumbent.costs
    found.update(zip(candidates, costs.estimate(candidates), strict=True))
    modes: list[dict[str, Any]] = [{"pattern": Pattern(schedule)} for schedule in problem.other_schedules]
    if problem.schedule == "1f1b":
        modes += [{"extra_in_flight": 1}]
        modes += [
            {"pattern": Pattern(own), "extra_in_flight": more}
            for own in problem.other_schedules
            for more in EXTRA_IN_FLIGHT[own]
        ]
    ranked = sorted((candidate for candidate in candidates if len(candidate.stages) > 1), key=costs.seconds)
    shortest: dict[object, float] = {}  # estimate of every arrangement of units
    _note_shapes(shortest, found, found)
    for start in range(0, len(ranked), AT_ONCE):
        limit = heapq.nsmallest(wanted, shortest.values())[-1] if len(shortest) >= wanted else float("inf")
        near = [candidate for candidate in ranked[start : start + AT_ONCE] if costs.of(candidate).floor < limit]
        others = {candidate: [replace(candidate, **mode) for mode in modes] for candidate in near}
        costs.estimate(other for own in others.values() for other in own)
        for candidate, own in others.items():
            better = [other for other in own if costs.is_faster(other, costs.seconds(candidate))]
            found.update((other, costs.seconds(other)) for other in better)
            _note_shapes(shortest, found, better)


def _note_shapes(
    shortest: dict[object, float], found: Mapping[Candidate, float], candidates: Iterable[Candidate]
) -> None:
    for candidate in candidates:
        shortest[candidate.shape] = min(found[candidate], shortest.get(candidate.shape, float("inf")))
