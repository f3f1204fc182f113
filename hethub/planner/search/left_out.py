"""Plans that leave device types unused: found on the cluster without them, and placed in the whole one."""

from dataclasses import replace

from hethub.planner.candidate.candidate import Candidate, merged
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.evaluate.evaluator import Evaluation, Evaluator
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.problem.problem import Problem
from hethub.planner.search.auto import WHOLE_MICROBATCHES, search
from hethub.planner.search.effort import effort_for
from hethub.spec.plan import PlanSpec

PLACED = 8  # of the plans found without a device type, the fastest, evaluated in the whole cluster


def leave_out(problem: Problem, incumbent: Incumbent) -> Evaluation | None:
    """The best plan after looking at plans without the accelerators with the least memory, as long as none fits, and then
    without the slowest, the next slowest too, and so on: until what is left, at its best, is slower than the best plan."""
    costs, device_types = incumbent.costs.unit_costs, problem.device_types
    rates = [device_type.size * costs.layer_rate(index) for index, device_type in enumerate(device_types)]
    used = list(range(len(device_types)))
    while incumbent.best is None and len(used) > 1 and not incumbent.out_of_time:
        used = sorted(used, key=lambda device_type: device_types[device_type].memory_bytes)[1:]
        _search_without(problem, incumbent, sorted(used))
    used.sort(key=costs.layer_rate)
    while incumbent.best is not None and len(used) > 1 and not incumbent.out_of_time:
        used = used[1:]
        reached = incumbent.best.prediction.percent_of_ceiling / 100.0
        if sum(rates[device_type] for device_type in used) < reached * sum(rates):
            break
        _search_without(problem, incumbent, sorted(used))
    return incumbent.best


def _search_without(problem: Problem, incumbent: Incumbent, used: list[int]) -> None:
    """Makes known the fastest plans that use these device types only, where they are near the best."""
    part = problem.of_device_types(used)
    own = Incumbent(Evaluator(part, Estimator(part)), to_beat=incumbent.hopeful_seconds)
    own.limit_seconds = incumbent.seconds_left
    search(part, own, effort_for(part))
    incumbent.evaluator.microbatches_left = WHOLE_MICROBATCHES
    for evaluation in own.ranked[:PLACED]:
        if evaluation.seconds < own.to_beat:
            incumbent.consider(_placed(problem, used, evaluation))


def _placed(problem: Problem, used: list[int], evaluation: Evaluation) -> Candidate:
    """A plan for some device types as one for all, with the others unused."""
    ranks = sorted(rank for device_type in used for rank in problem.device_types[device_type].ranks)
    stages = []
    for stage in evaluation.candidate.stages:
        groups = [group._replace(device_type=used[group.device_type]) for group in stage.groups]
        stages.append(replace(stage, groups=merged(groups)))
    plan = _renumbered(problem, evaluation.plan, ranks)
    return replace(evaluation.candidate, stages=tuple(stages), name=plan.model_dump_json(), plan=plan)


def _renumbered(problem: Problem, plan: PlanSpec, ranks: list[int]) -> PlanSpec:
    """The plan with its ranks in the places of these, for the whole cluster."""
    stages = []
    for stage in plan.stages:
        replicas = tuple(own.replace(ranks=tuple(ranks[rank] for rank in own.ranks)) for own in stage.replicas)
        shares = {ranks[rank]: share for rank, share in stage.state_shares.items()}
        stages.append(stage.replace(replicas=replicas, state_shares=shares))
    return problem.plan(plan.schedule, stages, sorted({*range(problem.size)} - {*ranks}))
