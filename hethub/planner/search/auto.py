"""`auto`: all settings cut exactly and estimated, the best evaluated by the predictor, then improved step by step."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from operator import attrgetter

from hethub.planner.candidate.candidate import EXTRA_IN_FLIGHT, Candidate, Pattern
from hethub.planner.evaluate.evaluator import Evaluation
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.generate import device_type_stages, modes, small
from hethub.planner.generate.cuts import best_cuts
from hethub.planner.generate.families import FAMILIES, Family
from hethub.planner.generate.table import Table, tabulate
from hethub.planner.problem.problem import Problem
from hethub.planner.search.effort import Effort
from hethub.planner.search.left_out import parts
from hethub.planner.search.local_search import FAR, climb_leaders, descended, diverse, evaluate_all, evaluate_or_fit
from hethub.planner.search.neighbours import with_room

FAMILY_FINALISTS = 4  # evaluated of each family
FAMILY_MICROBATCHES = 200_000  # replayed for these: unlike replicas, of which a family's plans are made, take many
MOST_CUTS = 24  # looked at in every mode
FEW_CUTS = 4  # looked at in the thriftiest modes, where nothing fits by estimate
WHOLE_FINALISTS = 3  # of its candidates that carry their plan
WHOLE_MICROBATCHES = 1_000_000  # of these, since equal replicas are replayed once
MOST_STARTS = 64  # families' candidates estimated at once, until one is likely to fit
MOST_STARTED = 8  # of these evaluated, until one fits


def search(incumbent: Incumbent, effort: Effort) -> Evaluation | None:
    """The best plan found, or None where none fits. Every family's leaders are evaluated, but for those that are proved
    or by far estimated to be slower, so the answer is not worse than a family's."""
    problem, table = incumbent.problem, tabulate(incumbent.problem, incumbent.costs.unit_costs)
    best = best_cuts(problem, table, effort.cuts)
    families = {name: list(family.propose(problem, incumbent.costs)) for name, family in FAMILIES.items()}
    incumbent.evaluator.microbatches_left = effort.microbatches
    _evaluate_start(incumbent, families)
    look(incumbent, effort, table, best)
    if not incumbent.fitting:
        _evaluate_thriftiest(incumbent, table)
        climb_leaders(incumbent, effort)
    for part in parts(incumbent):
        if incumbent.out_of_time:
            break
        own = incumbent.beside(part.problem, part.below_seconds)
        fewer = tabulate(part.problem, incumbent.costs.unit_costs, part.device_types)
        if fewer.bound[0] < part.below_seconds:
            own.evaluator.microbatches_left = effort.microbatches
            look(own, effort, fewer, best_cuts(part.problem, fewer, effort.cuts))
            if not (incumbent.fitting or own.fitting):  # where all have no place, these may have one and no room
                _evaluate_thriftiest(own, fewer)
            incumbent.admit(own)
    if incumbent.out_of_time:
        return incumbent.best
    climb_leaders(incumbent, effort)
    for candidates in families.values():
        incumbent.evaluator.microbatches_left = FAMILY_MICROBATCHES
        leaders = leading(incumbent, list(filter(incumbent.may_win, candidates)))
        evaluate_all(incumbent, filter(partial(_is_near, incumbent), leaders))
    return add_whole_plans(incumbent)


def _evaluate_thriftiest(incumbent: Incumbent, table: Table) -> None:
    """Evaluates the cuts that need the least memory, in the modes that need the least."""
    few = best_cuts(incumbent.problem, thriftiest(incumbent.problem, table), FEW_CUTS)
    evaluate_all(incumbent, modes.thriftiest(incumbent.problem, few))


