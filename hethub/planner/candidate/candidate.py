"""Candidates: plans as the search moves them about. Equal accelerators are counted, not named: `materialize` names
them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hethub.planner.problem.problem import Combination, Problem, Unit
from hethub.spec.plan import SCHEDULES, Offload, PlanSpec, Recompute, ScheduleName


class ReplicaGroup(NamedTuple):
    """`number` like replicas of a stage: units of one device type and TP degree with one micro-batch. Their samples follow
    from their speed."""

    device_type: int
    tp: int
    micro_batch: int
    number: int


@dataclass(frozen=True)
class CandidateStage:
    """A stage without ranks: how many layers, which replicas. Its groups come from `merged`, like ones together."""

    layers: int
    groups: tuple[ReplicaGroup, ...]
    recompute: Recompute = "none"
    zero: int = 1
    nudges: tuple[int, ...] = ()  # samples more or fewer than by speed, per replica; empty: none
    offload: tuple[Offload, ...] = ()
    core: tuple[object, ...] = field(init=False, repr=False, compare=False)  # what its times and memory depend on
    replicas: int = field(init=False, repr=False, compare=False)
    ranks: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        core = (self.layers, self.groups, self.recompute, self.zero, self.offload)
        numbers, ranks = [own.number for own in self.groups], [own.tp * own.number for own in self.groups]
        own = {"core": core, "replicas": sum(numbers), "ranks": sum(ranks), "_hash": hash((core, self.nudges))}
        self.__dict__.update(own)  # frozen, and all of a search's many stages are asked for all of it

    def __hash__(self) -> int:  # asked more often than anything else
        return self._hash

    def with_groups(self, groups: Sequence[ReplicaGroup]) -> "CandidateStage":
        """The stage with other replicas, and so without nudges."""
        return CandidateStage(self.layers, merged(groups), self.recompute, self.zero, offload=self.offload)

    def with_sizes(self, sizes: Sequence[int]) -> "CandidateStage":
        """The stage with other micro-batches, by groups."""
        if list(sizes) == [own.micro_batch for own in self.groups]:
            return self
        groups = merged([own._replace(micro_batch=size) for own, size in zip(self.groups, sizes, strict=True)])
        return CandidateStage(self.layers, groups, self.recompute, self.zero, nudges=self.nudges, offload=self.offload)


def merged(groups: Sequence[ReplicaGroup]) -> tuple[ReplicaGroup, ...]:
    """Groups in one spelling: like ones together, in order."""
    counts: dict[tuple[int, int, int], int] = {}
    for device_type, tp, micro_batch, count in groups:
        counts[device_type, tp, micro_batch] = counts.get((device_type, tp, micro_batch), 0) + count
    return tuple(ReplicaGroup(*sort, count) for sort, count in sorted(counts.items()) if count)


class Pattern(NamedTuple):
    """A schedule, and into how many chunks every stage cuts its layers under it."""

    schedule: ScheduleName
    chunks: int = 1

    @property
    def goes_chunk_by_chunk(self) -> bool:
        """Whether all microbatches pass a chunk before the next, with collectives once per chunk and pass."""
        return SCHEDULES[self.schedule].goes_chunk_by_chunk

    @property
    def holds_all(self) -> bool:
        """Whether all microbatches are held at once."""
        return SCHEDULES[self.schedule].holds_all

    @property
    def defers_wgrad(self) -> bool:
        """Whether gradients of weights wait until their pipeline has nothing else to do."""
        return SCHEDULES[self.schedule].defers_wgrad


PLAIN = Pattern("1f1b")

Where = Sequence[tuple[int, int | None]]  # stages, each with one device type of its replicas or, None, all

# What of `extra_in_flight` is looked at, by schedule, the default first: under others it is no choice.
EXTRA_IN_FLIGHT: dict[ScheduleName, tuple[int, ...]] = {"1f1b": (0, 1), "zero_bubble": (0, 1, 2)}


@dataclass(frozen=True)
class Candidate:
    """Stages in order. `extra_in_flight`, where memory allows: 0 the default; 1 as many microbatches as hide the links
    between stages; 2 as many as a stage can send down until the first is back."""

    stages: tuple[CandidateStage, ...]
    extra_in_flight: int = 0
    even: bool = False  # samples in equal parts, whatever the speeds
    plan: PlanSpec | None = None  # evaluated as it stands, not moved about
    pattern: Pattern = PLAIN

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.stages, self.extra_in_flight, self.even, self.pattern))

    def with_stages(self, changed: Mapping[int, CandidateStage]) -> "Candidate":
        """The candidate with other stages at these indices."""
        stages = tuple([changed.get(index, stage) for index, stage in enumerate(self.stages)])
        return Candidate(stages, self.extra_in_flight, self.even, self.plan, self.pattern)

    def with_sizes(self, where: Where, size: Callable[[int, ReplicaGroup], int]) -> "Candidate":
        """The candidate with other micro-batches in `where`: what is said of a stage's index and a group of its replicas."""
        changed = {}
        for index, device_type in where:
            groups = self.stages[index].groups
            sizes = [size(index, own) if device_type in (None, own.device_type) else own.micro_batch for own in groups]
            changed[index] = self.stages[index].with_sizes(sizes)
        return self.with_stages(changed)

    @cached_property
    def shape(self) -> object:
        """Which units form which stage, whatever their layers and micro-batches."""
        return tuple([tuple([(own.device_type, own.tp, own.number) for own in stage.groups]) for stage in self.stages])

    @property
    def mixtures(self) -> Iterator[Iterator[int]]:
        """Per stage, the device types in it."""
        return ((own.device_type for own in stage.groups) for stage in self.stages)

    @property
    def is_executable(self) -> bool:
        """Whether the stages can do what the schedule asks of them: layers for all chunks, and something to put off."""
        schedule, chunks = self.pattern
        if not all(map(SCHEDULES[schedule].allows, {stage.recompute for stage in self.stages})):
            return False
        return chunks == 1 or all(stage.layers >= chunks for stage in self.stages)

    @cached_property
    def is_in_step(self) -> bool:
        """Whether one microbatch of every replica is as many samples in each stage."""
        return len({sum(own.micro_batch * own.number for own in stage.groups) for stage in self.stages}) == 1

    @cached_property
    def replica_counts(self) -> tuple[int, ...]:
        return tuple([stage.replicas for stage in self.stages])


