"""The local search: descents by estimates alone, climbs by what the evaluator says."""

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

# Times the best: a family's candidate estimated to take longer is not evaluated; small changes lead no further.
FAR = 1.15
WORTHWHILE = 1e-2  # a gain for which no other sort of change is looked at
MOST_CHANGES = 60

T = TypeVar("T")


def diverse(ranked: Iterable[T], few: int, most: int, sort: Callable[[T], object]) -> list[T]:
    """Of what is ranked, the best first, the first few and the first of each sort, so many in all."""
    every, unlike = list(ranked), dict[object, T]()
    for own in every:
        unlike.setdefault(sort(own), own)
    return list(dict.fromkeys([*every[:few], *unlike.values()]))[:most]


def evaluate_all(incumbent: Incumbent, candidates: Iterable[Candidate]) -> None:
    for candidate in candidates:
        incumbent.within_time(candidate)


def evaluate_or_fit(incumbent: Incumbent, candidate: Candidate) -> None:
    """Evaluates a candidate, and where it turns out not to fit what may still be the best: its state divided among
    replicas, and what is left of it with smaller and smaller microbatches."""
    if incumbent.within_time(candidate) is None:
        return
    if candidate not in incumbent.fitting:
        evaluate_all(incumbent, filter(incumbent.may_win, [_divided(candidate, incumbent.problem)]))
    while candidate not in incumbent.fitting:
        smaller = fitted(candidate, incumbent.costs)
        if smaller == candidate:  # it should fit by the closed form, which the evaluator knows better
            smaller = lessened(candidate)
        if smaller is None or smaller == candidate:
            break
        if incumbent.costs.seconds(smaller) >= incumbent.best_seconds:
            break
        candidate = smaller
        incumbent.within_time(candidate)


def _divided(candidate: Candidate, problem: Problem) -> Candidate:
    """The candidate with as much of its state divided among replicas as ZeRO allows."""
    changed = {
        index: replace(stage, zero=problem.zeros[-1])
        for index, stage in enumerate(candidate.stages)
        if stage.replicas > 1
    }
    return candidate.with_stages(changed)


def descended(
    incumbent: Incumbent, found: Sequence[Candidate], descents: int, others: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Where descents from the best and the unlike ones among the candidates found end; `others` have ended before. One
    that is far behind these gives up."""
    passed: set[Candidate] = set()  # where one descent has been, another need not go on
    ends: list[Candidate] = []
    for candidate in diverse(found, (descents + 1) // 2, descents, attrgetter("shape")):
        best = min(map(incumbent.costs.seconds, [*others, *ends]), default=float("inf"))
        ends.append(descend(incumbent, candidate, passed, FAR * best))
    return ends


def descend(
    incumbent: Incumbent, candidate: Candidate, passed: set[Candidate], hopeless: float = float("inf")
) -> Candidate:
    """Where the estimate has no better neighbour: many small changes, none of them evaluated. Ends early on a candidate
    that is among those `passed`, to which its own are added, and after a small gain above `hopeless` seconds."""
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
    """The best neighbour of the first sort among which one is worth while, or the best of all; the candidate itself
    where none is better."""
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
    """Climbs from the best plans, and the best of some arrangements; where nothing fits, from the one least over
    memory."""
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
    # What estimates do not see, of as many of the best plans as that takes.
    dealt = (near for leader in movable(incumbent) for near in nudges(leader.candidate))
    evaluate_all(incumbent, islice(dealt, 3 * effort.pairs))
    _change_twice(incumbent, effort)


def _change_twice(incumbent: Incumbent, effort: Effort) -> None:
    """Where no change of the best plan is better, two at once: evaluates those with the smallest estimates, and goes on
    from what is better."""
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
    """The plans that small changes can move about, the fastest first."""
    return [evaluation for evaluation in incumbent.ranked if evaluation.candidate.plan is None]


def climb(best: Evaluation, incumbent: Incumbent, effort: Effort, passed: set[Candidate]) -> None:
    """The best neighbour of the best neighbour …; of each step's neighbours the evaluator sees those estimated best.
    Ends early on a candidate that is among those `passed`, to which its own are added."""
    for _ in range(effort.steps):
        if best.candidate in passed:
            return
        passed.add(best.candidate)
        best = _step(best, incumbent, effort)


def _step(best: Evaluation, incumbent: Incumbent, effort: Effort) -> Evaluation:
    """The first better neighbour that the evaluator sees, or the same plan where it sees none."""
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
