"""Answers a planning question: runs the strategy's search and returns the plan with its bounds and runners-up, or says why
no plan fits."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from operator import itemgetter
from typing import Any

from hethub.planner.evaluate.evaluator import Evaluation
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.evaluate.outlook import Outlooks
from hethub.planner.evaluate.processes import uncollected
from hethub.planner.exhaustive.search import refuse_larger, search_exhaustively
from hethub.planner.explain.bottlenecks import bottlenecks
from hethub.planner.explain.homogeneous_sum import homogeneous_parts_beside, makers_alone_tokens_per_second
from hethub.planner.explain.infeasible import nothing_fits
from hethub.planner.explain.unsearched import not_searched
from hethub.planner.generate.families import FAMILIES
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch, Problem
from hethub.planner.result import FamilyRow, PlanResult, RunnerUp
from hethub.planner.search.auto import add_whole_plans, search, search_family
from hethub.planner.search.effort import effort_for
from hethub.predictor import rank_memory
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import HETHUB, Software
from hethub.spec.accelerator import Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput, suggest
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import ScheduleName

# (accelerators at most, how many plans beside the fastest are evaluated under all scenarios)
LOOKED_AT = ((128, 4), (1024, 2), (float("inf"), 1))
SEARCHED = ("tp", "pp", "dp", "micro_batch", "max_micro_batch", "schedule", "recompute", "zero", "forbid")
WIDER = 4  # times as many plans are first compared in the middle scenario alone, which is cheap
ALIKE = 1e-5  # two steps that differ by less than this fraction count as equal: no prediction resolves it


@uncollected()
def plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    train: Batch | tuple[int, int, Precision],
    constraints: ConstraintsSpec | None = None,
    strategy: str = "auto",
    *,
    with_bounds: bool = True,
    top: int = 5,
    explain: bool = False,
    profile: ProfileSpec | None = None,
    software: Software = HETHUB,
    processes: int = 1,
) -> PlanResult:
    """Return the best plan found for `train` = (global_batch, seq_len, precision). The plan fits in memory and can be
    executed. Strategy `auto` chooses, among the fastest plans it found, the one with the smallest mean step over the
    scenarios (`evaluate/outlook.py`); all other strategies choose the fastest plan.

    `with_bounds` also plans every device type alone, for comparison. `explain` adds the best plan of every family and the
    constraints that bind. Measurements in `profile` replace estimates. With several `processes` the device types are planned
    in parallel with the whole cluster, and the binding constraints in parallel with each other; the plans are the same.

    Raises BadInput where the question contradicts itself or no plan fits; the message says how many bytes are missing on
    which accelerators, and which change would make a plan fit.
    """
    started = time.perf_counter()
    problem = pose(model, cluster, Batch(*train), constraints, profile=profile, software=software)
    incumbent = Incumbent(problem)
    # Under a time limit nothing runs beside the search.
    beside = processes if with_bounds and incumbent.limit_seconds is None else 1
    with homogeneous_parts_beside(problem, beside) as found_alone:
        fastest, rows = _fastest(incumbent, strategy, explain)
        outlooks = Outlooks(problem, processes)
        best = _steadiest(incumbent, outlooks, fastest) if strategy == "auto" else fastest
        # A search cut short would understate the bound.
        alone = found_alone() if with_bounds and not incumbent.out_of_time else None
    return PlanResult(
        plan=best.plan,
        prediction=best.prediction.beside_makers_alone(makers_alone_tokens_per_second(alone)),
        strategy=strategy,
        outlook=outlooks.of(best.plan),
        best_on_point=_runner_up(fastest, best, outlooks) if fastest.seconds < best.seconds else None,
        runners_up=tuple(_runner_up(own, best, outlooks) for own in _others(incumbent, best, top)),
        not_searched=not_searched(strategy),
        homogeneous_parts=alone or (),
        families=tuple(_row(name, evaluation, best) for name, evaluation in rows.items()),
        out_of_time=incumbent.out_of_time,
        space_bound_seconds=incumbent.space_bound_seconds,
        reasons=tuple(bottlenecks(incumbent, best, processes)) if explain else (),
        candidates=len(incumbent.tried),
        search_seconds=time.perf_counter() - started,
    )


def _fastest(incumbent: Incumbent, strategy: str, explain: bool) -> tuple[Evaluation, dict[str, Evaluation | None]]:
    """Return the strategy's fastest plan and, with `explain`, the best plan of every family. Raises BadInput where no plan
    fits."""
    best = find(incumbent, strategy)
    rows = _families(incumbent, strategy) if explain else {}
    if strategy == "auto":
        best = incumbent.best  # the families' searches may have found a faster plan
    if best is None:
        raise BadInput(nothing_fits(incumbent, strategy))
    return best, rows


def _families(incumbent: Incumbent, strategy: str) -> dict[str, Evaluation | None]:
    """Return the best plan of every family, each found by a search of its own. Under `auto` the incumbent takes these plans
    over, so that `auto` is never slower than a family."""
    found = {}
    for name, family in FAMILIES.items():
        own = Incumbent(incumbent.problem, incumbent.costs)
        found[name] = search_family(own, family)
        if strategy == "auto":
            incumbent.admit(own)
    return found


def _row(name: str, evaluation: Evaluation | None, best: Evaluation) -> FamilyRow:
    if evaluation is None:
        return FamilyRow(strategy=name, plan=None, step_seconds=None, slower_percent=None)
    slower = 100.0 * (evaluation.seconds / best.seconds - 1.0)
    return FamilyRow(strategy=name, plan=evaluation.plan, step_seconds=evaluation.seconds, slower_percent=slower)


def find(incumbent: Incumbent, strategy: str) -> Evaluation | None:
    """Return the strategy's best plan, or None where none fits. Raises BadInput for an unknown strategy."""
    if strategy == "hap":
        raise BadInput(
            "strategy 'hap' plans operators and not layers: `hethub plan --strategy hap` and a job with plan: hap have it."
        )
    if strategy not in (known := ["auto", "exhaustive", *FAMILIES]):
        raise BadInput(f"strategy '{strategy}' is not known; {suggest(strategy, [*known, 'hap'])}")
    if strategy == "exhaustive":
        refuse_larger(incumbent.problem)
        search_exhaustively(incumbent)
        return add_whole_plans(incumbent)
    if strategy == "auto":
        if _is_answered_freely(incumbent):
            return incumbent.best
        return search(incumbent, effort_for(incumbent.problem))
    return search_family(incumbent, FAMILIES[strategy])


