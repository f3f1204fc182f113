"""Drafts: plans as the search moves them about, and their completion into plans that can be bound and judged."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from hethub.planner.costs import UnitCosts
from hethub.planner.problem import Combination, Problem, Unit
from hethub.planner.samples import Worker, divide
from hethub.spec.plan import PlanSpec, Recompute, ReplicaSpec, StageSpec
from hethub.spec.ranges import split


@dataclass(frozen=True)
class Seat:
    """A unit as a replica of a stage, with its micro-batch; its samples follow from its speed."""

    unit: Unit
    micro_batch: int

    @cached_property
    def sort(self) -> tuple[int, int, int]:
        """Seats of one sort are interchangeable: kind, TP degree, micro-batch."""
        return (self.unit.kind, self.unit.tp, self.micro_batch)


@dataclass(frozen=True)
class DraftStage:
    """A stage without positions: how many layers, which seats."""

    layers: int
    seats: tuple[Seat, ...]
    recompute: Recompute = "none"
    zero: int = 1
    state_shares: tuple[tuple[int, float], ...] = ()
    nudges: tuple[int, ...] = ()  # samples more or fewer than by speed, per seat; empty: none

    @cached_property
    def sorts(self) -> tuple[tuple[tuple[int, int, int], int], ...]:
        """How many seats of each sort, in order of sort."""
        return tuple(sorted(Counter(seat.sort for seat in self.seats).items()))


@dataclass(frozen=True)
class Draft:
    """Stages in order. `alike`: replica i of every stage gets the same samples, so that chains of replicas stay apart.
    `slack` adds to every replica's tiles in flight, which hides slow links between stages at the price of memory."""

    stages: tuple[DraftStage, ...]
    alike: bool = True
    slack: int = 0
    even: bool = False  # samples in equal parts, whatever the speeds

    def with_stage(self, index: int, stage: DraftStage) -> "Draft":
        return replace(self, stages=(*self.stages[:index], stage, *self.stages[index + 1 :]))

    @property
    def shape(self) -> object:
        """Which sorts of units form which stage, whatever their layers and micro-batches."""
        return tuple(tuple((sort[:2], count) for sort, count in stage.sorts) for stage in self.stages)

    @cached_property
    def replica_counts(self) -> tuple[int, ...]:
        return tuple(len(stage.seats) for stage in self.stages)


def to_draft(
    problem: Problem, stages: Sequence[tuple[int, int]], units: Sequence[Unit], combination: Combination
) -> Draft:
    """Stages of (layers, number of units) as a draft: units in line order, micro-batches by kind."""
    drafted, position = [], 0
    for layers, size in stages:
        own = sorted(units[position : position + size], key=lambda unit: unit.ranks)  # one spelling of equal plans
        position += size
        seats = tuple(Seat(unit, combination.micro_batches[unit.kind]) for unit in own)
        drafted.append(DraftStage(layers, seats, combination.recompute, max(problem.zeros)))
    return Draft(tuple(drafted))


def complete(draft: Draft, problem: Problem, costs: UnitCosts) -> PlanSpec | None:
    """The plan of a draft with samples divided by speed; None where some replica would have no sample."""
    counts = draft.replica_counts
    if max(counts) > problem.batch.global_batch:
        return None
    divided = _divided(draft, problem, costs)
    stages, start = [], 0
    near = _nearly_even(divided)
    for index, (stage, by_speed) in enumerate(zip(draft.stages, divided, strict=True)):
        samples = [n + more for n, more in zip(by_speed, stage.nudges, strict=True)] if stage.nudges else by_speed
        if min(samples) < 1:
            return None
        stages.append(_stage(draft, index, stage, samples, start, problem, explicit=near or draft.slack > 0))
        start += stage.layers
    return PlanSpec(
        model=problem.model.name,
        cluster=problem.cluster.name,
        global_batch=problem.batch.global_batch,
        seq_len=problem.batch.seq_len,
        precision=problem.batch.precision,
        schedule=problem.schedule,
        stages=tuple(stages),
    )


def _divided(draft: Draft, problem: Problem, costs: UnitCosts) -> list[list[int]]:
    """The samples of every stage's replicas, by speed unless the draft says evenly."""
    counts, total = draft.replica_counts, problem.batch.global_batch
    if draft.even:
        return [[part.size for part in split(total, count)] for count in counts]
    workers = [_workers(draft, index, costs) for index in range(len(draft.stages))]
    if draft.alike and len(set(counts)) == 1 and len(draft.stages) > 1:
        chains = [_slowest(chain) for chain in zip(*workers, strict=True)]
        if None not in chains:
            return [divide(total, [c for c in chains if c])] * len(workers)
    return [divide(total, stage) for stage in workers]


def _nearly_even(divided: Sequence[list[int]]) -> bool:
    """Whether all stages divide the samples alike, into counts that differ by one: as many tiles in flight as there are
    stages behind are then enough, and said in the plan, since the default for unlike replicas is more."""
    first = divided[0]
    return len(divided) > 1 and max(first) - min(first) == 1 and all(d == first for d in divided)


def _workers(draft: Draft, index: int, costs: UnitCosts) -> list[Worker]:
    stage = draft.stages[index]
    first, last = index == 0, index == len(draft.stages) - 1
    known: dict[tuple[int, int, int], Worker] = {}
    workers = []
    for seat in stage.seats:
        key = (seat.unit.kind, seat.unit.tp, seat.micro_batch)
        if key not in known:
            rates = [costs.rate(seat.unit, b, stage.recompute) for b in range(1, seat.micro_batch + 1)]
            # More samples never count as less work, whatever a measured profile says.
            tiles = accumulate((rate.tile(stage.layers, first, last).total for rate in rates), max)
            known[key] = Worker(seat.micro_batch, tuple(tiles))
        workers.append(known[key])
    return workers


def _slowest(chain: Sequence[Worker]) -> Worker | None:
    """The chain as one worker: its slowest stage; None where its stages' micro-batches differ."""
    if len({worker.micro_batch for worker in chain}) > 1:
        return None
    return max(chain, key=lambda worker: worker.tile_seconds[-1])


def _stage(
    draft: Draft, index: int, stage: DraftStage, samples: Sequence[int], start: int, problem: Problem, explicit: bool
) -> StageSpec:
    behind = len(draft.stages) - index
    replicas = tuple(
        ReplicaSpec(
            ranks=seat.unit.ranks,
            micro_batch=min(seat.micro_batch, count),
            samples=count,
            in_flight=behind + (draft.slack if behind > 1 else 0) if explicit and problem.schedule == "1f1b" else None,
        )
        for seat, count in zip(stage.seats, samples, strict=True)
    )
    islands = {problem.kinds[seat.unit.kind].island for seat in stage.seats}
    zero = 0 if len(replicas) == 1 else max(stage.zero, 1 if len(islands) > 1 else 0)
    return StageSpec(
        layers=((start, start + stage.layers),),
        replicas=replicas,
        zero=zero,
        recompute=stage.recompute,
        state_shares=dict(stage.state_shares) if zero else {},
    )
