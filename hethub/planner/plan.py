"""From a question to an answer: strategy, search, bounds, runners-up, or the reason why no plan fits."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.evaluate.evaluator import Judge, Verdict, is_equal
from hethub.planner.explain.bottlenecks import reasons
from hethub.planner.explain.homogeneous_sum import Alone, kinds_alone, upper_bound_tokens_per_second
from hethub.planner.explain.infeasible import nothing_fits
from hethub.planner.explain.robust import most_robust
from hethub.planner.explain.unsearched import not_searched
from hethub.planner.generate.cuts import best_cuts
from hethub.planner.generate.families import FAMILIES
from hethub.planner.problem.problem import Batch, Problem, pose
from hethub.planner.result import FamilyRow, PlanResult, RunnerUp
from hethub.planner.search.auto import search, search_family, search_whole
from hethub.planner.search.effort import effort_for
from hethub.planner.search.offloaded import search_offloaded
from hethub.planner.search.processes import uncollected
from hethub.predictor import Prediction
from hethub.predictor.cost.profile import ProfileSpec
from hethub.spec.accelerator import Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput, suggest
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec

FEW = 8  # cuts looked at where the time limit left none


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
    robust: bool = False,
    profile: ProfileSpec | None = None,
    processes: int = 1,
) -> PlanResult:
    """The best plan found for `train` = (global_batch, seq_len, precision), which fits and can be executed.

    `with_bounds` also plans every kind alone, for the upper bound. `explain` adds every family's own best plan and what
    binds. `robust` answers with the plan whose worst case over links -20 % and compute -10 % is best. What `profile`
    measured counts instead of estimates. Raises BadInput
    where the question contradicts itself or no plan fits; the message says by how many bytes on which accelerators, and
    what would help. With several `processes` the kinds are planned beside the whole, and what binds is found for all
    constraints at once; the plans are the same.
    """
    started = time.perf_counter()
    problem = pose(model, cluster, Batch(*train), constraints, profile=profile)
    judge = Judge(problem, UnitCosts(problem))
    with _alone(problem, judge, with_bounds, processes) as kinds_alone:
        best = find(problem, judge, strategy)
        rows = _families(problem, judge, strategy) if explain else {}
        if strategy == "auto":
            best = judge.best  # a family's plan, where explaining found a faster one
        chosen = most_robust(problem, judge) if robust else None
        best = _confirmed(problem, judge, chosen.verdict if chosen else best, strategy)
        alone = kinds_alone()
    prediction = _bounded(best.prediction, alone)
    tokens = problem.batch.global_batch * problem.batch.seq_len
    return PlanResult(
        plan=best.plan,
        prediction=prediction,
        strategy=strategy,
        runners_up=_runners_up(problem, judge, best, top),
        not_searched=not_searched(problem),
        kinds_alone=alone or (),
        families=tuple(_row(name, verdict, best) for name, verdict in rows.items()),
        start_step_seconds=judge.start.seconds if judge.start else None,
        out_of_time=judge.out_of_time,
        lower_bound_seconds=tokens / prediction.ceiling_tokens_per_second,
        space_bound_seconds=judge.space_bound_seconds,
        estimate_error_percent=judge.estimate_error_percent,
        worst_step_seconds=chosen.worst_step_seconds if chosen else None,
        reasons=tuple(reasons(problem, judge, best, processes)) if explain else (),
        candidates=judge.candidates,
        search_seconds=time.perf_counter() - started,
    )


@contextmanager
def _alone(problem: Problem, judge: Judge, wanted: bool, processes: int) -> Iterator[Callable[[], Alone]]:
    """What gives every kind's best plan by itself, if it is wanted; None where time is up, since a search cut short
    would understate the bound. Under a time limit nothing runs beside the search."""
    unlimited = problem.with_constraints(problem.constraints.replace(time_limit_seconds=None))
    beside = wanted and processes > 1 and judge.limit_seconds is None
    if beside:
        judge.table  # noqa: B018 - probes the predictor's memory, and processes forked behind it share what was found
    with kinds_alone(unlimited, judge.costs, processes if beside else 1) as found:
        yield lambda: found() if wanted and not judge.out_of_time else None


def _bounded(prediction: Prediction, alone: Alone) -> Prediction:
    """The prediction beside the upper bound that the kinds alone make."""
    bound = upper_bound_tokens_per_second(alone)
    percent = 100.0 * prediction.tokens_per_second / bound if bound else None
    return replace(prediction, upper_bound_tokens_per_second=bound, percent_of_upper_bound=percent)


def answer(problem: Problem, strategy: str = "auto") -> Verdict:
    """The strategy's best plan for a posed problem, without bounds and explanations. Raises BadInput where none
    fits."""
    judge = Judge(problem, UnitCosts(problem))
    return _confirmed(problem, judge, find(problem, judge, strategy), strategy)


def _confirmed(problem: Problem, judge: Judge, best: Verdict | None, strategy: str) -> Verdict:
    """The first of the answer and its runners-up that binds in full; the search takes short cuts for alike plans.
    Raises BadInput where none fits.

    Where all microbatches are equal the short cut is exact, and dealing tens of thousands of them would prove nothing
    new.
    """
    ranked = sorted(judge.fitting.values(), key=lambda verdict: verdict.seconds)
    for verdict in (best, *ranked) if best else ():
        if is_equal(verdict.plan):
            return verdict
        try:
            bind(verdict.plan, problem.model, problem.cluster)
        except BadInput:  # too few microbatches in flight for unlike samples, which only the full check sees
            judge.discard(verdict)
            continue
        return verdict
    raise BadInput(nothing_fits(problem, judge, strategy))


def _families(problem: Problem, judge: Judge, strategy: str) -> dict[str, Verdict | None]:
    """Every family's best plan, each found by a judge of its own; `auto` takes them over, so that it is never
    slower."""
    found = {}
    for name, family in FAMILIES.items():
        own = Judge(problem, judge.costs, surrogate=judge.surrogate)
        found[name] = search_family(problem, own, family)
        if strategy == "auto":
            judge.admit(own)
    return found


def _row(name: str, verdict: Verdict | None, best: Verdict) -> FamilyRow:
    if verdict is None:
        return FamilyRow(strategy=name, plan=None, step_seconds=None, slower_percent=None)
    slower = 100.0 * (verdict.seconds / best.seconds - 1.0)
    return FamilyRow(strategy=name, plan=verdict.plan, step_seconds=verdict.seconds, slower_percent=slower)


def find(problem: Problem, judge: Judge, strategy: str) -> Verdict | None:
    """The strategy's best plan, or None where none fits. Raises BadInput for a strategy that is not offered."""
    if strategy == "hap":
        raise BadInput("strategy 'hap' is not offered by this version: its operator-level plans come later; use auto.")
    if strategy not in ("auto", *FAMILIES):
        raise BadInput(f"strategy '{strategy}' is not known; {suggest(strategy, ['auto', *FAMILIES])}")
    if problem.constraints.schedule in problem.capabilities.family_schedules:
        return search_whole(problem, judge, FAMILIES if strategy == "auto" else (strategy,))
    if strategy == "auto":
        found = search(problem, judge, effort_for(problem))
        return found or (_first_fitting(problem, judge) if judge.out_of_time else search_offloaded(problem, judge))
    return search_family(problem, judge, FAMILIES[strategy])


