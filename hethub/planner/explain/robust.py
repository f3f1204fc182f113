"""Robust choice: of the plans found, the one whose worst case over wrong figures is best."""

from typing import NamedTuple

from hethub.planner.evaluate.evaluation import Evaluation
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.evaluate.layouts import layout_of
from hethub.planner.explain.scaled import Scale, scaled
from hethub.planner.problem.problem import Problem
from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec

LINKS, COMPUTE = 0.2, 0.1
CONSIDERED = 24


class Robust(NamedTuple):
    """A plan with its step in the worst of the scenarios."""

    evaluation: Evaluation
    worst_step_seconds: float


def scenarios(problem: Problem) -> list[ClusterSpec]:
    """Corners of links -20 % with compute -10 %: all kinds slower, and each kind slower while the others are faster.

    Faster links and compute never make a plan slower, so the other corners cannot be the worst.
    """
    names = list(dict.fromkeys(kind.accelerator.name for kind in problem.kinds))
    slow, fast, links = 1 - COMPUTE, 1 + COMPUTE, 1 - LINKS
    speeds = [dict.fromkeys(names, slow)]
    speeds += [{other: slow if other == name else fast for other in names} for name in names if len(names) > 1]
    return [scaled(problem.cluster, Scale(compute=s, in_node=links, network=links, bridge=links)) for s in speeds]


def most_robust(problem: Problem, incumbent: Incumbent) -> Robust | None:
    """The plan with the best worst case among the fastest found, or None where none fits."""
    clusters = scenarios(problem)
    fastest = incumbent.ranked[:CONSIDERED]
    found = [
        Robust(evaluation, max(_seconds(problem, evaluation, cluster) for cluster in clusters))
        for evaluation in fastest
    ]
    return min(found, key=lambda robust: robust.worst_step_seconds, default=None)


def _seconds(problem: Problem, evaluation: Evaluation, cluster: ClusterSpec) -> float:
    return predict(layout_of(evaluation.plan, problem.model, cluster), profile=problem.profile).step_seconds
