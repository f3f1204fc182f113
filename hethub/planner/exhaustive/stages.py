"""What one stage of a small space's plans may do, as arrays: its replicas' samples and microbatches, and seconds under
every mode."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from hethub.planner.candidate.candidate import CandidateStage, Pattern, ReplicaGroup, merged
from hethub.planner.candidate.materialize import Replica, StageChoice, plan_of
from hethub.planner.estimate.memory_model import ENDS
from hethub.planner.estimate.stage_times import NEARLY, StageTimes
from hethub.planner.problem.problem import Problem, Unit
from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.constants import packaged
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.state.costs import Reduction
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import SCHEDULES, Recompute, ScheduleName
from hethub.spec.schedule.microbatches import deal_sizes

Units = tuple[Unit, ...]  # the replicas of a stage
Shape = tuple[Units, ...]

LEVELS = (0, 1, 3)  # of ZeRO: replicas of a round run ahead of each other under 2, which the replay does not know


class Microbatchings(NamedTuple):
    """All ways to divide the samples over a stage's replicas and to cut them into microbatches, and where these lie on
    the sample axis."""

    samples: np.ndarray  # [way, replica]
    sizes: np.ndarray
    replicas: np.ndarray  # [way, sample], of the microbatch that holds it
    starts: np.ndarray
    stops: np.ndarray
    firsts: np.ndarray  # [way, replica], the first sample of its first microbatch
    lasts: np.ndarray  # the last sample of its last microbatch
    rounds: np.ndarray  # [way, replica], those in which they go where they go together

    def __len__(self) -> int:
        return len(self.samples)


class Cuts(NamedTuple):
    """Which microbatch sizes are looked at: these, and if `even` those that make a number of microbatches as equal as
    can be."""

    micro_batches: tuple[int, ...]
    even: bool

    def of(self, samples: int) -> list[int]:
        """The unlike microbatch sizes of a replica with so many samples."""
        found = {min(size, samples) for size in self.micro_batches}
        if self.even:
            found |= {-(-samples // number) for number in range(1, samples + 1)}
        return sorted(found)


@cache
def microbatchings(total: int, replicas: int, cuts: Cuts) -> Microbatchings:
    """All samples in steps of one with all microbatch sizes, dealt along the sample axis."""
    found = [
        (samples, sizes)
        for edges in combinations(range(1, total), replicas - 1)
        for samples in [tuple(b - a for a, b in pairwise((0, *edges, total)))]
        for sizes in product(*map(cuts.of, samples))
    ]
    rows = []
    for samples, sizes in found:
        dealt = deal_sizes(tuple(zip(sizes, samples, strict=True)))
        counts = np.subtract(dealt.stops, dealt.starts)
        rows.append([np.repeat(part, counts) for part in (dealt.replicas, dealt.starts, dealt.stops)])
    owners, starts, stops = np.array(rows).transpose(1, 0, 2)
    own = owners[:, None, :] == np.arange(replicas)[:, None]  # [way, replica, sample]
    firsts, lasts = own.argmax(axis=2), total - 1 - own[..., ::-1].argmax(axis=2)
    given, cut = map(np.array, zip(*found, strict=True))
    rounds = np.broadcast_to((-(-given // cut)).max(axis=1, keepdims=True), given.shape)
    return Microbatchings(given, cut, owners, starts, stops, firsts, lasts, rounds)


def count_microbatchings(total: int, replicas: int, cuts: Cuts) -> float:
    """How many there are, without making them."""
    each = np.array([0.0, *(len(cuts.of(count)) for count in range(1, total + 1))])
    found = each
    for _ in range(replicas - 1):
        found = np.convolve(found, each)[: total + 1]
    return float(found[total])


def cuts_of(problem: Problem) -> Cuts:
    """The microbatch sizes of a problem."""
    given = problem.constraints
    return Cuts(problem.micro_batches, even=not given.micro_batch and not given.max_micro_batch)


def levels(problem: Problem, units: Units) -> tuple[int, ...]:
    """A stage's ZeRO levels."""
    if len(units) == 1:
        return (0,)
    least = problem.zero_of(0, {unit.device_type for unit in units}, len(units))
    return tuple(level for level in LEVELS if level in problem.zeros and level >= least)


def recomputes_under(schedule: ScheduleName, problem: Problem) -> list[Recompute]:
    return list(filter(SCHEDULES[schedule].allows, problem.recomputes))


def count_options(problem: Problem, units: Units) -> float:
    """How many options a stage has."""
    ways = count_microbatchings(problem.batch.global_batch, len(units), cuts_of(problem))
    return ways * len(problem.recomputes) * len(levels(problem, units))