def _first_fitting(problem: Problem, judge: Judge) -> Verdict | None:
    """Where time was over before any plan was known: the first of the best cuts that fits."""
    for entry in best_cuts(problem, judge.table, FEW).cuts:
        judge(entry.draft(problem))
        if judge.fitting:
            return judge.best
    return None


def _runners_up(problem: Problem, judge: Judge, best: Verdict, top: int) -> tuple[RunnerUp, ...]:
    """The next best plans that differ from each other in more than ZeRO levels, samples and microbatches in flight."""
    ranked = sorted(judge.fitting.values(), key=lambda verdict: verdict.seconds)
    chosen: list[Verdict] = []
    seen = {_shape(problem, best)}
    for verdict in ranked:
        shape = _shape(problem, verdict)
        if len(chosen) < top and shape not in seen:
            seen.add(shape)
            chosen.append(verdict)
    reach = best.prediction.step_seconds_interval[1]
    return tuple(
        RunnerUp(
            plan=verdict.plan,
            step_seconds=verdict.seconds,
            slower_percent=100.0 * (verdict.seconds / best.seconds - 1.0),
            within_interval=verdict.seconds <= reach,
        )
        for verdict in chosen
    )


def _shape(problem: Problem, verdict: Verdict) -> object:
    """What people call the same plan, whatever micro-batches its draft asked for beyond a replica's samples."""
    places = problem.cluster.places
    stages = (
        (
            stage.layers,
            tuple(sorted((places[r.ranks[0]].node.name, r.tp, r.micro_batch) for r in stage.replicas)),
            stage.recompute,
        )
        for stage in verdict.plan.stages
    )
    return verdict.plan.schedule, tuple(stages)
