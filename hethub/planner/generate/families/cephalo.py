"""`cephalo`: Cephalo's plans (arXiv 2411.01075). One stage, no TP; samples and training state divided independently.

ZeRO-3 with layered accumulation: all micro-batches pass a layer before the next, so a layer is gathered once per pass.
Every accelerator gets a micro-batch and a number of samples for speed, whatever state it holds; the state is then cut
so that all fit, evenly where possible; what layers keep is recomputed and offloaded where that is needed. Faults of
the published planner are not repeated: communication is priced, and no plan over memory is proposed.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup
from hethub.planner.candidate.materialize import Replica, StageChoice
from hethub.planner.candidate.samples import Worker, divide
from hethub.planner.estimate.costs import UnitCosts
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.generate.families.uniform import units_in_order
from hethub.planner.generate.families.whole import candidate_of, held_alone, is_allowed, shared_bytes
from hethub.planner.problem.problem import Problem, Unit
from hethub.spec.plan import Offload, Recompute, ScheduleName

ATTEMPTS = 12  # at samples that leave every rank room
# Of what the framework and the communicators leave of a memory: shares are met to an element, buffers are not counted in full.
ROUNDING = 0.985


def propose_whole(problem: Problem, costs: Estimator) -> list[Candidate]:
    """A candidate per recompute and offload, with the largest micro-batches whose state can be cut so that all fit. Those
    that compute least first."""
    return sorted(_every(problem, costs.unit_costs), key=costs.least)


def _every(problem: Problem, unit_costs: UnitCosts) -> Iterator[Candidate]:
    zero = max(problem.zeros)
    if not is_allowed(problem) or problem.size == 1 or not zero:
        return
    layered = zero == 3 and "layered" in problem.schedules
    schedule: ScheduleName = "layered" if layered else "1f1b"
    state = shared_bytes(problem, zero)
    offloads: list[tuple[Offload, ...]] = [(), ("activations",)]
    for recompute in problem.recomputes:
        for offload in offloads:
            wanted = StageChoice((), zero, recompute, offload)
            stage, cut = _largest(problem, unit_costs, state, wanted, schedule)
            if stage is not None:
                yield candidate_of(problem, schedule, stage)
                if not cut and not stage.state_shares:
                    break  # more room would change nothing


def _largest(
    problem: Problem, unit_costs: UnitCosts, state: float, wanted: StageChoice, schedule: ScheduleName
) -> tuple[StageChoice | None, bool]:
    """The stage with the largest micro-batch with which all fit, and whether memory took something of what would be
    fastest; no stage where none fits."""
    for most in reversed(problem.micro_batches):
        curves = _curves(problem, unit_costs, wanted.recompute, most)
        stage, cut = _stage(problem, curves, state, wanted, schedule)
        if stage is not None:
            return stage, cut or most < problem.micro_batches[-1]
    return None, True


def _stage(
    problem: Problem, curves: list[Worker], state: float, stage: StageChoice, schedule: ScheduleName
) -> tuple[StageChoice | None, bool]:
    """Samples for speed, fewer where memory asks for it, and state where there is room; None where there is too little.
    And whether there are fewer samples somewhere."""
    limits: dict[Unit, int] = {}
    for _ in range(ATTEMPTS):
        replicas = _replicas(problem, curves, limits)
        if replicas is None:
            break
        placed = stage._replace(replicas=replicas)
        rooms = _rooms(problem, schedule, placed, state)
        shares = _state_shares(rooms)
        if shares is not None:
            even = max(shares) - min(shares) < 1e-9
            named = {own.unit.ranks[0]: share for own, share in zip(replicas, shares, strict=True)}
            return placed if even else placed._replace(state_shares=named), bool(limits)
        limits |= {own.unit: 3 * own.samples // 4 for own, room in zip(replicas, rooms, strict=True) if room < 0.0}
        if min(rooms) >= 0.0 or 0 in limits.values():
            break
    return None, True


def _curves(problem: Problem, unit_costs: UnitCosts, recompute: Recompute, most: int) -> list[Worker]:
    """Every device type at its fastest micro-batch up to `most`."""
    curves, stage = [], CandidateStage(problem.model.layers, (), recompute)
    for device_type in range(len(problem.device_types)):
        _, microbatches = unit_costs.worker(stage, ReplicaGroup(device_type, 1, most, 1), True, True)
        size = max(
            (b for b in problem.micro_batches if b <= problem.at_most(device_type, most)),
            key=lambda b: b / microbatches[b - 1],
        )
        curves.append(Worker(size, microbatches[:size]))
    return curves


def _replicas(problem: Problem, curves: Sequence[Worker], limits: Mapping[Unit, int]) -> list[Replica] | None:
    """Every rank with samples for the earliest finish, those with a limit at it; None where the others cannot take
    all."""
    units = units_in_order(problem, 1)
    free = [unit for unit in units if unit not in limits]
    left = problem.batch.global_batch - sum(limits.values())
    if left < len(free) or not free:
        return None
    divided = divide(left, [curves[unit.device_type] for unit in free])
    loads = dict(limits) | dict(zip(free, divided, strict=True))
    return [Replica(unit, min(curves[unit.device_type].micro_batch, loads[unit]), loads[unit]) for unit in units]


def _rooms(problem: Problem, schedule: ScheduleName, stage: StageChoice, state: float) -> list[float]:
    """What every rank has left for state, as a fraction of all of it."""
    rooms = []
    for own, held in zip(stage.replicas, held_alone(problem, schedule, stage), strict=True):
        free = problem.capacity(own.unit.device_type) - held.fixed
        rooms.append((ROUNDING * free - (held.alone - held.fixed)) / state)
    return rooms


def _state_shares(rooms: Sequence[float]) -> list[float] | None:
    """A fraction for every rank, equal but for those without room; None where all rooms together do not suffice."""
    ordered = np.sort(rooms)
    if ordered[0] < 0.0 or np.minimum(ordered, 1.0).sum() < 1.0:
        return None
    # What those without room leave, divided by all others: the first of these has room for it.
    levels = (1.0 - np.cumsum(ordered) + ordered) / np.arange(len(ordered), 0, -1)
    suffices = levels <= ordered
    suffices[-1] = True  # where the rooms make one exactly, rounding may deny it
    shares = np.minimum(rooms, levels[suffices.argmax()])
    return (shares / shares.sum()).tolist()