class Mode(NamedTuple):
    """A stage under a recompute and a ZeRO level."""

    recompute: Recompute
    zero: int
    # [3, pass, replica, samples] of one microbatch, as `in_rounds` has them; weights' gradients are a pass where they are put
    # off, and the last one is what is left of sums behind all.
    seconds: np.ndarray
    reduction: Reduction
    updates: np.ndarray  # per replica, from the gradient norm to its next step

    @property
    def last_pass(self) -> int:
        return 2 if self.seconds[0, 2].any() else 1


def in_rounds(seconds: np.ndarray, rounds: np.ndarray | int) -> np.ndarray:
    """A microbatch's mean seconds in so many rounds, from those of a single one, of any in a long run, and what the first
    ones of several add."""
    single, steady, first = seconds
    return np.where(rounds == 1, single, steady + first / rounds)


class StageBounds(NamedTuple):
    """Seconds that a stage's part of a step takes at least, in arrays of one shape."""

    busy: np.ndarray  # the replica that works longest, on all its microbatches
    passed: np.ndarray  # the same without what is put off
    forward: np.ndarray  # its shortest microbatch
    backward: np.ndarray
    weight: np.ndarray
    reduced: np.ndarray  # from its last pass to the end of the reduction
    update: np.ndarray  # of the replica that has the shortest

    def at(self, rows: np.ndarray | slice) -> "StageBounds":
        return StageBounds(*(each[rows] for each in self))

    def shaped(self, shape: Sequence[int]) -> "StageBounds":
        return StageBounds(*(each.reshape(shape) for each in self))

    @property
    def least(self) -> "StageBounds":
        """What none is below; a shape with one element."""
        return StageBounds(*(each.min(keepdims=True) for each in self))


