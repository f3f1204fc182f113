"""Why the best plan is not faster: what binds, found by planning again with each figure 10 % better, the batch
doubled."""

from dataclasses import replace
from functools import partial

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.evaluate.evaluator import Evaluation
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.evaluate.processes import forked
from hethub.planner.problem.problem import Problem
from hethub.planner.problem.scaled import Scale, scaled_problem
from hethub.planner.result import TWICE, Bottleneck
from hethub.planner.search.effort import effort_for
from hethub.planner.search.local_search import climb, descend, movable

RELAXED = 1.1
KNOWN = 8  # of the plans already found, evaluated again for every relaxation


def bottlenecks(incumbent: Incumbent, best: Evaluation, processes: int) -> list[Bottleneck]:
    """Every constraint with its effect, the strongest first."""
    problem = incumbent.problem
    candidates = [best.candidate, *(evaluation.candidate for evaluation in incumbent.ranked[:KNOWN])]
    relaxed = _relaxations(problem)
    # The problem as it is goes along: what the same search gains there is the search's, not any constraint's.
    with forked(partial(_best_rate, candidates), [problem, *relaxed.values()], processes - 1) as results:
        rates = results()
    as_it_is = max(rates[0], best.prediction.tokens_per_second)
    gains = [100.0 * (rate / as_it_is - 1.0) if rate else 0.0 for rate in rates[1:]]
    # A plan that fits fits with better figures, no slower: below 0 the search took another turn there.
    found = [
        Bottleneck(name, gain if name == TWICE else max(0.0, gain)) for name, gain in zip(relaxed, gains, strict=True)
    ]
    return sorted(found, key=lambda found: -found.faster_percent)


def _relaxations(problem: Problem) -> dict[str, Problem]:
    names = list(dict.fromkeys(device_type.accelerator.name for device_type in problem.device_types))
    scales = {f"the speed of {name}": Scale(compute={name: RELAXED}) for name in names}
    scales["the accelerators' memory"] = Scale(memory=RELAXED)
    scales["the links inside nodes"] = Scale(in_node=RELAXED)
    if len({place.machine for place in problem.cluster.places}) > 1:
        scales["the network between nodes"] = Scale(network=RELAXED)
    if len(problem.cluster.islands) > 1:
        scales["the bridge between islands"] = Scale(bridge=RELAXED)
    relaxed = {name: scaled_problem(problem, scale) for name, scale in scales.items()}
    # Twice: a tenth more is seldom divisible by what the batch was chosen for.
    larger = problem.batch._replace(global_batch=2 * problem.batch.global_batch)
    return {**relaxed, TWICE: replace(problem, batch=larger)}


def _best_rate(candidates: list[Candidate], relaxed: Problem) -> float:
    """Tokens per second of the best plan of a relaxed problem: the best plans known, evaluated again, and what small
    changes then make of them; 0 where none of these fits there. A plan that is whole has a batch of its own."""
    incumbent = Incumbent(relaxed)
    effort = replace(effort_for(relaxed), steps=6)
    incumbent.evaluator.microbatches_left = effort.microbatches
    for candidate in candidates:
        if candidate.plan is None or candidate.plan.global_batch == relaxed.batch.global_batch:
            incumbent.consider(candidate)
    for leader in movable(incumbent)[:1]:
        incumbent.consider(descend(incumbent, leader.candidate, set()))
        climb(leader, incumbent, effort, set())
    # Microbatches in flight are chosen anew, and may then be more than memory holds.
    return incumbent.best.prediction.tokens_per_second if incumbent.best else 0.0
