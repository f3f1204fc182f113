"""What one stage of a small cluster's plan may do, with seconds that no plan with it stays below."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.state.costs import Reduction
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import PlanSpec, Recompute, ReplicaSpec, StageSpec
from hethub.spec.schedule.actions import Kind
from tests.oracle.paths import Dealt, Division, Stage, dealt
from tests.oracle.question import Question, Unit

MICRO_BATCHES = (1, 2, 4)
ZEROS = (0, 1, 3)
RECOMPUTES: tuple[Recompute, ...] = ("none", "full")

Shape = tuple[tuple[Unit, ...], ...]
ModeKey = tuple[Recompute, int, int]


@dataclass(frozen=True)
class Option:
    """One stage's choices."""

    samples: tuple[int, ...]
    micro_batches: tuple[int, ...]
    recompute: Recompute
    zero: int

    @property
    def mode(self) -> ModeKey:
        """What its microbatches' seconds depend on beside samples: under ZeRO-3 on the rounds in which they go."""
        loads = zip(self.samples, self.micro_batches, strict=True)
        return self.recompute, self.zero, max(-(-n // b) for n, b in loads) if self.zero == 3 else 1


class Mode(NamedTuple):
    """What a stage costs under a recompute, a ZeRO level and in so many rounds: per replica, forward, backward and what is
    left of sums in the end, by samples of a microbatch."""

    forward: list[list[float]]
    backward: list[list[float]]
    left: list[list[float]]
    reduction: Reduction
    update: float

    def seconds(self, replica: int, kind: Kind, samples: int) -> float:
        """Seconds of one microbatch."""
        return (self.forward if kind is Kind.FORWARD else self.backward)[replica][samples - 1]

    def tail(self, micro_batches: Sequence[int]) -> float:
        """Seconds from the end of all backwards to that of the reduction."""
        return self.reduction.tail_seconds + min(own[b - 1] for own, b in zip(self.left, micro_batches, strict=True))


class Seconds(NamedTuple):
    """Seconds that a stage's part of a step takes at least, arrays of one shape."""

    busy: np.ndarray  # the replica that works longest, on all its microbatches
    forward: np.ndarray  # its shortest microbatch
    backward: np.ndarray
    reduced: np.ndarray  # from the last backward to the end of the reduction
    update: np.ndarray  # from the gradient norm to the replicas' next step

    @property
    def least(self) -> "Seconds":
        """What none of them is below, as if it were one."""
        return Seconds(*(part.min(keepdims=True) for part in self))

    def at(self, places: np.ndarray) -> "Seconds":
        return Seconds(*(part[places] for part in self))

    def along(self, axis: int, axes: int) -> "Seconds":
        """The same as one of several axes."""
        return Seconds(*(part.reshape([-1 if own == axis else 1 for own in range(axes)]) for part in self))


@dataclass(frozen=True)
class StageGrid:
    """All options of a stage, by mode and division, and those of them that are looked at."""

    options: tuple[Option, ...]
    modes: dict[ModeKey, Mode]
    mode_of: np.ndarray  # by option, the number of its mode
    tails: np.ndarray
    dealt: Dealt
    rows: np.ndarray  # of the options
    seconds: Seconds  # of these

    def __len__(self) -> int:
        return len(self.rows)

    def option(self, place: int) -> Option:
        return self.options[self.rows[place]]

    def only(self, places: np.ndarray) -> "StageGrid":
        """Some of the options."""
        return replace(self, rows=self.rows[places], seconds=self.seconds.at(places))

    @cached_property
    def least(self) -> Seconds:
        return self.seconds.least

    @property
    def paths(self) -> Stage:
        """The options with their microbatches."""
        numbers, modes = self.mode_of[self.rows], list(self.modes.values())
        microbatches = self.dealt.at(self.rows % len(self.dealt.replica))
        forward, backward = (
            np.array([getattr(mode, way) for mode in modes])[
                numbers[:, None], microbatches.replica, microbatches.size - 1
            ]
            for way in ("forward", "backward")
        )
        reduction = np.array([mode.reduction.seconds for mode in modes])[numbers]
        return Stage(microbatches, forward, backward, reduction, self.tails[self.rows], self.seconds.update)


def plan_of(question: Question, shape: Shape, layers: Sequence[int], options: Sequence[Option]) -> PlanSpec:
    """The plan of one option per stage."""
    start, specs = 0, []
    for units, x, option in zip(shape, layers, options, strict=True):
        replicas = tuple(
            ReplicaSpec(ranks=u.ranks, micro_batch=b, samples=n)
            for u, b, n in zip(units, option.micro_batches, option.samples, strict=True)
        )
        specs.append(
            StageSpec(layers=((start, start + x),), replicas=replicas, zero=option.zero, recompute=option.recompute)
        )
        start += x
    return PlanSpec(
        model=question.model.name,
        cluster=question.cluster.name,
        global_batch=question.global_batch,
        seq_len=question.seq_len,
        precision=question.precision,
        stages=tuple(specs),
    )


class StageGrids:
    """The grids of all stages of a problem, each built once."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._known: dict[object, StageGrid] = {}
        self._crossings: dict[object, float] = {}
        self._examples: dict[object, tuple[PlanCosts, int]] = {}
        self._between: dict[object, np.ndarray] = {}
        self._divided: dict[int, tuple[list[Division], Dealt]] = {}

    def zeros(self, units: tuple[Unit, ...]) -> tuple[int, ...]:
        """A stage over islands shards its optimizer state at least; a single replica has nothing to shard."""
        islands = self.question.islands(units)
        return (0,) if len(units) == 1 else tuple(zero for zero in ZEROS if zero or len(islands) == 1)

    def __call__(self, shape: Shape, layers: Sequence[int], stage: int) -> StageGrid:
        """The grid of a stage; beside its replicas it matters whether it holds an end of the model, and whose messages pass
        beside its rounds."""
        beside = shape[max(0, stage - 1) : stage + 2] if max(self.zeros(shape[stage])) >= 2 else ()
        key = (shape[stage], beside, layers[stage], stage == 0, stage == len(shape) - 1)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._build(shape, layers, stage)
        return found

    def crossing(self, shape: Shape, layers: Sequence[int], stage: int, ends: tuple[int, int], samples: int) -> float:
        """Seconds of so many samples from a replica of a stage to one of the next, or back."""
        key = (shape[stage], shape[stage + 1], ends, samples)
        found = self._crossings.get(key)
        if found is None:
            if key[:2] not in self._examples:
                self._examples[key[:2]] = (self._costs(shape, layers, "none", 1), stage)
            costs, at = self._examples[key[:2]]
            found = self._crossings[key] = costs.boundary(at, *ends, samples)
        return found

    def nearest(self, shape: Shape, layers: Sequence[int], stage: int) -> float:
        """Seconds that one sample needs at least from a stage to the next."""
        pairs = product(range(len(shape[stage])), range(len(shape[stage + 1])))
        return min(self.crossing(shape, layers, stage, ends, 1) for ends in pairs)

    def between(self, shape: Shape, layers: Sequence[int], stage: int) -> np.ndarray:
        """Seconds of all that can come over from a stage to the next, or back: [replica above, replica below,
        samples]."""
        key = (shape[stage], shape[stage + 1])
        if key not in self._between:
            above, below, samples = range(len(key[0])), range(len(key[1])), range(1, MICRO_BATCHES[-1] + 1)
            self._between[key] = np.array(
                [
                    [[0.0, *(self.crossing(shape, layers, stage, (a, b), n) for n in samples)] for b in below]
                    for a in above
                ]
            )
        return self._between[key]

    def _costs(self, shape: Shape, layers: Sequence[int], recompute: Recompute, zero: int) -> PlanCosts:
        """The predictor's costs of any plan with these stages; what is read of them depends on no microbatch."""
        total, options = self.question.global_batch, []
        for units in shape:
            samples = (total - len(units) + 1, *(1,) * (len(units) - 1))
            level = zero if zero in self.zeros(units) else self.zeros(units)[0]
            options.append(Option(samples, (1,) * len(units), recompute, level))
        plan = plan_of(self.question, shape, layers, options)
        return PlanCosts(Layout(plan, self.question.model, self.question.cluster), HETHUB, packaged())

    def _build(self, shape: Shape, layers: Sequence[int], stage: int) -> StageGrid:
        units, rows, options, tails = shape[stage], [], [], []
        modes: dict[ModeKey, Mode] = {}
        divisions, placed = self._divisions(len(units))
        for recompute, zero in product(RECOMPUTES, self.zeros(units)):
            costs = self._costs(shape, layers, recompute, zero)
            reduction = costs.state.reduction(stage)
            update = _update([costs.optimizer(stage, r) for r in range(len(units))], zero, reduction.gather_seconds)
            for samples, sizes in divisions:
                option = Option(samples, sizes, recompute, zero)
                if option.mode not in modes:
                    own = [
                        [costs.microbatch(stage, r, b, rounds=option.mode[-1]) for b in range(1, MICRO_BATCHES[-1] + 1)]
                        for r in range(len(units))
                    ]
                    each = (
                        [[getattr(m, way).total for m in of] for of in own] for way in ("forward", "backward", "rest")
                    )
                    modes[option.mode] = Mode(*each, reduction, update)
                mode = modes[option.mode]
                cut = [_microbatches(n, b) for n, b in zip(samples, sizes, strict=True)]
                busy = max(
                    sum(number * (f[size - 1] + b[size - 1]) for size, number in own)
                    for own, f, b in zip(cut, mode.forward, mode.backward, strict=True)
                )
                ways = [
                    [way[size - 1] for own, way in zip(cut, each, strict=True) for size, _ in own]
                    for each in (mode.forward, mode.backward)
                ]
                tails.append(mode.tail(sizes))
                after = max(tails[-1], reduction.seconds - max(ways[1]))
                rows.append((busy, min(ways[0]), min(ways[1]), after, update))
                options.append(option)
        numbers = {key: number for number, key in enumerate(modes)}
        mode_of = np.array([numbers[option.mode] for option in options])
        seconds = Seconds(*np.array(rows).T)
        return StageGrid(tuple(options), modes, mode_of, np.array(tails), placed, np.arange(len(options)), seconds)

    def _divisions(self, replicas: int) -> tuple[list[Division], Dealt]:
        """All samples in steps of one with all micro-batches, those beyond a replica's samples being one microbatch."""
        if replicas not in self._divided:
            total = self.question.global_batch
            found: list[Division] = []
            for cuts in combinations(range(1, total), replicas - 1):
                samples = tuple(b - a for a, b in pairwise((0, *cuts, total)))
                sizes = [sorted({min(b, n) for b in MICRO_BATCHES}) for n in samples]
                found += [(samples, chosen) for chosen in product(*sizes)]
            self._divided[replicas] = (found, dealt(found, total))
        return self._divided[replicas]


def _microbatches(samples: int, micro_batch: int) -> list[tuple[int, int]]:
    """A replica's microbatches as (size, number); the last one may be short."""
    whole, rest = divmod(samples, micro_batch)
    return [(micro_batch, whole)] + ([(rest, 1)] if rest else [])


def _update(optimizers: Sequence[float], zero: int, gather: float) -> float:
    """Seconds from the norm to a stage's next step: its own optimizer, or where weights are gathered all owners'."""
    return max(optimizers) + gather if zero else min(optimizers)
