"""`cephalo`: Cephalo's plans (arXiv 2411.01075). One stage, no TP; samples and training state divided independently.

Every accelerator gets a micro-batch and a number of samples for speed, whatever state it holds; the state is then cut so
that all fit, evenly where possible. Faults of the published planner are not repeated: communication is priced, and no
plan over memory is proposed.
"""

from collections.abc import Iterator

from hethub.planner.costs import UnitCosts
from hethub.planner.draft import Draft, DraftStage, Seats, merged
from hethub.planner.families.uniform import allowed
from hethub.planner.footprint import ONLY, Coefficients
from hethub.planner.problem import Problem
from hethub.spec.plan import Recompute


def drafts(problem: Problem, costs: UnitCosts) -> Iterator[Draft]:
    """A draft per recompute and largest micro-batch, where the state can be cut so that all fit."""
    sharded = [zero for zero in problem.zeros if zero]
    if (
        problem.constraints.tp not in (None, 1)
        or not allowed(problem, 1, problem.size)
        or not sharded
        or problem.size == 1
    ):
        return
    for recompute in problem.recomputes:
        for most in problem.micro_batches:
            found = _draft(problem, costs, recompute, most, sharded[0])
            if found is not None:
                yield found


def _draft(problem: Problem, costs: UnitCosts, recompute: Recompute, most: int, zero: int) -> Draft | None:
    """The largest micro-batches up to `most` that leave room for the state; None where there is none."""
    kinds = range(len(problem.kinds))
    prints, sizes = [], []
    for kind in kinds:
        options = {b: problem.coefficients(kind, 1, b, recompute) for b in problem.micro_batches if b <= most}
        able = [b for b, held in options.items() if _room(problem, kind, held) >= 0]
        if not able:
            return None
        seconds = {b: costs.rate(kind, 1, b, recompute).tile(problem.model.layers, True, True).total for b in able}
        sizes.append(max(able, key=lambda b: b / seconds[b]))
        prints.append(options[sizes[kind]])
    state = float(prints[0].state(problem.model.layers, ONLY))
    rooms = [_room(problem, kind, prints[kind]) / state for kind in kinds]
    shares = _state_shares(rooms, [kind.size for kind in problem.kinds])
    if shares is None:
        return None
    named = () if len(set(shares)) == 1 else tuple(enumerate(shares))
    seats = merged([Seats(kind, 1, sizes[kind], problem.kinds[kind].size) for kind in kinds])
    return Draft((DraftStage(problem.model.layers, seats, recompute, zero, named),))


def _room(problem: Problem, kind: int, held: Coefficients) -> float:
    """Bytes left for shared state on a rank; a little is kept for rounding."""
    return 0.995 * problem.capacity(kind) - float(held.fixed(problem.model.layers, 1, ONLY))


def _state_shares(rooms: list[float], counts: list[int]) -> list[float] | None:
    """A rank's fraction by kind, equal but for those without room; None where all rooms together do not suffice."""

    def held(most: float) -> float:
        return sum(count * min(room, most) for room, count in zip(rooms, counts, strict=True))

    if held(1.0) < 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if held(middle) >= 1.0 else (middle, high)
    return [min(room, high) / held(high) for room in rooms]
