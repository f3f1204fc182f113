"""`uniform`: the base line. One TP, DP and PP degree, even layers, even samples, ranks in the cluster's order."""

from collections import Counter
from collections.abc import Iterator

from hethub.planner.candidate.candidate import Candidate, CandidateStage, Pattern, ReplicaGroup, merged
from hethub.planner.estimate.estimator import Estimator
from hethub.planner.problem.problem import Problem, Unit
from hethub.spec.ranges import split

Sort = tuple[tuple[tuple[int, int], int], ...]  # a stage's units: ((device type, TP degree), how many)


def propose(problem: Problem, costs: Estimator) -> Iterator[Candidate]:
    """Every even division of the cluster."""
    degrees = [problem.constraints.tp] if problem.constraints.tp else problem.degrees
    for tp in degrees:
        units = units_in_order(problem, tp)
        if any(unit.tp != tp for unit in units):
            continue
        for stages in range(1, min(len(units), problem.model.layers) + 1):
            if len(units) % stages == 0 and problem.allows([len(units) // stages] * stages):
                yield from _variants(problem, units, stages)


def units_in_order(problem: Problem, tp: int) -> list[Unit]:
    """All units of one TP degree by rank."""
    units = [unit for device_type in range(len(problem.device_types)) for unit in problem.units(device_type, tp)]
    return sorted(units, key=lambda unit: unit.ranks)


def groups_of(problem: Problem, sorts: Sort, micro_batch: int) -> tuple[ReplicaGroup, ...]:
    """Counted units as a stage's replicas, all with one micro-batch, or what their device type measured to fit."""
    return merged(
        [
            ReplicaGroup(device_type, tp, problem.at_most(device_type, micro_batch), number)
            for (device_type, tp), number in sorts
        ]
    )


def _variants(problem: Problem, units: list[Unit], stages: int) -> Iterator[Candidate]:
    replicas = len(units) // stages
    sizes = [part.size for part in split(problem.model.layers, stages)]
    each = [(unit.device_type, unit.tp) for unit in units]
    sorts = [tuple(Counter(each[i * replicas : (i + 1) * replicas]).items()) for i in range(stages)]
    sized = list(zip(sizes, sorts, strict=True))
    for micro_batch in problem.micro_batches:
        fits = all(
            problem.at_most(device_type, micro_batch) == micro_batch for device_type in range(len(problem.device_types))
        )
        if micro_batch * replicas > problem.batch.global_batch or not fits:
            break
        held = {own: groups_of(problem, own, micro_batch) for own in set(sorts)}
        for recompute in problem.recomputes:
            formed = [CandidateStage(layers, held[sort], recompute, problem.usual_zero) for layers, sort in sized]
            yield Candidate(tuple(formed), even=True, pattern=Pattern(problem.schedule))
