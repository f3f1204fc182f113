"""Why the best plan is not faster: what binds, found by planning again with each figure 10 % better, the batch
doubled."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from hethub.planner.candidate.candidate import Draft
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.evaluate.evaluator import Judge, Verdict
from hethub.planner.explain.scaled import Scale, scaled
from hethub.planner.problem.problem import Batch, Problem
from hethub.planner.search.auto import climb, descend
from hethub.planner.search.effort import effort_for
from hethub.planner.search.processes import forked

RELAXED = 1.1
KNOWN = 8  # of the plans already found, judged again for every relaxation
TWICE = "twice the batch"


class Reason(NamedTuple):
    """A constraint and by how much more throughput the best plan has when it is relaxed."""

    constraint: str
    faster_percent: float

    def sentence(self) -> str:
        better = "" if self.constraint == TWICE else " 10 % better"
        return f"{self.constraint}{better} makes the best plan {self.faster_percent:.1f} % faster"


def reasons(problem: Problem, judge: Judge, best: Verdict, processes: int = 1) -> list[Reason]:
    """Every constraint with its effect, the strongest first."""
    ranked = sorted(judge.fitting.values(), key=lambda verdict: verdict.seconds)
    drafts = [best.draft, *(verdict.draft for verdict in ranked[:KNOWN])]
    relaxed = _relaxations(problem)
    with forked(processes) as run:
        gains = run(partial(_gain, drafts, best), relaxed.values())
        found = [Reason(name, gain) for name, gain in zip(relaxed, gains, strict=True)]
    return sorted(found, key=lambda reason: -reason.faster_percent)


def _relaxations(problem: Problem) -> dict[str, Problem]:
    cluster = problem.cluster
    names = list(dict.fromkeys(kind.accelerator.name for kind in problem.kinds))
    scales = {f"the speed of {name}": Scale(compute={name: RELAXED}) for name in names}
    scales["the accelerators' memory"] = Scale(memory=RELAXED)
    scales["the links inside nodes"] = Scale(in_node=RELAXED)
    if len({place.machine for place in cluster.places}) > 1:
        scales["the network between nodes"] = Scale(network=RELAXED)
    if len(cluster.islands) > 1:
        scales["the bridge between islands"] = Scale(bridge=RELAXED)
    relaxed = {name: problem.on(scaled(cluster, scale)) for name, scale in scales.items()}
    batch = problem.batch
    # Twice: a tenth more is seldom divisible by what the batch was chosen for.
    larger = Batch(2 * batch.global_batch, batch.seq_len, batch.precision)
    return {**relaxed, TWICE: problem.on(cluster, larger)}


def _gain(drafts: list[Draft], best: Verdict, relaxed: Problem) -> float:
    """Percent more tokens per second in the best plan of the relaxed problem: the best plans known, judged again, and
    what small changes then make of them; 0 where none of these fits there."""
    judge = Judge(relaxed, UnitCosts(relaxed))
    effort = replace(effort_for(relaxed), steps=6)
    judge.microbatches_left = effort.microbatches
    for draft in drafts:
        judge(draft)
    leader = judge.best
    if leader is None:  # microbatches in flight are chosen anew, and may then be more than memory holds
        return 0.0
    judge(descend(judge, leader.draft, set()))
    climb(leader, judge, effort, set())
    found = min(judge.fitting.values(), key=lambda verdict: verdict.seconds)
    return 100.0 * (found.prediction.tokens_per_second / best.prediction.tokens_per_second - 1.0)
