"""From a question to an answer: strategy, search, bounds, runners-up, or the reason why no plan fits."""

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

# Up to so many accelerators, plans compared with the fastest over all scenarios.
LOOKED_AT = ((128, 4), (1024, 2), (float("inf"), 1))
SEARCHED = ("tp", "pp", "dp", "micro_batch", "max_micro_batch", "schedule", "recompute", "zero", "forbid")
WIDER = 4  # times as many are looked at in the middle of the scenarios
ALIKE = 1e-5  # of a step, far less than any prediction resolves


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
    """The best plan found for `train` = (global_batch, seq_len, precision), which fits and can be executed. `auto` takes
    of the fastest plans it found the one with the smallest mean step over the scenarios (`evaluate/outlook.py`), all
    other strategies the fastest.

    `with_bounds` also plans every device type alone, to compare with. `explain` adds every family's own best plan and what
    binds. What `profile` measured counts instead of estimates. Raises BadInput where the question contradicts itself or no
    plan fits; the message says by how many bytes on which accelerators, and what would help. With several
    `processes` the device types are planned beside the whole, and what binds is found for all constraints at once; the plans
    are the same.
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
        start_step_seconds=incumbent.start.seconds if incumbent.start else None,
        out_of_time=incumbent.out_of_time,
        space_bound_seconds=incumbent.space_bound_seconds,
        reasons=tuple(bottlenecks(incumbent, best, processes)) if explain else (),
        candidates=len(incumbent.tried),
        search_seconds=time.perf_counter() - started,
    )


def _fastest(incumbent: Incumbent, strategy: str, explain: bool) -> tuple[Evaluation, dict[str, Evaluation | None]]:
    """The strategy's fastest plan, and where explained every family's. Raises BadInput where none fits."""
    best = find(incumbent, strategy)
    rows = _families(incumbent, strategy) if explain else {}
    if strategy == "auto":
        best = incumbent.best  # a family's plan, where explaining found a faster one
    if best is None:
        raise BadInput(nothing_fits(incumbent, strategy))
    return best, rows


def _families(incumbent: Incumbent, strategy: str) -> dict[str, Evaluation | None]:
    """Every family's best plan, each found by a search of its own; `auto` takes them over, so that it is never
    slower."""
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
    """The strategy's best plan, or None where none fits. Raises BadInput for a strategy that is not offered."""
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
    """Whether the answer without constraints keeps to those given and so is the answer with them. The plans of that search
    which keep to them are taken over; under a time limit there is none."""
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
    """Of the fastest unlike plans the one with the smallest mean over the scenarios. Compared are the fastest and those
    with the shortest step in the middle of the scenarios, which is hardly ever above the mean."""
    size = incumbent.problem.size
    most = next(number for largest, number in LOOKED_AT if size <= largest)
    chosen, least = fastest, outlooks.of(fastest.plan).objective_seconds
    if incumbent.out_of_time:
        return chosen
    # In more than ZeRO levels, samples and microbatches in flight.
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
    """A plan that takes as long as the one chosen, as predicted and in the mean, whose stages are cut into the fewest chunks,
    and which offloads nothing that they have room for."""
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
    """The plan with offload on those stages alone that do not fit without."""
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
    """The fastest plan of each sort of which none is known, the fastest first."""
    seen = set(map(sort, known))
    for evaluation in incumbent.ranked:
        if (own := sort(evaluation)) not in seen:
            seen.add(own)
            yield evaluation


def _others(incumbent: Incumbent, best: Evaluation, top: int) -> list[Evaluation]:
    """So many of the plans that are unlike the best one and each other; where it leaves accelerators unused, one that
    leaves none among them, which tells why."""
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
    """What people call the same plan, whatever micro-batches its candidate asked for beyond a replica's samples."""
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
    """What a table of plans shows of one, which is not where its chunks begin."""
    schedule, stages = _shape(problem, evaluation)
    return schedule, tuple((sum(stop - start for start, stop in layers), *rest) for layers, *rest in stages)
