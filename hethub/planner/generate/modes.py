"""Generate the modes of a cut: schedules with their chunks, ZeRO levels, recompute and offload.

Sharding or offloading more nearly always takes longer. So the modes of a cut form a ladder, the cheapest first, and a mode
is tried only where no cheaper one fits. Many cuts are tried at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from hethub.planner.candidate.candidate import Candidate, Pattern
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.estimate.microbatch_sizes import fitted
from hethub.planner.problem.problem import Problem
from hethub.spec.plan import SCHEDULES, Offload, Recompute

# Weights fetched for every pass cost more than the optimizer's state, which is fetched once.
OFFLOADS: tuple[tuple[Offload, ...], ...] = (
    (),
    ("optimizer",),
    ("activations",),
    ("activations", "optimizer"),
    ("optimizer", "parameters"),
    ("activations", "optimizer", "parameters"),
)
GAIN = 1.25  # times: the first mode over the others of a cut, by estimate; ZeRO 3 takes up to 22 % less
UNEVEN = (2, 4, 8)  # chunks of a stage, interleaved, where no number of them cuts all stages evenly
MINISTAGES = (4, 16)


class Rung(NamedTuple):
    """A step of the ladder: how a stage shards its state, and what it offloads."""

    zero: int
    offload: tuple[Offload, ...]

    def is_beyond(self, other: "Rung") -> bool:
        """Whether this rung shards or offloads all that the other does, and more."""
        return self != other and self.zero >= other.zero and {*other.offload} <= {*self.offload}


class _Line(NamedTuple):
    """A cut with a schedule and recompute. Each line climbs the ladder by itself."""

    candidate: Candidate
    recompute: Recompute
    pattern: Pattern

    def at(self, rung: Rung) -> Candidate:
        """Return the candidate at a rung of the ladder."""
        return replace(_kept(self.candidate, self.recompute, rung), pattern=self.pattern, extra_in_flight=0)


@lru_cache(maxsize=8)  # its patterns are asked one after the other, and like stages are most of a candidate's
def _kept(candidate: Candidate, recompute: Recompute, rung: Rung) -> Candidate:
    """Return the candidate with all stages changed. Equal stages become one object, so that their hash is computed once."""
    changed = {
        stage: replace(stage, recompute=recompute, zero=rung.zero, offload=rung.offload) for stage in candidate.stages
    }
    return replace(candidate, stages=tuple(map(changed.__getitem__, candidate.stages)))


def propose(
    problem: Problem, costs: Estimator, cuts: Iterable[Candidate], limit_seconds: float = float("inf")
) -> Iterator[Candidate]:
    """Yield the cuts in all modes that may be worth evaluating. Where memory is short they get smaller micro-batches.

    A candidate is left out if its computation alone takes as long as `limit_seconds` or as the shortest estimate so far.
    A cut is given up if the estimate of its first mode is GAIN times the shortest, since no other mode gains so much."""
    lines = [
        _Line(candidate, recompute, pattern)
        for candidate in cuts
        for recompute in problem.recomputes
        for pattern in patterns(problem, candidate)
        if SCHEDULES[pattern.schedule].allows(recompute)
    ]
    shortest, ladder = limit_seconds, rungs(problem)
    reached: dict[_Line, list[Rung]] = {line: [] for line in lines}
    first = dict.fromkeys(lines, 0.0)  # seconds of a line in the first mode
    for rung in dict.fromkeys((ladder[0], ladder[-1], *ladder)):  # where the last is not enough, nothing is
        reached = {line: below for line, below in reached.items() if first[line] < GAIN * shortest}
        asked = {line.at(rung): line for line, below in reached.items() if not any(map(rung.is_beyond, below))}
        costs.bound(asked)
        asked = {candidate: line for candidate, line in asked.items() if costs.least(candidate) < shortest}
        costs.estimate(asked)
        if rung == ladder[0]:
            first = dict.fromkeys(lines, float("inf")) | {asked[own]: costs.seconds(own) for own in asked}
        fitting = [candidate for candidate in asked if costs.likely_fits(candidate)]
        short = [candidate for candidate in asked if not costs.likely_fits(candidate)]
        smaller = {candidate: fitted(candidate, costs) for candidate in short}
        found = [*fitting, *costs.below((made for made in smaller.values() if made is not None), shortest)]
        if rung == ladder[-1]:
            dead = {asked[candidate] for candidate, made in smaller.items() if made is None}
            reached = {line: below for line, below in reached.items() if line not in dead}
        else:
            for candidate in fitting:
                reached[asked[candidate]].append(rung)
        shortest = min([shortest, *map(costs.seconds, found)])
        yield from found


def thriftiest(problem: Problem, cuts: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the cuts in the modes that need the least memory, whether or not they fit."""
    last, recompute = rungs(problem)[-1], problem.recomputes[-1]
    for candidate in cuts:
        for pattern in patterns(problem, candidate):
            yield _Line(candidate, recompute, pattern).at(last)


def rungs(problem: Problem) -> list[Rung]:
    """Return the ladder: ZeRO levels with what may be offloaded, the cheapest first."""
    every = [Rung(zero, offload) for zero in problem.zeros for offload in OFFLOADS]
    return sorted(every, key=lambda rung: (len(rung.offload), rung.zero != problem.usual_zero, rung.zero))


def patterns(problem: Problem, candidate: Candidate) -> list[Pattern]:
    """Return the schedules that a candidate may have, interleaved with each number of chunks that cuts all stages evenly.

    A single stage is not interleaved, since that is 1F1B. Several are not layered, since each would wait for the layers of
    all others. Either is tried all the same if the job asks for it."""
    layers, found = [stage.layers for stage in candidate.stages], list[Pattern]()
    several, asked = len(layers) > 1, len(problem.schedules) == 1
    for schedule in problem.schedules:
        if schedule == "ministages" or (schedule == "interleaved" and (several or asked)):
            few = (2,) if asked and min(layers) < MINISTAGES[0] else MINISTAGES
            numbers = few if schedule == "ministages" else _even_chunks(layers) or UNEVEN
            found += [Pattern(schedule, chunks) for chunks in numbers if chunks <= min(layers)]
        elif schedule == "1f1b" or asked or several != (schedule == "layered"):  # of one stage all but layered are 1f1b
            found.append(Pattern(schedule))
    return found


def _even_chunks(layers: Sequence[int]) -> list[int]:
    most = gcd(*layers)
    return [chunks for chunks in range(2, most + 1) if most % chunks == 0]
