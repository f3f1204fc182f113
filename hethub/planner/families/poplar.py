"""`poplar`: Poplar's plans (arXiv 2408.12596). One stage, no TP; every accelerator at the micro-batch of its peak speed
within its memory, samples in proportion to speed."""

from collections.abc import Iterator

from hethub.planner.costs import UnitCosts
from hethub.planner.draft import Draft, DraftStage, Seat
from hethub.planner.families.uniform import allowed, units_in_order
from hethub.planner.footprint import ONLY
from hethub.planner.problem import Problem, Unit
from hethub.spec.plan import Recompute


def drafts(problem: Problem, costs: UnitCosts) -> Iterator[Draft]:
    """One draft per recompute and ZeRO level, where every accelerator can hold the model."""
    if problem.constraints.tp not in (None, 1) or not allowed(problem, 1, problem.size):
        return
    units = units_in_order(problem, 1)
    for recompute in problem.recomputes:
        for zero in problem.zeros:
            sizes = [
                _peak(problem, costs, problem.units(kind, 1)[0], recompute, zero) for kind in range(len(problem.kinds))
            ]
            if all(sizes):
                seats = tuple(Seat(unit, sizes[unit.kind] or 1) for unit in units)
                yield Draft((DraftStage(problem.model.layers, seats, recompute, zero),))


def _peak(problem: Problem, costs: UnitCosts, unit: Unit, recompute: Recompute, zero: int) -> int | None:
    """The micro-batch at which the unit is fastest among those that fit; None where none does."""
    layers = problem.model.layers
    capacity = problem.capacity(unit.kind)
    fitting = [
        b
        for b in problem.micro_batches
        if problem.coefficients(unit.kind, 1, b, recompute).least_replicas(layers, 1, ONLY, capacity, zero > 0)[layers]
        <= problem.size
    ]
    most = -(-problem.batch.global_batch // problem.size) * 4  # beyond a few even shares nobody gets a whole tile
    able = [b for b in fitting if b <= most]
    return max(able, key=lambda b: b / costs.rate(unit, b, recompute).tile(layers, True, True).total, default=None)
