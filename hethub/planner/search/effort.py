"""How much of the plan space `auto` looks at."""

from dataclasses import dataclass

from hethub.planner.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work a search does before it answers; all are numbers of candidates unless said otherwise."""

    cuts: int  # kept for each table, by a rough estimate
    finalists: int  # evaluated by the predictor
    climbs: int  # best plans from which the local search climbs
    steps: int  # of a climb at most
    tried_per_step: int  # neighbours evaluated in each step of a climb
    microbatches: int  # replayed one by one by the evaluator
    arrangements: int  # other shapes of plan, from whose best plans it climbs as well
    uphill: float  # factor: neighbours estimated above this many times the present plan's estimate are not evaluated
    optimism: float  # factor: a candidate is evaluated if this times its estimate is below the best plan's step
    descents: int = 0  # made by estimates alone, before anything is evaluated
    pairs: int = 0  # of simultaneous changes, evaluated where no single one helps; and thrice as many moves of a sample


def effort_for(problem: Problem) -> Effort:
    """Return the effort for a question: more for small clusters, whose plans are evaluated in a millisecond."""
    if problem.size <= 6:
        # Few, small microbatches, where estimates are furthest off. So descend from many candidates, and evaluate even those
        # estimated to take half as long again.
        return Effort(
            cuts=96, finalists=32, descents=32, climbs=8, arrangements=16, pairs=64, steps=40,
            tried_per_step=64, microbatches=200_000, uphill=1.6, optimism=0.75,
        )  # fmt: skip
    if problem.size <= 16 and len(problem.device_types) > 1:  # with one device type fewer changes help
        return Effort(
            cuts=96, finalists=48, descents=8, climbs=4, arrangements=8, steps=16,
            tried_per_step=16, microbatches=200_000, uphill=1.3, optimism=0.8,
        )  # fmt: skip
    if problem.size <= 2048:
        return Effort(
            cuts=192, finalists=16, climbs=1, arrangements=6, steps=16, tried_per_step=12,
            microbatches=200_000 if problem.size <= 512 else 60_000, uphill=1.05, optimism=0.95,
        )  # fmt: skip
    # To replay so many microbatches takes a second or more, so few plans are evaluated, and estimates decide.
    return Effort(
        cuts=64, finalists=8, descents=0 if problem.size <= 40_000 else 3, climbs=1, arrangements=1, steps=4,
        tried_per_step=4, microbatches=20_000 if problem.size <= 20_480 else 6_000, uphill=1.05, optimism=0.95,
    )  # fmt: skip