def look(incumbent: Incumbent, effort: Effort, table: Table, cuts: Sequence[Candidate]) -> None:
    """Evaluates the best of what is made of a table's combinations and its best cuts."""
    problem = incumbent.problem
    if problem.forbidden:  # the best may all be mixtures
        cuts = [*cuts, *best_cuts(problem, table, effort.cuts, pure=True)]
    found = promising(incumbent, effort, table, cuts)
    if incumbent.out_of_time:
        return
    apart = stages_by_device_type(incumbent, effort, table, found)
    moded = in_modes(incumbent, effort, table, [*found, *apart])
    if not any(_is_near(incumbent, candidate) for candidate in [*found, *apart, *moded]):
        return
    if {*problem.schedules} & {"gpipe", "1f1b", "zero_bubble"}:  # else they are seen as cuts alone
        ends = descended(incumbent, apart, (effort.descents + 1) // 2)
        ends += descended(incumbent, found, effort.descents, ends)
        _evaluate_leaders(incumbent, [*ends, *found, *apart], effort)
    # Apart, since estimates of other modes are off by something else: the leaders of one must not crowd out the others'.
    ends = descended(incumbent, moded, (effort.descents + 1) // 2)
    _evaluate_leaders(incumbent, [*ends, *moded], effort)


def add_whole_plans(incumbent: Incumbent) -> Evaluation | None:
    """The best plan found and of the families' own schedules, rounds and offloading, which no search moves about."""
    incumbent.evaluator.microbatches_left = WHOLE_MICROBATCHES
    for family in FAMILIES.values():
        made = () if incumbent.out_of_time else _whole(incumbent, family)
        evaluate_all(incumbent, filter(incumbent.may_win, made))
    return incumbent.best


def _evaluate_start(incumbent: Incumbent, families: Mapping[str, Sequence[Candidate]]) -> None:
    """Evaluates the plan of a family with the shortest estimate that fits, from which the search starts; where time is up
    too."""
    costs = incumbent.costs
    unlike = dict.fromkeys(candidate for candidates in families.values() for candidate in candidates)
    costs.bound(unlike)
    every = sorted(unlike, key=costs.least)
    likely = (
        costs.below(every[first : first + MOST_STARTS], float("inf"))
        for first in range(0, len(every), MOST_STARTS)
        if not first or not incumbent.out_of_time
    )
    for candidate in heapq.nsmallest(MOST_STARTED, next(filter(None, likely), []), key=costs.seconds):
        incumbent.consider(candidate)
        if incumbent.fitting:
            break
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


def leading(incumbent: Incumbent, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the smallest estimates that are likely to fit; where no plan is known that does, the smallest
    of all if none of these is likely to."""
    unlike = list(dict.fromkeys(candidates))
    incumbent.costs.estimate(unlike)
    fitting = [candidate for candidate in unlike if incumbent.costs.likely_fits(candidate)]
    wanted = fitting if fitting or incumbent.best else unlike
    return heapq.nsmallest(FAMILY_FINALISTS, wanted, key=incumbent.costs.seconds)


def _whole(incumbent: Incumbent, family: Family) -> list[Candidate]:
    """The first of a family's plans with its own schedule, rounds or offloading."""
    return list(islice(family.propose_whole(incumbent.problem, incumbent.costs), WHOLE_FINALISTS))


def search_family(incumbent: Incumbent, family: Family) -> Evaluation | None:
    """The family's best plan among its leaders, or None where none fits."""
    incumbent.evaluator.microbatches_left = FAMILY_MICROBATCHES
    evaluate_all(incumbent, leading(incumbent, list(family.propose(incumbent.problem, incumbent.costs))))
    incumbent.evaluator.microbatches_left = WHOLE_MICROBATCHES
    evaluate_all(incumbent, _whole(incumbent, family))
    return incumbent.best


def in_modes(incumbent: Incumbent, effort: Effort, table: Table, found: Sequence[Candidate]) -> list[Candidate]:
    """The best candidates, by estimate, among those found and the cuts that would be best with more memory, in every
    mode that they may take."""
    problem, costs, allowed = incumbent.problem, incumbent.costs, {*incumbent.problem.schedules}
    larger = best_cuts(problem, replace(table, memory_counts=False), effort.cuts, by_depth=True)
    every = [*found, *larger]
    costs.estimate(every)
    cuts = {candidate.shape: candidate for candidate in sorted(every, key=costs.seconds, reverse=True)}
    known = [own for own in found if costs.likely_fits(own) and own.pattern.schedule in allowed]
    shortest = min(map(costs.seconds, known), default=float("inf"))
    chosen = heapq.nsmallest(MOST_CUTS, cuts.values(), key=costs.seconds)
    ranked = sorted(dict.fromkeys(modes.propose(problem, costs, chosen, shortest)), key=costs.seconds)
    return diverse(ranked, effort.finalists // 2, effort.finalists, attrgetter("shape", "pattern"))


def thriftiest(problem: Problem, table: Table) -> Table:
    """The combinations that need the least memory, for where no cut fitted; as much as they need."""
    least = (problem.recomputes[-1], problem.micro_batches[0])
    first = min(table.used)
    rows = [row for row, c in enumerate(table.combinations) if (c.recompute, c.micro_batches[first]) == least]
    return replace(table.only(rows), memory_counts=False)


def promising(incumbent: Incumbent, effort: Effort, table: Table, cuts: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the smallest estimates, best first: equal cuts of all lines, and of a handful of accelerators
    every arrangement that can win."""
    costs, found = incumbent.costs, with_slacks(incumbent, cuts)
    best = min(found.values(), default=float("inf"))
    cut = small.propose(incumbent.problem, costs, table, best)
    in_time = takewhile(lambda _: not incumbent.out_of_time, cut)  # no more are made then
    found.update((candidate, costs.seconds(candidate)) for candidate in in_time)
    ranked = sorted(found, key=found.__getitem__)
    return diverse(ranked, 2 * effort.finalists // 3, effort.finalists, attrgetter("shape"))


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
    estimates = with_slacks(incumbent, [with_room(own) for own in proposed])
    faster = [candidate for candidate in estimates if costs.is_faster(candidate, shortest)]
    return heapq.nsmallest(effort.finalists // 2, faster, key=estimates.__getitem__)


def with_slacks(incumbent: Incumbent, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
    """The candidates with their estimates, and with as many microbatches in flight as their links need, or under other
    schedules, where that shortens the estimate and likely fits."""
    problem, costs = incumbent.problem, incumbent.costs
    schedules = (problem.schedule, *problem.other_schedules)
    slacks = [(Pattern(schedule), more) for schedule in schedules for more in EXTRA_IN_FLIGHT.get(schedule, (0,))]
    others = {
        replace(own, pattern=pattern, extra_in_flight=more): own
        for pattern, more in slacks
        for own in candidates
        if len(own.stages) > 1
    }
    costs.estimate([*candidates, *others])
    faster = [other for other, own in others.items() if costs.is_faster(other, costs.seconds(own))]
    return {own: costs.seconds(own) for own in [*candidates, *faster]}
