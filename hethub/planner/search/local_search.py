"""The local search. A descent follows estimates alone; a climb follows what the evaluator says of each neighbour."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import TypeVar

from hethub.planner.candidate.candidate import Candidate
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.microbatch_sizes import fitted, lessened
from hethub.planner.evaluate.evaluator import Evaluation
from hethub.planner.evaluate.incumbent import Incumbent
from hethub.planner.problem.problem import Problem
from hethub.planner.search.effort import Effort
from hethub.planner.search.neighbours import neighbourhoods, neighbours, nudges

# A candidate estimated to take more than this many times the best is given up: small changes do not make up for so much.
FAR = 1.15
WORTHWHILE = 1e-2  # after a gain of this fraction no other sort of change is tried in the same step
MOST_CHANGES = 60

T = TypeVar("T")


def diverse(ranked: Iterable[T], few: int, most: int, sort: Callable[[T], object]) -> list[T]:
    """Return at most `most` of the ranked items, the best first: the first `few`, and the first of each sort."""
    every, unlike = list(ranked), dict[object, T]()
    for own in every:
        unlike.setdefault(sort(own), own)
    return list(dict.fromkeys([*every[:few], *unlike.values()]))[:most]


def evaluate_all(incumbent: Incumbent, candidates: Iterable[Candidate]) -> None:
    for candidate in candidates:
        incumbent.within_time(candidate)


def evaluate_or_fit(incumbent: Incumbent, candidate: Candidate) -> None:
    """Evaluate a candidate. Where it does not fit, also evaluate it with its state divided among replicas, and then with
    smaller and smaller microbatches, as long as it may still be the best."""
    if incumbent.within_time(candidate) is None:
        return
    if candidate not in incumbent.fitting:
        evaluate_all(incumbent, filter(incumbent.may_win, [_divided(candidate, incumbent.problem)]))
    while candidate not in incumbent.fitting:
        smaller = fitted(candidate, incumbent.costs)
        if smaller == candidate:  # by the closed form it fits, but the evaluator says that it does not
            smaller = lessened(candidate)
        if smaller is None or smaller == candidate:
            break
        if incumbent.costs.seconds(smaller) >= incumbent.best_seconds:
            break
        candidate = smaller
        incumbent.within_time(candidate)


def _divided(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the candidate with the highest ZeRO level allowed in every stage that has several replicas."""
    changed = {
        index: replace(stage, zero=problem.zeros[-1])
        for index, stage in enumerate(candidate.stages)
        if stage.replicas > 1
    }
    return candidate.with_stages(changed)


