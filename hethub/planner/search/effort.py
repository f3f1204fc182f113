"""How much of the plan space `auto` looks at."""

from dataclasses import dataclass

from hethub.planner.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of the space is looked at before the answer is given."""

    cuts: int  # kept by rough estimate
    finalists: int  # evaluated by the predictor
    descents: int  # by estimates alone, before the evaluator sees any
    climbs: int
    steps: int
    tried_per_step: int
    microbatches: int  # replayed one by one by the evaluator
    arrangements: int = 0  # whose best plans are climbed from as well
    pairs: int = 0  # of changes at once, evaluated where none alone is better; and thrice as many deals of samples
    uphill: float = 1.004  # times the estimate of where a step begins: what leads to estimates above is not evaluated
    behind: float = 1.15  # times the best end of other descents: above it, one whose gains are small gives up
    optimism: float = 0.98  # of an estimate: what the prediction may be where the candidate is evaluated


def effort_for(problem: Problem) -> Effort:
    """More for small clusters, whose plans are evaluated in a millisecond."""
    if problem.size <= 6:
        # Few and small microbatches, where estimates are furthest off: many ways down, and the evaluator sees what they
        # say is half as long again.
        return Effort(
            cuts=96, finalists=32, descents=32, climbs=8, arrangements=16, pairs=64, steps=40,
            tried_per_step=64, microbatches=200_000, uphill=1.6, optimism=0.75,
        )  # fmt: skip
    alike = len(problem.device_types) == 1  # where fewer changes lead anywhere
    if problem.size <= 8 and not alike:
        return Effort(
            cuts=96, finalists=48, descents=8, climbs=4, arrangements=8, steps=16,
            tried_per_step=16, microbatches=200_000, uphill=1.3, optimism=0.8,
        )  # fmt: skip
    if problem.size <= 16:
        return Effort(
            cuts=96, finalists=8 if alike else 24, descents=2 if alike else 8,
            climbs=2 if alike else 4, steps=16, tried_per_step=8, microbatches=200_000, uphill=1.02,
            optimism=0.98 if alike else 0.9,
        )  # fmt: skip
    if problem.size <= 512:
        return Effort(
            cuts=64, finalists=8, descents=4, climbs=2, steps=16, tried_per_step=4 if alike else 6,
            microbatches=200_000, uphill=1.004, behind=1.15 if alike else 1.05,
        )  # fmt: skip
    return Effort(
        cuts=64,
        finalists=8,
        descents=2 if alike else 3,
        climbs=1,
        steps=2,
        tried_per_step=4,
        microbatches=60_000 if problem.size <= 2048 else 20_000 if problem.size <= 20_480 else 6_000,
        behind=1.15 if alike else 1.05,
    )
