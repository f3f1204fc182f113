"""From a question to an answer: strategy, search, bounds, runners-up, or the reason why no plan fits."""

import time
from dataclasses import replace

from hethub.planner.bounds import kinds_alone, upper_bound_tokens_per_second
from hethub.planner.costs import UnitCosts
from hethub.planner.families import FAMILIES
from hethub.planner.judge import Judge, Verdict
from hethub.planner.problem import Batch, Problem, pose
from hethub.planner.result import PlanResult, RunnerUp
from hethub.planner.search import effort_for, search, search_family
from hethub.spec.accelerator import Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput, suggest
from hethub.spec.job import ConstraintsSpec
from hethub.spec.model import ModelSpec


def plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    train: Batch | tuple[int, int, Precision],
    constraints: ConstraintsSpec | None = None,
    strategy: str = "auto",
    *,
    with_bounds: bool = True,
    top: int = 5,
) -> PlanResult:
    """The best plan found for `train` = (global_batch, seq_len, precision), which fits and can be executed.

    `with_bounds` also plans every kind alone, for the upper bound. Raises BadInput where the question contradicts
    itself or no plan fits; the message says by how many bytes on which accelerators.
    """
    started = time.perf_counter()
    problem = pose(model, cluster, Batch(*train), constraints)
    judge = Judge(problem, UnitCosts(problem))
    best = find(problem, judge, strategy)
    if best is None:
        raise BadInput(_nothing_fits(problem, judge, strategy))
    alone = kinds_alone(problem, judge.costs) if with_bounds else None
    bound = upper_bound_tokens_per_second(alone)
    prediction = replace(
        best.prediction,
        upper_bound_tokens_per_second=bound,
        percent_of_upper_bound=100.0 * best.prediction.tokens_per_second / bound if bound else None,
    )
    tokens = problem.batch.global_batch * problem.batch.seq_len
    return PlanResult(
        plan=best.plan,
        prediction=prediction,
        strategy=strategy,
        search_seconds=time.perf_counter() - started,
        candidates=judge.candidates,
        runners_up=_runners_up(judge, best, top),
        not_searched=tuple(not_searched(problem)),
        kinds_alone=alone or (),
        out_of_time=judge.out_of_time,
        lower_bound_seconds=tokens / prediction.ceiling_tokens_per_second,
    )


def find(problem: Problem, judge: Judge, strategy: str) -> Verdict | None:
    """The strategy's best plan, or None where none fits. Raises BadInput for a strategy that is not offered."""
    if strategy == "auto":
        return search(problem, judge, effort_for(problem))
    if strategy == "hap":
        raise BadInput("strategy 'hap' is not offered by this version: its operator-level plans come later; use auto.")
    if strategy not in FAMILIES:
        raise BadInput(f"strategy '{strategy}' is not known; {suggest(strategy, ['auto', *FAMILIES])}")
    return search_family(problem, judge, FAMILIES[strategy], effort_for(problem))


def _runners_up(judge: Judge, best: Verdict, top: int) -> tuple[RunnerUp, ...]:
    """The next best plans that differ from each other."""
    ranked = sorted(judge.fitting.values(), key=lambda verdict: verdict.seconds)
    chosen: list[Verdict] = []
    for verdict in ranked:
        if len(chosen) < top and all(verdict.plan != other.plan for other in (best, *chosen)):
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


def not_searched(problem: Problem) -> list[str]:
    """The parts of the plan space that this search does not enter, one entry each."""
    return [
        *problem.capabilities.left_out(),
        "uneven tensor_shares inside a replica",
        "uneven state_shares",
        "TP degrees that are no power of two",
        "plans that leave accelerators unused",
        "stages whose accelerators are not consecutive in an order of kinds, except by local improvement",
    ]


def _nothing_fits(problem: Problem, judge: Judge, strategy: str) -> str:
    """One paragraph: the plan that came closest, and by how many bytes it misses on which accelerators."""
    closest = judge.closest
    if closest is None:
        return (
            f"strategy '{strategy}' has no plan for cluster '{problem.cluster.name}' ({problem.size} accelerators) and global_batch "
            f"{problem.batch.global_batch} under these constraints: every accelerator needs a layer and a sample. Raise global_batch, "
            "use fewer accelerators, relax the constraints or choose another strategy."
        )
    reserve = problem.constraints.reserve
    misses: dict[str, tuple[int, int]] = {}
    for entry in closest.prediction.memory:
        over = entry.bytes - int(entry.limit * (1 - reserve))
        if over > 0:
            number, worst = misses.get(entry.accelerator, (0, 0))
            misses[entry.accelerator] = (number + 1, max(worst, over))
    listed = "; ".join(f"{number} {name} by up to {worst:,} bytes ({worst / 2**30:.2f} GiB)" for name, (number, worst) in misses.items())
    return (
        f"no plan fits: model '{problem.model.name}' with global_batch {problem.batch.global_batch} and seq_len {problem.batch.seq_len} on "
        f"cluster '{problem.cluster.name}'. The plan that comes closest exceeds the memory (of which {reserve:.0%} stay free) of {listed}. "
        "Shorten seq_len, take a smaller model, lower constraints.reserve or add accelerators."
    )
