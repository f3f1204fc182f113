"""Where nothing fits on the accelerators: state and activations in host memory, as little of them as makes a plan
fit."""

from collections.abc import Iterator
from dataclasses import replace

from hethub.planner.candidate.candidate import Draft
from hethub.planner.candidate.materialize import complete
from hethub.planner.evaluate.evaluator import Judge, Verdict
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


def search_offloaded(problem: Problem, judge: Judge) -> Verdict | None:
    """The fastest of the thriftiest plans with the least offloading with which one fits; None where none does."""
    drafts = list(dict.fromkeys(_plain(problem, judge)))
    for offload in OFFLOADS:
        if set(offload) <= set(problem.capabilities.offload):
            for draft in drafts:
                if not judge.out_of_time and (whole := _with_offload(draft, problem, judge, offload)) is not None:
                    judge(whole)
        if judge.fitting:
            return judge.best
    return None


def _plain(problem: Problem, judge: Judge) -> Iterator[Draft]:
    """The draft that came closest, and the best cuts that need the least memory."""
    if judge.closest is not None and judge.closest.draft.plan is None:
        yield judge.closest.draft
    few = thriftiest(problem, tabulate(problem, judge.costs))
    found = best_cuts(problem, few, TRIED, memory_counts=False)
    for entry in [*found.cuts, *found.pure][: 2 * TRIED]:
        yield entry.draft(problem)


def _with_offload(draft: Draft, problem: Problem, judge: Judge, offload: tuple[Offload, ...]) -> Draft | None:
    plan = complete(draft, problem, judge.costs, None)
    if plan is None:
        return None
    stages = tuple(stage.replace(offload=offload) for stage in plan.stages)
    return replace(draft, name=f"{'+'.join(offload)} offloaded", plan=plan.replace(stages=stages))
