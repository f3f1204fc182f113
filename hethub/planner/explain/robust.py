"""Robust choice: of the plans found, the one that loses least against the best of them, whichever figures were wrong.

Not the best worst step: all figures slower at once is the worst for every plan, so that would ask for the best plan of a
slower cluster and learn nothing from the other scenarios.
"""

from collections.abc import Sequence
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
    """A plan with its step in the worst of the scenarios, and how many times the best plan's step its own is in the
    scenario where it loses most."""

    evaluation: Evaluation
    worst_step_seconds: float
    regret: float


def scenarios(problem: Problem) -> list[ClusterSpec]:
    """Corners of links -20 % with compute -10 %: all kinds slower, and each kind slower while the others are faster;
    each also with the links as they are."""
    names = list(dict.fromkeys(kind.accelerator.name for kind in problem.kinds))
    slow, fast = 1 - COMPUTE, 1 + COMPUTE
    speeds = [dict.fromkeys(names, slow)]
    speeds += [{other: slow if other == name else fast for other in names} for name in names if len(names) > 1]
    return [
        scaled(problem.cluster, Scale(compute=own, in_node=links, network=links, bridge=links))
        for own in speeds
        for links in (1 - LINKS, 1.0)
    ]


def most_robust(problem: Problem, incumbent: Incumbent) -> Robust | None:
    """The plan with the smallest largest regret among the fastest found, or None where none fits."""
    clusters = scenarios(problem)
    fastest = incumbent.ranked[:CONSIDERED]
    seconds = [[_seconds(problem, evaluation, cluster) for cluster in clusters] for evaluation in fastest]
    return least_regret(fastest, seconds)


def least_regret(plans: Sequence[Evaluation], seconds: Sequence[Sequence[float]]) -> Robust | None:
    """Of plans with their steps by scenario, the one whose largest ratio to a scenario's best is smallest (Savage's
    minimax regret, as a ratio); of equals the first."""
    best = [min(own) for own in zip(*seconds, strict=True)]
    found = [
        Robust(plan, max(own), max(a / b for a, b in zip(own, best, strict=True)))
        for plan, own in zip(plans, seconds, strict=True)
    ]
    return min(found, key=lambda robust: robust.regret, default=None)


def _seconds(problem: Problem, evaluation: Evaluation, cluster: ClusterSpec) -> float:
    return predict(layout_of(evaluation.plan, problem.model, cluster), profile=problem.profile).step_seconds