def _is_answered_freely(incumbent: Incumbent) -> bool:
    """Search without the constraints first: where that answer satisfies them anyway, it is the answer with them, too.

    Returns whether it does. The incumbent takes over all plans of that search which satisfy the constraints. Under a time
    limit no such search is made."""
    problem, given = incumbent.problem, incumbent.problem.constraints
    free = problem.with_constraints(given.replace(**{key: getattr(ConstraintsSpec(), key) for key in SEARCHED}))
    if free.constraints == given or incumbent.limit_seconds is not None:
        return False
    other = Incumbent(free)
    fastest = search(other, effort_for(free))
    if fastest is None:
        return False
    own = _steadiest(other, Outlooks(free), fastest)
    incumbent.admit(other)
    return incumbent.evaluator.is_allowed(own.candidate, own.plan)


def _steadiest(incumbent: Incumbent, outlooks: Outlooks, fastest: Evaluation) -> Evaluation:
    """Return the plan with the smallest mean step over the scenarios. Candidates are the fastest plan and, among the fastest
    plans of other shapes, those with the shortest step in the middle scenario, which is hardly ever above the mean."""
    size = incumbent.problem.size
    most = next(number for largest, number in LOOKED_AT if size <= largest)
    chosen, least = fastest, outlooks.of(fastest.plan).objective_seconds
    if incumbent.out_of_time:
        return chosen
    # Plans of one shape differ only in ZeRO levels, samples and microbatches in flight.
    unlike = _first_of_each(incumbent, partial(_shape, incumbent.problem), [fastest])
    near = list(islice(takewhile(lambda own: own.seconds < least, unlike), WIDER * most))
    of_other_ranks = _first_of_each(incumbent, lambda own: own.plan.unused, [fastest, *near])
    near += takewhile(lambda own: own.seconds < least, of_other_ranks)
    middles = outlooks.in_the_middle([own.plan for own in near])
    for middle, evaluation in sorted(zip(middles, near, strict=True), key=itemgetter(0))[:most]:
        if middle >= least or incumbent.out_of_time:
            break
        mean = outlooks.of(evaluation.plan).objective_seconds
        if mean < least:
            chosen, least = evaluation, mean
    return _simplest(incumbent, outlooks, chosen, least)


