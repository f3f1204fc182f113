"""Plans of larger clusters by simulated annealing, with nothing of the planner: what `auto` is compared with where no grid
can be searched to its end.

A state says which ranks form which stage, how many layers it has, what it does (ZeRO level, recompute, offload) and, for
each sort of accelerator in it, the TP degree, the micro-batch and the weight by which samples are dealt. A move changes
one of these at random. What a state costs is the predictor's step of its plan; over memory it costs more the fuller it is.
The walk begins at a plan that anyone would draw, or at one that is given.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from hethub.predictor import predict, rank_memory
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import bind
from hethub.spec.plan import Offload, PlanSpec, Recompute, ReplicaSpec, ScheduleName, StageSpec
from tests.oracle.question import Question

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zero_bubble", "gpipe", "interleaved", "ministages", "layered")
SEVERAL_CHUNKS = ("interleaved", "ministages")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS: tuple[tuple[Offload, ...], ...] = ((), ("optimizer",), ("activations",), ("optimizer", "parameters"))
IN_FLIGHT = (None, None, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
HOTTEST, COLDEST = 0.1, 0.001  # logarithms of a step that a move may cost, at the beginning and at the end
OVERFULL = 10.0  # times its share over memory is what a state costs more


@dataclass(frozen=True)
class Sort:
    """What a stage's accelerators of one sort do."""

    tp: int = 1
    micro_batch: int = 1
    weight: float = 1.0  # samples of an accelerator, beside others


@dataclass(frozen=True)
class Stage:
    """A stage in the making."""

    layers: int
    ranks: frozenset[int]
    sorts: dict[str, Sort] = field(hash=False)
    zero: int = 1
    recompute: Recompute = "full"
    offload: tuple[Offload, ...] = ()
    in_flight: int | None = None  # microbatches of a replica that are on their way at most; None: the plan's default
    whole: bool = False  # samples of a replica are a multiple of its micro-batch, but for the last's


@dataclass(frozen=True)
class State:
    """A plan in the making."""

    stages: tuple[Stage, ...]
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    unused: frozenset[int] = frozenset()