def to_candidate(problem: Problem, stages: Iterable[tuple[int, Sequence[Unit]]], combination: Combination) -> Candidate:
    """Stages of (layers, units) as a candidate: micro-batches by device type."""
    formed = []
    for layers, units in stages:
        sorts = Counter((unit.device_type, unit.tp) for unit in units)
        groups = [ReplicaGroup(k, tp, combination.micro_batches[k], number) for (k, tp), number in sorts.items()]
        formed.append(CandidateStage(layers, merged(groups), combination.recompute, problem.usual_zero))
    return Candidate(tuple(formed), pattern=Pattern(problem.schedule))


def assign_units(candidate: Candidate, problem: Problem) -> list[list[tuple[Unit, int]]] | None:
    """Per stage, every replica's ranks and micro-batch in order of ranks, or None where machines cannot be divided so.

    Each device type's machines are filled from the first stage to the last, in every stage the widest units first.
    """
    free = [[list(machine) for machine in device_type.machines] for device_type in problem.device_types]
    first = [0] * len(free)  # the first machine with a free rank
    assigned = []
    for stage in candidate.stages:
        own: list[tuple[Unit, int]] = []
        for device_type, tp, micro_batch, count in sorted(stage.groups, key=lambda group: (-group.tp, group)):
            machines = free[device_type]
            index = first[device_type]
            while count:
                if index == len(machines):
                    return None
                while count and len(machines[index]) >= tp:
                    own.append((Unit(device_type, tuple(machines[index][:tp])), micro_batch))
                    del machines[index][:tp]
                    count -= 1
                index += 1
            while first[device_type] < len(machines) and not machines[first[device_type]]:
                first[device_type] += 1
        assigned.append(sorted(own, key=lambda entry: entry[0].ranks))
    return assigned
