"""Drafts: plans as the search moves them about. Equal accelerators are counted, not named; `complete` names them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hethub.planner.problem.problem import Combination, Problem, Unit
from hethub.spec.plan import PlanSpec, Recompute, ScheduleName


class Seats(NamedTuple):
    """`number` like replicas of a stage: units of one kind and TP degree with one micro-batch. Their samples follow
    from their speed."""

    kind: int
    tp: int
    micro_batch: int
    number: int


@dataclass(frozen=True)
class DraftStage:
    """A stage without ranks: how many layers, which replicas. Build it with `stage_of`, which merges like seats."""

    layers: int
    seats: tuple[Seats, ...]
    recompute: Recompute = "none"
    zero: int = 1
    state_shares: tuple[tuple[int, float], ...] = ()  # (kind, share of one of its ranks)
    nudges: tuple[int, ...] = ()  # samples more or fewer than by speed, per replica; empty: none

    def __hash__(self) -> int:  # asked more often than anything else
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.core, self.nudges))

    @cached_property
    def core(self) -> tuple[object, ...]:
        """What its times and memory depend on."""
        return (self.layers, self.seats, self.recompute, self.zero, self.state_shares)

    @cached_property
    def replicas(self) -> int:
        return sum([own.number for own in self.seats])

    def with_seats(self, seats: Sequence[Seats]) -> "DraftStage":
        """The stage with other replicas, and so without shares and nudges."""
        return DraftStage(self.layers, merged(seats), self.recompute, self.zero)

    def with_sizes(self, sizes: Sequence[int]) -> "DraftStage":
        """The stage with other micro-batches, by seats."""
        if list(sizes) == [own.micro_batch for own in self.seats]:
            return self
        seats = merged([own._replace(micro_batch=size) for own, size in zip(self.seats, sizes, strict=True)])
        return DraftStage(self.layers, seats, self.recompute, self.zero, nudges=self.nudges)


def merged(seats: Sequence[Seats]) -> tuple[Seats, ...]:
    """Seats in one spelling: like ones together, in order."""
    counts: dict[tuple[int, int, int], int] = {}
    for kind, tp, micro_batch, count in seats:
        counts[kind, tp, micro_batch] = counts.get((kind, tp, micro_batch), 0) + count
    return tuple(Seats(*sort, count) for sort, count in sorted(counts.items()) if count)


@dataclass(frozen=True)
class Draft:
    """Stages in order. `alike`: replica i of every stage gets the same samples, so that chains of replicas stay apart.
    `roomy`: as many microbatches in flight as hide the links between stages, where memory allows, and not the
    default."""

    stages: tuple[DraftStage, ...]
    alike: bool = True
    roomy: bool = False
    even: bool = False  # samples in equal parts, whatever the speeds
    name: str = ""  # tells drafts apart that carry their plan
    plan: PlanSpec | None = field(default=None, compare=False)  # judged as it stands, not moved about
    schedule: ScheduleName | None = None  # None: the problem's

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.stages, self.alike, self.roomy, self.even, self.name, self.schedule))

    def with_stage(self, index: int, stage: DraftStage) -> "Draft":
        return self.with_stages({index: stage})

    def with_stages(self, changed: Mapping[int, DraftStage]) -> "Draft":
        """The draft with other stages at these indices."""
        stages = tuple([changed.get(index, stage) for index, stage in enumerate(self.stages)])
        return Draft(stages, self.alike, self.roomy, self.even, self.name, self.plan, self.schedule)

    @cached_property
    def shape(self) -> object:
        """Which units form which stage, whatever their layers and micro-batches."""
        return tuple([tuple([(own.kind, own.tp, own.number) for own in stage.seats]) for stage in self.stages])

    @property
    def mixtures(self) -> Iterator[Iterator[int]]:
        """Per stage, the kinds in it."""
        return ((own.kind for own in stage.seats) for stage in self.stages)

    @cached_property
    def replica_counts(self) -> tuple[int, ...]:
        return tuple([stage.replicas for stage in self.stages])


def to_draft(
    problem: Problem, stages: Sequence[tuple[int, int]], units: Sequence[Unit], combination: Combination
) -> Draft:
    """Stages of (layers, number of units) as a draft: units in line order, micro-batches by kind."""
    drafted, position = [], 0
    for layers, size in stages:
        own = units[position : position + size]
        position += size
        seats = merged([Seats(unit.kind, unit.tp, combination.micro_batches[unit.kind], 1) for unit in own])
        drafted.append(DraftStage(layers, seats, combination.recompute, problem.usual_zero))
    return Draft(tuple(drafted))


def seat_units(draft: Draft, problem: Problem) -> list[list[tuple[Unit, int]]] | None:
    """Per stage, every replica's ranks and micro-batch in order of ranks, or None where machines cannot be divided so.

    Each kind's machines are filled from the first stage to the last, in every stage the widest units first.
    """
    free = [[list(machine) for machine in kind.machines] for kind in problem.kinds]
    first = [0] * len(free)  # the first machine with a free rank
    seated = []
    for stage in draft.stages:
        own: list[tuple[Unit, int]] = []
        for kind, tp, micro_batch, count in sorted(stage.seats, key=lambda seats: (-seats.tp, seats)):
            machines = free[kind]
            index = first[kind]
            while count:
                if index == len(machines):
                    return None
                while count and len(machines[index]) >= tp:
                    own.append((Unit(kind, tuple(machines[index][:tp])), micro_batch))
                    del machines[index][:tp]
                    count -= 1
                index += 1
            while first[kind] < len(machines) and not machines[first[kind]]:
                first[kind] += 1
        seated.append(sorted(own, key=lambda entry: entry[0].ranks))
    return seated


def chains(draft: Draft) -> list[tuple[int, list[Seats]]]:
    """Replicas of equally wide stages that are alike all the way: how many, and their sort on each stage."""
    lines = [[(own.number, own) for own in stage.seats] for stage in draft.stages]
    found = []
    while lines[0]:
        count = min(line[0][0] for line in lines)
        found.append((count, [line[0][1] for line in lines]))
        lines = [line[1:] if line[0][0] == count else [(line[0][0] - count, line[0][1]), *line[1:]] for line in lines]
    return found
