"""Strategy `auto`: cut the model for every combination of settings, estimate the cuts, evaluate the best with the predictor,
and improve those by local search."""

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
MOST_CUTS = 24  # cuts that are tried in every mode (schedule, ZeRO level, recompute, offload)
FEW_CUTS = 4  # cuts that are tried in the modes that need the least memory, where no estimate fits
WHOLE_FINALISTS = 3  # evaluated of each family's candidates that carry a complete plan of their own
WHOLE_MICROBATCHES = 1_000_000  # replayed for those: more, since equal replicas are replayed once
MOST_STARTS = 64  # of the families' candidates are estimated at a time, until one is likely to fit
MOST_STARTED = 8  # of those are evaluated at most, until one fits


def search(incumbent: Incumbent, effort: Effort) -> Evaluation | None:
    """Return the best plan found, or None where no plan fits.

    The best candidates of every family are evaluated as well, except those that are proved, or estimated by a wide margin,
    to be slower. So the answer is not worse than any family's."""
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
            # All accelerators together may have no place in a plan where a part of them has one.
            if not (incumbent.fitting or own.fitting):
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
    """Evaluate the cuts and modes that need the least memory."""
    few = best_cuts(incumbent.problem, thriftiest(incumbent.problem, table), FEW_CUTS)
    evaluate_all(incumbent, modes.thriftiest(incumbent.problem, few))


