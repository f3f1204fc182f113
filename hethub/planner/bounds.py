"""HETHUB's upper bound: the sum over kinds of the throughput that each reaches alone in its best plan."""

from hethub.planner.costs import UnitCosts
from hethub.planner.judge import Judge
from hethub.planner.problem import Batch, Problem, pose
from hethub.planner.result import KindAlone
from hethub.planner.search import effort_for, search
from hethub.predictor.profile import ProfileSpec
from hethub.spec.accelerator import Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec
from hethub.spec.model import ModelSpec


def kinds_alone_for(
    model: ModelSpec,
    cluster: ClusterSpec,
    train: Batch | tuple[int, int, Precision],
    constraints: ConstraintsSpec | None = None,
    profile: ProfileSpec | None = None,
) -> tuple[KindAlone, ...] | None:
    """The parts of the upper bound for a job, whatever its plan; None where the bound is undefined."""
    problem = pose(model, cluster, Batch(*train), constraints, profile=profile)
    return kinds_alone(problem, UnitCosts(problem))


def kinds_alone(problem: Problem, costs: UnitCosts) -> tuple[KindAlone, ...] | None:
    """Every kind alone with its part of the batch; None where the bound is undefined, a kind's part being no sample."""
    weights = [kind.size * costs.layer_rate(index) for index, kind in enumerate(problem.kinds)]
    alone = []
    for index, weight in enumerate(weights):
        samples = round(problem.batch.global_batch * weight / sum(weights))
        found = _alone(problem, index, samples) if samples else None
        if found is None:
            return None
        alone.append(found)
    return tuple(alone)


def upper_bound_tokens_per_second(alone: tuple[KindAlone, ...] | None) -> float | None:
    """The sum of the kinds' throughputs."""
    return sum(kind.tokens_per_second for kind in alone) if alone else None


def _alone(problem: Problem, index: int, samples: int) -> KindAlone | None:
    """The kind's best plan, as `auto` finds it; where nothing fits, its best plan without a memory limit, marked so."""
    kind = problem.kinds[index]
    part = problem.part(index)
    part = part.on(part.cluster, Batch(samples, problem.batch.seq_len, problem.batch.precision))
    for lifted in (False, True):
        judge = Judge(part, UnitCosts(part), ignore_memory=lifted)
        best = search(part, judge, effort_for(part))
        if best is not None:
            return KindAlone(
                accelerator=kind.accelerator.name,
                island=kind.island,
                count=kind.size,
                global_batch=samples,
                tokens_per_second=best.prediction.tokens_per_second,
                memory_lifted=lifted,
                cluster=part.cluster,
                plan=best.plan,
            )
    return None
