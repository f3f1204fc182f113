"""`poplar`: Poplar's plans (arXiv 2408.12596). One stage, no TP; every accelerator at the micro-batch of its peak speed
within its memory, samples in proportion to speed."""

from collections.abc import Iterator

from hethub.planner.costs import UnitCosts
from hethub.planner.draft import Draft, DraftStage, Seats, merged
from hethub.planner.families.uniform import allowed
from hethub.planner.footprint import ONLY
from hethub.planner.problem import Problem
from hethub.spec.plan import Recompute


def drafts(problem: Problem, costs: UnitCosts) -> Iterator[Draft]:
    """One draft per recompute and ZeRO level, where every accelerator can hold the model."""
    if problem.constraints.tp not in (None, 1) or not allowed(problem, 1, problem.size):
        return
    for recompute in problem.recomputes:
        for zero in problem.zeros:
            sizes = [_peak(problem, costs, kind, recompute, zero) for kind in range(len(problem.kinds))]
            if all(sizes):
                seats = [Seats(k, 1, size or 1, problem.kinds[k].size) for k, size in enumerate(sizes)]
                yield Draft((DraftStage(problem.model.layers, merged(seats), recompute, zero),))


def _peak(problem: Problem, costs: UnitCosts, kind: int, recompute: Recompute, zero: int) -> int | None:
    """The micro-batch at which an accelerator of the kind is fastest among those that fit; None where none does."""
    layers = problem.model.layers
    capacity = problem.capacity(kind)
    fitting = [
        b
        for b in problem.micro_batches
        if problem.coefficients(kind, 1, b, recompute).least_replicas(layers, 1, ONLY, capacity, zero > 0)[layers]
        <= problem.size
    ]
    most = -(-problem.batch.global_batch // problem.size) * 4  # beyond a few even shares nobody gets a whole tile
    able = [b for b in fitting if b <= most]
    return max(able, key=lambda b: b / costs.rate(kind, 1, b, recompute).tile(layers, True, True).total, default=None)
