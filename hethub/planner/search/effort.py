"""How much of the plan space `auto` looks at."""

from dataclasses import dataclass

from hethub.planner.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of the space is looked at before the answer is given."""

    cuts: int  # kept by rough estimate
    finalists: int  # evaluated by the predictor
    climbs: int  # from the best plans
    steps: int
    tried_per_step: int
    microbatches: int  # replayed one by one by the evaluator
    arrangements: int  # whose best plans are climbed from as well
    uphill: float  # times the estimate of where a step begins: what leads to estimates above is not evaluated
    optimism: float  # of an estimate: what the prediction may be where the candidate is evaluated
    descents: int = 0  # by estimates alone, before the evaluator sees any
    pairs: int = 0  # of changes at once, evaluated where none alone is better; and thrice as many deals of samples


def effort_for(problem: Problem) -> Effort:
    """More for small clusters, whose plans are evaluated in a millisecond."""
    if problem.size <= 6:
        # Few and small microbatches, where estimates are furthest off: many ways down, and the evaluator sees what they
        # say is half as long again.
        return Effort(
            cuts=96, finalists=32, descents=32, climbs=8, arrangements=16, pairs=64, steps=40,
            tried_per_step=64, microbatches=200_000, uphill=1.6, optimism=0.75,
        )  # fmt: skip
    if problem.size <= 16 and len(problem.device_types) > 1:  # of one type fewer changes lead anywhere
        return Effort(
            cuts=96, finalists=48, descents=8, climbs=4, arrangements=8, steps=16,
            tried_per_step=16, microbatches=200_000, uphill=1.3, optimism=0.8,
        )  # fmt: skip
    if problem.size <= 2048:
        return Effort(
            cuts=192, finalists=16, climbs=1, arrangements=6, steps=16, tried_per_step=12,
            microbatches=200_000 if problem.size <= 512 else 60_000, uphill=1.05, optimism=0.95,
        )  # fmt: skip
    # The replay of many microbatches takes a second and more; in the end so few plans are evaluated that estimates lead.
    return Effort(
        cuts=64, finalists=8, descents=0 if problem.size <= 40_000 else 3, climbs=1, arrangements=1, steps=4,
        tried_per_step=4, microbatches=20_000 if problem.size <= 20_480 else 6_000, uphill=1.05, optimism=0.95,
    )  # fmt: skip