def look(incumbent: Incumbent, effort: Effort, table: Table, cuts: Sequence[Candidate]) -> None:
    """Evaluate the best candidates made from a table of combinations and from its best cuts."""
    problem = incumbent.problem
    if problem.forbidden:  # the best cuts may all mix device types that must not share a stage
        cuts = [*cuts, *best_cuts(problem, table, effort.cuts, pure=True)]
    found = promising(incumbent, effort, table, cuts)
    if incumbent.out_of_time:
        return
    apart = stages_by_device_type(incumbent, effort, table, found)
    moded = in_modes(incumbent, effort, table, [*found, *apart])
    if not any(_is_near(incumbent, candidate) for candidate in [*found, *apart, *moded]):
        return
    # Under other schedules such candidates are compared as cuts only.
    if {*problem.schedules} & {"gpipe", "1f1b", "zero_bubble"}:
        ends = descended(incumbent, apart, (effort.descents + 1) // 2)
        ends += descended(incumbent, found, effort.descents, ends)
        _evaluate_leaders(incumbent, [*ends, *found, *apart], effort)
    # Descend and evaluate them separately: the error of an estimate depends on the mode, so the leaders of one mode must not
    # crowd out those of another.
    ends = descended(incumbent, moded, (effort.descents + 1) // 2)
    _evaluate_leaders(incumbent, [*ends, *moded], effort)


def add_whole_plans(incumbent: Incumbent) -> Evaluation | None:
    """Evaluate the families' complete plans too (their own schedules, rounds and offloading, which the local search does not
    change), and return the best plan of all."""
    incumbent.evaluator.microbatches_left = WHOLE_MICROBATCHES
    for family in FAMILIES.values():
        made = () if incumbent.out_of_time else _whole(incumbent, family)
        evaluate_all(incumbent, filter(incumbent.may_win, made))
    return incumbent.best


def _evaluate_start(incumbent: Incumbent, families: Mapping[str, Sequence[Candidate]]) -> None:
    """Evaluate the family plan with the shortest estimate that fits. The search starts from it. This is done even where the
    time is already up."""
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


def _evaluate_leaders(incumbent: Incumbent, candidates: Iterable[Candidate], effort: Effort) -> None:
    """Evaluate the candidates with the smallest estimates that may still be faster than the best plan."""
    seconds = incumbent.costs.seconds
    for candidate in heapq.nsmallest(effort.finalists, dict.fromkeys(candidates), key=seconds):
        if seconds(candidate) * effort.optimism < incumbent.best_seconds:
            evaluate_or_fit(incumbent, candidate)


def _is_near(incumbent: Incumbent, candidate: Candidate) -> bool:
    """Whether the candidate's estimate is within the factor FAR of the best plan. Estimates are off by far less."""
    return incumbent.costs.seconds(candidate) < FAR * incumbent.best_seconds


def leading(incumbent: Incumbent, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with the smallest estimates that are likely to fit. Where none is likely to and no plan that fits
    is known, return those with the smallest estimates of all."""
    unlike = list(dict.fromkeys(candidates))
    incumbent.costs.estimate(unlike)
    fitting = [candidate for candidate in unlike if incumbent.costs.likely_fits(candidate)]
    wanted = fitting if fitting or incumbent.best else unlike
    return heapq.nsmallest(FAMILY_FINALISTS, wanted, key=incumbent.costs.seconds)


def _whole(incumbent: Incumbent, family: Family) -> list[Candidate]:
    """Return the first of the family's complete plans, which have their own schedule, rounds or offloading."""
    return list(islice(family.propose_whole(incumbent.problem, incumbent.costs), WHOLE_FINALISTS))


def search_family(incumbent: Incumbent, family: Family) -> Evaluation | None:
    """Return the best plan among the family's leading candidates, or None where none fits."""
    incumbent.evaluator.microbatches_left = FAMILY_MICROBATCHES
    evaluate_all(incumbent, leading(incumbent, list(family.propose(incumbent.problem, incumbent.costs))))
    incumbent.evaluator.microbatches_left = WHOLE_MICROBATCHES
    evaluate_all(incumbent, _whole(incumbent, family))
    return incumbent.best


def in_modes(incumbent: Incumbent, effort: Effort, table: Table, found: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with the smallest estimates, in every mode they may take, among those already found and the cuts
    that would be best if memory were larger."""
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
    """Return a table of only the combinations that need the least memory, and let them need as much as they do. It is used
    where no cut fits."""
    least = (problem.recomputes[-1], {problem.micro_batches[0]})
    sizes = [{own.micro_batches[device_type] for device_type in table.used} for own in table.combinations]
    rows = [row for row, own in enumerate(table.combinations) if (own.recompute, sizes[row]) == least]
    return replace(table.only(rows), memory_counts=False)


def promising(incumbent: Incumbent, effort: Effort, table: Table, cuts: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with the smallest estimates, the best first: the given cuts and, for a handful of accelerators,
    every arrangement that can win."""
    costs, found = incumbent.costs, with_slacks(incumbent, cuts)
    best = min(found.values(), default=float("inf"))
    cut = small.propose(incumbent.problem, costs, table, best)
    in_time = takewhile(lambda _: not incumbent.out_of_time, cut)  # the generator makes no more once the time is up
    found.update((candidate, costs.seconds(candidate)) for candidate in in_time)
    ranked = sorted(found, key=found.__getitem__)
    return diverse(ranked, 2 * effort.finalists // 3, effort.finalists, attrgetter("shape"))


def stages_by_device_type(
    incumbent: Incumbent, effort: Effort, table: Table, found: Sequence[Candidate]
) -> list[Candidate]:
    """Return the candidates with the smallest estimates in which each stage holds one device type, and each device type has its
    own number of stages; only those estimated faster than all found before. None for GPipe, whose stages hold all their
    microbatches at once."""
    problem, costs = incumbent.problem, incumbent.costs
    if problem.schedule == "gpipe":
        return []
    shortest = min(map(costs.seconds, filter(costs.likely_fits, found)), default=float("inf"))
    proposed = device_type_stages.propose(problem, costs, table, shortest)
    estimates = with_slacks(incumbent, [with_room(own) for own in proposed])
    faster = [candidate for candidate in estimates if costs.is_faster(candidate, shortest)]
    return heapq.nsmallest(effort.finalists // 2, faster, key=estimates.__getitem__)


def with_slacks(incumbent: Incumbent, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
    """Return the candidates with their estimates, and those variants whose estimate is shorter and which are likely to fit:
    more microbatches in flight, as slow links need them, or another schedule."""
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