class StageOptions(NamedTuple):
    """All options of a stage [mode x microbatching], with their bounds."""

    modes: tuple[Mode, ...]
    microbatchings: Microbatchings
    bounds: StageBounds
    least: StageBounds  # what none of the bounds is below

    def mode(self, option: int) -> Mode:
        return self.modes[option // len(self.microbatchings)]


def options_of(modes: Sequence[Mode], ways: Microbatchings) -> StageOptions:
    """The options of a stage from what it costs in every mode."""
    found = zip(*(bounds_of(mode, ways) for mode in modes), strict=True)
    bounds = StageBounds(*(np.concatenate(part) for part in found))
    return StageOptions(tuple(modes), ways, bounds, bounds.least)


def bounds_of(mode: Mode, ways: Microbatchings) -> StageBounds:
    """What a mode's part of a step takes at least, by microbatching."""
    whole, rest = np.divmod(ways.samples, ways.sizes)
    replicas = np.arange(ways.sizes.shape[1])
    each, short = (in_rounds(mode.seconds[:, :, replicas, size], ways.rounds) for size in (ways.sizes, rest))
    full, left, short = each[:3], each[3], short[:3]  # [pass, way, replica]
    spent = whole * full + short
    least = np.where(rest > 0, np.minimum(full, short), full).min(axis=2)
    tail = mode.reduction.tail_seconds + left.min(axis=1)
    reduced = np.maximum(tail, mode.reduction.seconds - full[mode.last_pass].max(axis=1))
    update = np.full(len(ways), mode.updates.min())
    busy, passed = spent.sum(axis=0).max(axis=1), spent[:2].sum(axis=0).max(axis=1)
    forward, backward, weight = least
    return StageBounds(busy, passed, forward, backward, weight, reduced, update)


class StageCosts:
    """The options of all stages of a problem under one schedule, and what lies between two of them, each asked once of
    the predictor. `times` tells what memory has room for; None: memory does not count."""

    def __init__(self, problem: Problem, schedule: ScheduleName, times: StageTimes | None) -> None:
        self.problem, self.schedule, self.times = problem, schedule, times
        self.cuts = cuts_of(problem)
        self.recomputes = recomputes_under(schedule, problem)
        self._options: dict[object, StageOptions] = {}
        self._microbatches: dict[object, np.ndarray] = {}

    @property
    def most(self) -> int:
        """Samples of the largest microbatch."""
        return max(self.cuts.of(self.problem.batch.global_batch))

    def options(self, shape: Shape, layers: Sequence[int], stage: int) -> StageOptions:
        """A stage's options. They depend on its replicas, those beside whose messages its rounds pass, and the ends of the
        model that it holds; with a tied head also on who holds the other end."""
        ends = (stage == 0, stage == len(shape) - 1)
        others = (shape[0], shape[-1]) if self.problem.model.tied_head and any(ends) else None
        beside = shape[max(0, stage - 1) : stage + 2] if max(levels(self.problem, shape[stage])) >= 2 else ()
        key = (shape[stage], beside, layers[stage], *ends, others)
        found = self._options.get(key)
        if found is None:
            modes = [
                self._mode(shape, layers, stage, level, recompute)
                for level in levels(self.problem, shape[stage])
                for recompute in self.recomputes
            ]
            for mode in modes:  # beyond memory microbatches never end
                fits = self._fits(shape[stage], layers[stage], mode, ENDS.index(ends))
                mode.seconds[:2, :2, :, 1:][:, :, ~fits[:, 1:]] = np.inf
            ways = microbatchings(self.problem.batch.global_batch, len(shape[stage]), self.cuts)
            found = self._options[key] = options_of(modes, ways)
        return found

    def _fits(self, units: Units, layers: int, mode: Mode, place: int) -> np.ndarray:
        """Whether a rank may run microbatches of so many samples and has memory for one: [replica, samples]."""
        most = [min(self.most, self.problem.at_most(unit.device_type, self.most)) for unit in units]
        if (times := self.times) is not None:
            own = zip(units, most, strict=True)
            groups = [ReplicaGroup(unit.device_type, unit.tp, limit, 1) for unit, limit in own]
            stage, pattern = CandidateStage(layers, merged(groups), mode.recompute, mode.zero), Pattern(self.schedule)
            most = [times.largest(stage, group, place, pattern, 1, NEARLY) for group in groups]
        return np.arange(self.most + 1) <= np.array(most)[:, None]

    def _mode(self, shape: Shape, layers: Sequence[int], stage: int, zero: int, recompute: Recompute) -> Mode:
        costs, replicas = self._costs(shape, layers, zero, recompute), range(len(shape[stage]))
        ends = (stage == 0, stage == len(shape) - 1)
        seconds = np.stack([self._microbatch_seconds(costs, stage, replica, ends) for replica in replicas], axis=2)
        reduction = costs.state.reduction(stage)
        updates = np.array([costs.optimizer(stage, replica) for replica in replicas])
        if reduction.gather_seconds or zero >= 2:  # all wait for the weights of all owners
            updates = np.full(len(updates), updates.max() + reduction.gather_seconds)
        return Mode(recompute, zero, seconds, reduction, updates)

    def _microbatch_seconds(self, costs: PlanCosts, stage: int, replica: int, ends: tuple[bool, bool]) -> np.ndarray:
        """Seconds of a replica's microbatches: [3, pass, samples]. Without gathers they are those of any other of its
        device type."""
        spec, own = costs.layout.stages[stage], costs.layout.replica(stage, replica)
        node = costs.layout.cluster.places[own.ranks[0]].node
        others = [each.ranks for each in costs.layout.stages[max(0, stage - 1) : stage + 2]] if spec.zero >= 2 else ()
        key = (node.name, own.tp, spec.num_layers, ends, spec.recompute, *others)
        found, sizes = self._microbatches.get(key), range(1, self.most + 1)
        if found is None:
            single, two, steady = (
                np.array(
                    [
                        [0.0, *(parts.total for parts in each)]
                        for each in zip(
                            *(costs.microbatch(stage, replica, size, rounds=rounds) for size in sizes), strict=True
                        )
                    ]
                )
                for rounds in (1, 2, math.inf)
            )
            found = self._microbatches[key] = np.stack([single, steady, 2 * (two - steady)])
        return found

    @memoized
    def nearest(self, shape: Shape) -> list[float]:
        """Return for each boundary the seconds of one sample between the two replicas with the fastest link."""
        return [float(self.p2p_seconds(*pair)[..., 1].min()) for pair in pairwise(shape)]

    @memoized
    def p2p_seconds(self, above: Units, below: Units) -> np.ndarray:
        """Seconds from a replica of a stage to one of the next, or back, whatever stands beside them: [replica above, replica
        below, samples]."""
        costs = self._costs((above, below), [1, self.problem.model.layers - 1], 1, self.recomputes[0])
        each = (costs.boundary(0, *where) for where in np.ndindex(len(above), len(below), self.most + 1))
        return np.fromiter(each, float).reshape(len(above), len(below), -1)

    def _costs(self, shape: Shape, layers: Sequence[int], zero: int, recompute: Recompute) -> PlanCosts:
        """The predictor's costs of any plan with these stages; what is read of them depends on no microbatch."""
        problem, choices = self.problem, []
        for units in shape:
            able, rest = levels(problem, units), problem.batch.global_batch - len(units) + 1
            replicas = [Replica(unit, 1, 1 if index else rest) for index, unit in enumerate(units)]
            choices.append(StageChoice(replicas, zero if zero in able else able[0], recompute))
        layout = Layout(plan_of(problem, self.schedule, layers, choices), problem.model, problem.cluster)
        return PlanCosts(layout, self.problem.software, packaged(), self.problem.profile)
