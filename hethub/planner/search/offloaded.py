"""Where nothing fits on the accelerators: state and activations in host memory, as little of them as makes a plan
fit."""

from collections.abc import Iterator
from dataclasses import replace

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.candidate.materialize import materialize
from hethub.planner.evaluate.evaluation import Evaluation
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.generate.cuts import best_cuts
from hethub.planner.generate.table import tabulate
from hethub.planner.problem.problem import Problem
from hethub.planner.search.auto import thriftiest
from hethub.spec.plan import Offload

TRIED = 6  # cuts, each with the offloads below
OFFLOADS: tuple[tuple[Offload, ...], ...] = (
    ("optimizer",),
    ("parameters", "optimizer"),
    ("activations", "parameters", "optimizer"),
)


def search_offloaded(problem: Problem, incumbent: Incumbent) -> Evaluation | None:
    """The fastest of the thriftiest plans with the least offloading with which one fits; None where none does."""
    candidates = list(dict.fromkeys(_plain(problem, incumbent)))
    for offload in OFFLOADS:
        if set(offload) <= set(problem.capabilities.offload):
            for candidate in candidates:
                whole = _with_offload(candidate, problem, incumbent, offload)
                if whole is not None:
                    incumbent.within_time(whole)
        if incumbent.fitting:
            return incumbent.best
    return None


def _plain(problem: Problem, incumbent: Incumbent) -> Iterator[Candidate]:
    """The candidate that came closest, and the best cuts that need the least memory."""
    if incumbent.closest is not None and incumbent.closest.candidate.plan is None:
        yield incumbent.closest.candidate
    few = thriftiest(problem, tabulate(problem, incumbent.costs.unit_costs))
    found = best_cuts(problem, few, TRIED, memory_counts=False)
    for entry in [*found.cuts, *found.pure][: 2 * TRIED]:
        yield entry.candidate(problem)


def _with_offload(
    candidate: Candidate, problem: Problem, incumbent: Incumbent, offload: tuple[Offload, ...]
) -> Candidate | None:
    plan = materialize(candidate, problem, incumbent.costs.unit_costs.worker, None)
    if plan is None:
        return None
    stages = tuple(stage.replace(offload=offload) for stage in plan.stages)
    return replace(candidate, name=f"{'+'.join(offload)} offloaded", plan=plan.replace(stages=stages))