@dataclass
class Walk:
    """A question, the best plan that annealing has found, and how many were predicted."""

    question: Question
    seconds: float = math.inf
    plan: PlanSpec | None = None
    predicted: int = 0

    def anneal(self, state: State, draw: random.Random, moves: int, hottest: float = HOTTEST) -> State:
        """Walks for so many moves, ever colder; where it ends."""
        cost = self.cost(state)
        for move in range(moves):
            heat = hottest * (COLDEST / hottest) ** (move / moves)
            made = self.moved(state, draw)
            if made is None:
                continue
            new = self.cost(made)
            if new <= cost or draw.random() < (cost / new) ** (1 / heat):
                state, cost = made, new
        return state

    def cost(self, state: State) -> float:
        """Seconds of the state's step, more where it does not fit; infinite where it is no plan."""
        try:
            plan = self.plan_of(state)
            layout = bind(plan, self.question.model, self.question.cluster)
            used = tuple(rank_memory(layout))
            found = predict(layout, reserve=self.question.reserve, used=used)
        except (BadInput, ValueError):
            return math.inf
        self.predicted += 1
        if found.fits and found.step_seconds < self.seconds:
            self.seconds, self.plan = found.step_seconds, plan
        fullest = max(own.bytes / (own.limit * (1 - self.question.reserve)) for own in used)
        return found.step_seconds * (1 + OVERFULL * max(0.0, fullest - 1))

    def plan_of(self, state: State) -> PlanSpec:
        """The state as a plan. Raises ValueError where it is none."""
        stages = [StageSpec(
            layers=chunks, replicas=tuple(self._replicas(own)), zero=own.zero, recompute=own.recompute, offload=own.offload,
        ) for own, chunks in zip(state.stages, _chunks(state), strict=True)]  # fmt: skip
        asked = self.question
        return PlanSpec(
            model=asked.model.name, cluster=asked.cluster.name, global_batch=asked.global_batch, seq_len=asked.seq_len,
            precision=asked.precision, schedule=state.schedule, stages=tuple(stages), unused=tuple(sorted(state.unused)),
        )  # fmt: skip

    def _replicas(self, stage: Stage) -> Iterator[ReplicaSpec]:
        groups = [group for machine in self.question.machines for group in self._groups(stage, machine)]
        sorts = [stage.sorts[self.sort(group[0])] for group in groups]
        unit = max(own.micro_batch for own in sorts) if stage.whole else 1
        weights = [own.weight * len(group) for own, group in zip(sorts, groups, strict=True)]
        for group, own, samples in zip(groups, sorts, dealt(self.question.global_batch, weights, unit), strict=True):
            size = min(own.micro_batch, samples)
            most = stage.in_flight and min(stage.in_flight, -(-samples // size))
            yield ReplicaSpec(ranks=group, micro_batch=size, samples=samples, in_flight=most)

    def _groups(self, stage: Stage, machine: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """A machine's ranks in a stage by replicas: of the sort's degree as far as they go, then of half that."""
        left = [rank for rank in machine if rank in stage.ranks]
        while left:
            tp = stage.sorts[self.sort(left[0])].tp
            while tp > len(left):
                tp //= 2
            yield tuple(left[:tp])
            left = left[tp:]

    def sort(self, rank: int) -> str:
        """The name of a rank's accelerator."""
        return str(self.question.cluster.places[rank].accelerator.name)

    def near(self, plan: PlanSpec) -> State:
        """The state of a plan, or the nearest one where accelerators of a sort do unlike things in a stage."""
        stages = []
        for own in plan.stages:
            sorts = {}
            for replica in own.replicas:
                name, weight = self.sort(replica.ranks[0]), replica.samples / replica.tp
                old = sorts.get(name, Sort(replica.tp, replica.micro_batch, weight))
                sorts[name] = Sort(max(old.tp, replica.tp), max(old.micro_batch, replica.micro_batch), weight)
            stages.append(Stage(
                own.num_layers, frozenset(own.ranks), sorts, own.zero, own.recompute, own.offload,
                max((replica.in_flight or 0 for replica in own.replicas), default=0) or None,
            ))  # fmt: skip
        return State(tuple(stages), plan.schedule, plan.num_chunks, frozenset(plan.unused))

    def simple(self, pipeline: bool) -> State:
        """All ranks in one stage that cuts all it can, or a stage for every sort of accelerator."""
        everyone = frozenset(range(len(self.question.cluster.places)))
        if not pipeline:
            return State((self._stage(self.question.model.layers, everyone, zero=3),))
        sorts = sorted({self.sort(rank) for rank in everyone})
        own = [frozenset(rank for rank in everyone if self.sort(rank) == sort) for sort in sorts]
        power = [sum(self._peak(rank) for rank in ranks) for ranks in own]
        layers = dealt(self.question.model.layers, power, 1)
        return State(tuple(self._stage(count, ranks, zero=1) for count, ranks in zip(layers, own, strict=True)))

    def _stage(self, layers: int, ranks: frozenset[int], zero: int) -> Stage:
        return Stage(layers, ranks, {self.sort(rank): Sort(weight=self._peak(rank)) for rank in ranks}, zero)

    def _peak(self, rank: int) -> float:
        return self.question.cluster.places[rank].accelerator.peak_flops(self.question.precision) or 1e12

    def moved(self, state: State, draw: random.Random) -> State | None:
        """A neighbour of the state, or None where the move drawn is none here."""
        own: list[Callable[[State, random.Random], State | None]] = [
            self._move_layers, self._move_layers, self._move_ranks, self._move_ranks, self._swap_ranks, self._split, self._join,
            self._turn, self._set_sort, self._set_sort, self._set_sort, self._set_mode, self._set_mode, self._set_all,
            self._set_schedule, self._rest,
        ]  # fmt: skip
        return draw.choice(own)(state, draw)

    def _move_layers(self, state: State, draw: random.Random) -> State | None:
        if len(state.stages) < 2:
            return None
        one, other = draw.sample(range(len(state.stages)), 2)
        count = draw.choice((1, 1, 2, 4))
        if state.stages[one].layers <= count:
            return None
        stages = list(state.stages)
        stages[one] = replace(stages[one], layers=stages[one].layers - count)
        stages[other] = replace(stages[other], layers=stages[other].layers + count)
        return replace(state, stages=tuple(stages))

    def _move_ranks(self, state: State, draw: random.Random) -> State | None:
        if len(state.stages) < 2:
            return None
        one, other = draw.sample(range(len(state.stages)), 2)
        some = self._some(state.stages[one], draw)
        if some == state.stages[one].ranks:
            return None
        return self._with_ranks(state, {one: state.stages[one].ranks - some, other: state.stages[other].ranks | some})

    def _swap_ranks(self, state: State, draw: random.Random) -> State | None:
        if len(state.stages) < 2:
            return None
        one, other = draw.sample(range(len(state.stages)), 2)
        mine, yours = self._some(state.stages[one], draw), self._some(state.stages[other], draw)
        return self._with_ranks(state, {
            one: state.stages[one].ranks - mine | yours, other: state.stages[other].ranks - yours | mine,
        })  # fmt: skip

    def _some(self, stage: Stage, draw: random.Random) -> frozenset[int]:
        """Some ranks of a stage: a replica, those of a machine, or of a sort."""
        rank = draw.choice(sorted(stage.ranks))
        machine = next(own for own in self.question.machines if rank in own)
        sort = frozenset(own for own in stage.ranks if self.sort(own) == self.sort(rank))
        replica = next(own for own in self._groups(stage, machine) if rank in own)
        half = sorted(sort)[: -(-len(sort) // 2)]
        return frozenset(draw.choice((replica, replica, stage.ranks & {*machine}, sort, half)))

    def _with_ranks(self, state: State, ranks: dict[int, frozenset[int]]) -> State:
        stages = list(state.stages)
        every = {name: own for stage in stages for name, own in stage.sorts.items()}
        for index, own in ranks.items():
            names = {self.sort(rank): rank for rank in own}
            old = stages[index].sorts
            sorts = {name: old.get(name) or every.get(name) or Sort(weight=self._peak(r)) for name, r in names.items()}
            stages[index] = replace(stages[index], ranks=own, sorts=sorts)
        return replace(state, stages=tuple(stages))

    def _split(self, state: State, draw: random.Random) -> State | None:
        index = draw.randrange(len(state.stages))
        stage = state.stages[index]
        some = self._some(stage, draw)
        if stage.layers < 2 or some == stage.ranks:
            return None
        layers = draw.randrange(1, stage.layers)
        parts = [replace(stage, layers=layers), replace(stage, layers=stage.layers - layers)]
        stages = (*state.stages[:index], *parts, *state.stages[index + 1 :])
        return self._with_ranks(replace(state, stages=stages), {index: some, index + 1: stage.ranks - some})

    def _join(self, state: State, draw: random.Random) -> State | None:
        if len(state.stages) < 2:
            return None
        index = draw.randrange(len(state.stages) - 1)
        one, other = state.stages[index : index + 2]
        both = replace(
            one, layers=one.layers + other.layers, ranks=one.ranks | other.ranks, sorts=other.sorts | one.sorts
        )
        return replace(state, stages=(*state.stages[:index], both, *state.stages[index + 2 :]))

    def _turn(self, state: State, draw: random.Random) -> State | None:
        """Two stages in each other's place."""
        if len(state.stages) < 2:
            return None
        one, other = draw.sample(range(len(state.stages)), 2)
        stages = list(state.stages)
        stages[one], stages[other] = stages[other], stages[one]
        return replace(state, stages=tuple(stages))

    def _set_sort(self, state: State, draw: random.Random) -> State | None:
        """Another degree, micro-batch or weight for a sort of one stage, or of all."""
        name = self.sort(draw.choice(sorted(frozenset().union(*(own.ranks for own in state.stages)))))
        change = draw.choice((
            lambda own: replace(own, tp=own.tp * 2), lambda own: replace(own, tp=max(1, own.tp // 2)),
            lambda own: replace(own, micro_batch=own.micro_batch * 2),
            lambda own: replace(own, micro_batch=max(1, own.micro_batch // 2)),
            partial(_weighed, factor=math.exp(draw.gauss(0, draw.choice((0.02, 0.2))))),
        ))  # fmt: skip
        holding = [index for index, own in enumerate(state.stages) if name in own.sorts]
        chosen = holding if draw.random() < 0.5 else [draw.choice(holding)]
        stages = list(state.stages)
        for index in chosen:
            stages[index] = replace(
                stages[index], sorts=stages[index].sorts | {name: change(stages[index].sorts[name])}
            )
        return replace(state, stages=tuple(stages))

    def _set_mode(self, state: State, draw: random.Random) -> State:
        index = draw.randrange(len(state.stages))
        stages = list(state.stages)
        stages[index] = _with_mode(stages[index], draw)
        return replace(state, stages=tuple(stages))

    def _set_all(self, state: State, draw: random.Random) -> State:
        made = _with_mode(state.stages[0], draw)
        own = {"zero": made.zero, "recompute": made.recompute, "offload": made.offload}
        return replace(state, stages=tuple(replace(stage, **own) for stage in state.stages))  # type: ignore[arg-type]

    def _set_schedule(self, state: State, draw: random.Random) -> State:
        schedule = draw.choice(SCHEDULES)
        chunks = draw.choice((2, 3, 4, 8)) if schedule in SEVERAL_CHUNKS else 1
        return replace(state, schedule=schedule, chunks=chunks)

    def _rest(self, state: State, draw: random.Random) -> State | None:
        """Ranks that are left unused, or unused ones that take part."""
        index = draw.randrange(len(state.stages))
        stage = state.stages[index]
        if state.unused:
            joined = self._with_ranks(state, {index: stage.ranks | state.unused})
            return replace(joined, unused=frozenset())
        some = self._some(stage, draw)
        if some == stage.ranks:
            return None
        return replace(self._with_ranks(state, {index: stage.ranks - some}), unused=some)


def _weighed(own: Sort, factor: float) -> Sort:
    return replace(own, weight=own.weight * factor)


def _with_mode(stage: Stage, draw: random.Random) -> Stage:
    """The stage with another ZeRO level, recompute, offload or way of dealing."""
    return draw.choice((
        replace(stage, zero=draw.choice((0, 1, 2, 3))), replace(stage, recompute=draw.choice(RECOMPUTES)),
        replace(stage, offload=draw.choice(OFFLOADS)), replace(stage, whole=not stage.whole),
        replace(stage, in_flight=draw.choice(IN_FLIGHT)), replace(stage, in_flight=(stage.in_flight or 0) + 1),
    ))  # fmt: skip


def _chunks(state: State) -> list[tuple[tuple[int, int], ...]]:
    """The layers of every stage, [start, stop) by chunk."""
    parts = [dealt(own.layers, [1.0] * state.chunks, 1) for own in state.stages]
    chunks: list[list[tuple[int, int]]] = [[] for _ in state.stages]
    start = 0
    for chunk in range(state.chunks):
        for own, part in zip(chunks, parts, strict=True):
            own.append((start, start + part[chunk]))
            start += part[chunk]
    return [tuple(own) for own in chunks]


def dealt(total: int, weights: list[float], unit: int) -> list[int]:
    """A total in parts by weights: multiples of `unit`, each at least one of them, the last with what is over. Raises
    ValueError where it is too small."""
    units = total // unit
    if units < len(weights):
        raise ValueError(f"{total} is too little for {len(weights)} parts of {unit}")
    ideal = [units * weight / sum(weights) for weight in weights]
    parts = [max(1, int(own)) for own in ideal]
    while (over := sum(parts) - units) != 0:
        able = [index for index, own in enumerate(parts) if over < 0 or own > 1]
        chosen = max(able, key=lambda index: (parts[index] - ideal[index]) * (1 if over > 0 else -1))
        parts[chosen] -= 1 if over > 0 else -1
    return [*(own * unit for own in parts[:-1]), parts[-1] * unit + total - units * unit]
