"""Candidates made into plans that can be bound: samples divided by speed, microbatches in flight, ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from hethub.planner.candidate.candidate import Candidate, CandidateStage, ReplicaGroup, assign_units
from hethub.planner.candidate.samples import Worker, divide
from hethub.planner.problem.problem import Problem, Unit
from hethub.spec.plan import Offload, PlanSpec, Recompute, ReplicaSpec, ScheduleName, StageSpec
from hethub.spec.ranges import from_sizes, split


class Replica(NamedTuple):
    """A replica with its load; microbatches held None for the default."""

    unit: Unit
    micro_batch: int
    samples: int
    held: int | None = None


class StageChoice(NamedTuple):
    """What a plan says of a stage beside its layers."""

    replicas: Sequence[Replica]
    zero: int
    recompute: Recompute
    offload: tuple[Offload, ...] = ()
    state_shares: Mapping[int, float] = {}


Assigned = Sequence[tuple[Unit, int]]  # a stage's units with their micro-batches
# One of a group's replicas with its speed; and whether the stage is the model's first, and its last.
WorkerOf = Callable[[CandidateStage, ReplicaGroup, bool, bool], Worker]


def materialize(
    candidate: Candidate, problem: Problem, worker: WorkerOf, holds: Sequence[int] | None
) -> PlanSpec | None:
    """The plan of a candidate with samples divided by speed; None where some replica would have no sample, or the
    machines cannot be divided so. `holds` are the microbatches in flight per stage, None for the default."""
    schedule, chunks = candidate.pattern
    if max(candidate.replica_counts) > problem.batch.global_batch or not candidate.is_executable:
        return None
    assigned = assign_units(candidate, problem)
    if assigned is None:
        return None
    stages = []
    for index, (stage, own) in enumerate(zip(candidate.stages, assigned, strict=True)):
        by_speed = _divided(candidate, index, own, problem, worker)
        samples = [n + more for n, more in zip(by_speed, stage.nudges, strict=True)] if stage.nudges else by_speed
        if min(samples) < 1:
            return None
        held = holds[index] if holds else None
        replicas = [Replica(*placed, count, held) for placed, count in zip(own, samples, strict=True)]
        stages.append(StageChoice(replicas, stage.zero, stage.recompute, stage.offload))
    return plan_of(problem, schedule, [stage.layers for stage in candidate.stages], stages, chunks)


def chunked(layers: Sequence[int], chunks: int) -> list[tuple[tuple[int, int], ...]]:
    """Per stage of so many layers its chunks [start, stop), chunk by chunk over the stages, as even as can be."""
    sizes = [[part.size for part in split(own, chunks)] for own in layers]
    every = from_sizes(own[chunk] for chunk in range(chunks) for own in sizes)
    return [tuple(every[stage :: len(layers)]) for stage in range(len(layers))]


def _divided(candidate: Candidate, index: int, assigned: Assigned, problem: Problem, worker: WorkerOf) -> list[int]:
    """The samples of a stage's replicas: by speed, unless all are alike or the candidate says evenly."""
    stage, total = candidate.stages[index], problem.batch.global_batch
    if candidate.even or len(stage.groups) == 1:
        return [part.size for part in split(total, len(assigned))]
    first, last = index == 0, index == len(candidate.stages) - 1
    workers = {own[:3]: worker(stage, own, first, last) for own in stage.groups}
    each = [workers[unit.device_type, unit.tp, micro_batch] for unit, micro_batch in assigned]
    # Else a slow replica's micro-batch would be smaller than what is given.
    return divide(total, each, problem.constraints.micro_batch or 1)


def plan_of(
    problem: Problem, schedule: ScheduleName, layers: Sequence[int], stages: Iterable[StageChoice], chunks: int = 1
) -> PlanSpec:
    """The plan of stages of so many layers."""
    return problem.plan(schedule, map(partial(_stage_spec, problem), chunked(layers, chunks), stages))


def _stage_spec(problem: Problem, layers: tuple[tuple[int, int], ...], own: StageChoice) -> StageSpec:
    device_types = {replica.unit.device_type for replica in own.replicas}
    return StageSpec(
        layers=layers,
        replicas=tuple(
            _replica_spec(r.unit.ranks, min(r.micro_batch, r.samples), r.samples, r.held) for r in own.replicas
        ),
        zero=problem.zero_of(own.zero, device_types, len(own.replicas)),
        recompute=own.recompute,
        state_shares=dict(own.state_shares),
        offload=own.offload,
    )


@lru_cache(maxsize=4096)
def _replica_spec(ranks: tuple[int, ...], micro_batch: int, samples: int, held: int | None) -> ReplicaSpec:
    return ReplicaSpec(ranks=ranks, micro_batch=micro_batch, samples=samples, in_flight=held)