def _simplest(incumbent: Incumbent, outlooks: Outlooks, chosen: Evaluation, mean: float) -> Evaluation:
    """Return a simpler plan that takes as long as the chosen one, by its prediction and in the mean: with the fewest chunks
    per stage, and without offloading what the stages have room for."""
    for others in (_in_fewer_chunks, _offloading_less):
        for own in others(incumbent, chosen):
            if incumbent.out_of_time:
                return chosen
            if outlooks.of(own.plan).objective_seconds < (1 + ALIKE) * mean:
                chosen = own
                break
    return chosen


def _in_fewer_chunks(incumbent: Incumbent, chosen: Evaluation) -> list[Evaluation]:
    fewer = [own for own in incumbent.ranked if own.plan.num_chunks < chosen.plan.num_chunks]
    alike = (own for own in fewer if not (_is_longer(own, chosen) or _is_longer(chosen, own)))
    return sorted(alike, key=lambda own: own.plan.num_chunks)


def _offloading_less(incumbent: Incumbent, chosen: Evaluation) -> Iterator[Evaluation]:
    """Yield the chosen plan with offload only on stages that do not fit without it."""
    plan, problem = chosen.plan, incumbent.problem
    if not any(stage.offload for stage in plan.stages):
        return
    bare = plan.replace(stages=tuple(stage.replace(offload=()) for stage in plan.stages))
    reserve, used = problem.constraints.reserve, rank_memory(bind(bare, problem.model, problem.cluster))
    full = {entry.rank for entry in used if not entry.fits(reserve)}
    stages = tuple(s if full & {*s.ranks} else b for s, b in zip(plan.stages, bare.stages, strict=True))
    if stages != plan.stages:
        own = incumbent.consider(replace(chosen.candidate, plan=plan.replace(stages=stages)))
        if own is not None and own.fits and not _is_longer(own, chosen):
            yield own


def _is_longer(one: Evaluation, other: Evaluation) -> bool:
    return one.seconds > (1 + ALIKE) * other.seconds


def _first_of_each(
    incumbent: Incumbent, sort: Callable[[Evaluation], object], known: Iterable[Evaluation]
) -> Iterator[Evaluation]:
    """Yield the fastest plan of each sort that is not among the `known` plans, the fastest first."""
    seen = set(map(sort, known))
    for evaluation in incumbent.ranked:
        if (own := sort(evaluation)) not in seen:
            seen.add(own)
            yield evaluation


def _others(incumbent: Incumbent, best: Evaluation, top: int) -> list[Evaluation]:
    """Return the `top` fastest plans that look different from the best plan and from each other. Where the best plan leaves
    accelerators unused, one of them uses all, which shows why."""
    unlike = _first_of_each(incumbent, partial(_shown, incumbent.problem), [best])
    found = list(islice(unlike, top))
    if found and best.plan.unused and all(own.plan.unused for own in found):
        found[-1] = next((own for own in unlike if not own.plan.unused), found[-1])
    return found


def _runner_up(evaluation: Evaluation, best: Evaluation, outlooks: Outlooks) -> RunnerUp:
    outlook = outlooks.known(evaluation.plan)
    return RunnerUp(
        plan=evaluation.plan,
        step_seconds=evaluation.seconds,
        objective_seconds=outlook.objective_seconds if outlook else None,
        slower_percent=100.0 * (evaluation.seconds / best.seconds - 1.0),
        within_interval=evaluation.seconds <= best.prediction.step_seconds_interval[1],
    )


def _shape(problem: Problem, evaluation: Evaluation) -> tuple[ScheduleName, tuple[tuple[Any, ...], ...]]:
    """Return what makes people call two plans the same: schedule, layers, replicas and recompute of every stage."""
    places = problem.cluster.places
    stages = (
        (
            stage.layers,
            tuple(sorted((places[r.ranks[0]].node.name, r.tp, r.micro_batch) for r in stage.replicas)),
            stage.recompute,
        )
        for stage in evaluation.plan.stages
    )
    return evaluation.plan.schedule, tuple(stages)


def _shown(problem: Problem, evaluation: Evaluation) -> object:
    """Return what a table of plans shows of a plan: the same without the places where its chunks begin."""
    schedule, stages = _shape(problem, evaluation)
    return schedule, tuple((sum(stop - start for start, stop in layers), *rest) for layers, *rest in stages)