def descended(
    incumbent: Incumbent, found: Sequence[Candidate], descents: int, others: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Return where descents end that start from the best candidates and from differently shaped ones. `others` are the ends of
    earlier descents; a descent that is far behind all ends is given up."""
    passed: set[Candidate] = set()  # a descent that meets the path of an earlier one stops
    ends: list[Candidate] = []
    for candidate in diverse(found, (descents + 1) // 2, descents, attrgetter("shape")):
        best = min(map(incumbent.costs.seconds, [*others, *ends]), default=float("inf"))
        ends.append(descend(incumbent, candidate, passed, FAR * best))
    return ends


def descend(
    incumbent: Incumbent, candidate: Candidate, passed: set[Candidate], hopeless: float = float("inf")
) -> Candidate:
    """Follow small changes, none of which is evaluated, until no neighbour has a better estimate; return the last candidate.

    Stops early on a candidate in `passed`, to which all its own are added, and after a small gain that leaves the estimate
    above `hopeless` seconds."""
    costs = incumbent.costs
    for _ in range(MOST_CHANGES):
        if candidate in passed or incumbent.out_of_time:
            break
        passed.add(candidate)
        before = costs.seconds(candidate)
        candidate = _downhill(costs, candidate)
        if costs.seconds(candidate) > max(hopeless, (1 - WORTHWHILE) * before):
            break
    return candidate


def _downhill(costs: Estimator, candidate: Candidate) -> Candidate:
    """Return the best neighbour of the first sort of change that gains enough, else the best neighbour of all sorts, else the
    candidate itself."""
    least, best = costs.seconds(candidate) * (1 - 1e-6), candidate
    enough = costs.seconds(candidate) * (1 - WORTHWHILE)
    for near in neighbourhoods(candidate, costs):
        own = min(costs.below(near, least), key=costs.seconds, default=None)
        if own is not None:
            least, best = costs.seconds(own), own
        if least < enough:
            break
    return best


def climb_leaders(incumbent: Incumbent, effort: Effort) -> None:
    """Climb from the best plans and from the best plan of some other arrangements; where no plan fits, from the one that
    exceeds memory the least."""
    incumbent.evaluator.microbatches_left = effort.microbatches  # whatever the leaders took
    ranked = movable(incumbent)
    others = diverse(ranked, 0, effort.arrangements, attrgetter("candidate.shape"))
    leaders = list(dict.fromkeys([*ranked[: effort.climbs], *others]))
    if not leaders and incumbent.closest is not None and incumbent.closest.candidate.plan is None and effort.climbs:
        leaders = [incumbent.closest]
    passed: set[Candidate] = set()
    for leader in leaders:
        if leader.candidate not in incumbent.fitting or leader.seconds < FAR * incumbent.best_seconds:
            climb(leader, incumbent, effort, passed)
    # Moves of single samples, which estimates cannot tell apart: evaluate so many, beginning with the best plan's.
    dealt = (near for leader in movable(incumbent) for near in nudges(leader.candidate))
    evaluate_all(incumbent, islice(dealt, 3 * effort.pairs))
    _change_twice(incumbent, effort)


def _change_twice(incumbent: Incumbent, effort: Effort) -> None:
    """Try two changes of the best plan at once where no single change improves it: evaluate the pairs with the smallest
    estimates, climb from a better plan, and repeat while there is one."""
    costs, before = incumbent.costs, float("inf")
    while effort.pairs and (ranked := movable(incumbent)) and ranked[0].seconds < before:
        leader, before = ranked[0], ranked[0].seconds
        once = costs.below(neighbours(leader.candidate, costs), float("inf"))
        twice = (near for candidate in once for near in neighbours(candidate, costs))
        near = costs.below(twice, effort.uphill * costs.seconds(leader.candidate))
        new = [candidate for candidate in near if candidate not in incumbent.tried]
        evaluate_all(incumbent, heapq.nsmallest(effort.pairs, new, key=costs.seconds))
        climb(movable(incumbent)[0], incumbent, effort, set())


def movable(incumbent: Incumbent) -> list[Evaluation]:
    """Return the plans that the local search can change (not the complete plans of families), the fastest first."""
    return [evaluation for evaluation in incumbent.ranked if evaluation.candidate.plan is None]


def climb(best: Evaluation, incumbent: Incumbent, effort: Effort, passed: set[Candidate]) -> None:
    """Go from each plan to a better neighbour, step by step. In each step the neighbours with the best estimates are evaluated.
    Stops early on a candidate in `passed`, to which all its own are added."""
    for _ in range(effort.steps):
        if best.candidate in passed:
            return
        passed.add(best.candidate)
        best = _step(best, incumbent, effort)


def _step(best: Evaluation, incumbent: Incumbent, effort: Effort) -> Evaluation:
    """Return the first neighbour that is evaluated to be better, or the same plan where there is none."""
    costs, ranked = incumbent.costs, neighbours(best.candidate, incumbent.costs)
    if best.fits:
        most = costs.seconds(best.candidate) * effort.uphill
        ranked = heapq.nsmallest(effort.tried_per_step, costs.below(ranked, most), key=costs.seconds)
    for candidate in ranked:
        if incumbent.out_of_time:
            break
        evaluation = incumbent.consider(candidate)
        if evaluation is not None and incumbent.rank(evaluation) < incumbent.rank(best):
            return evaluation
    return best
