"""Stragglers: ranks that take longer for their work than planned, and what a new plan for their true speeds would bring.

What a rank computes in a step is laid over what was planned for it, by kind of action. Predictions err alike for all
ranks, so a rank counts as slow where it exceeds its plan, and by more than the others do.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import hethub
from hethub.predictor import Prediction, predict
from hethub.predictor.cost.layer import LayerCost, PassSeconds
from hethub.predictor.cost.profile import DeviceProfile, LayerTiming, PartTiming, ProfileSpec
from hethub.runtime.measure.rank_times import PASSES
from hethub.runtime.measure.speed_classes import tell_apart
from hethub.spec.accelerator import AcceleratorSpec
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec, Job, JobSpec, StragglerSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.plan import PlanSpec

WORTHWHILE_PERCENT = 3.0  # gain below which a plan is not changed
PLANNING_SECONDS = 30.0  # of search, while all ranks wait
MARK = "!"  # in the name of an accelerator that is slower than others of its device type

Seconds = Mapping[str, float]  # of a step, by kind of action


class Straggler(NamedTuple):
    """A rank that took `factor` times what was planned for its passes, the others' usual factor taken out."""

    rank: int
    factor: float
    kind: str  # of action, that exceeds its plan the most
    measured: dict[str, float]  # seconds a step by kind, median over the steps it was slow in
    planned: dict[str, float]


class Noted(NamedTuple):
    """Ranks found slow in a step, and those no longer slow with the factor that is left of what was known."""

    slow: list[Straggler]
    recovered: dict[int, float]


class StragglerDetector:
    """Notes what every rank computed, step by step; all ranks are told the same and so find the same.

    `known` are the factors by which ranks are planned to be slow already.
    """

    def __init__(
        self, planned: Sequence[Seconds], spec: StragglerSpec, known: Mapping[int, float] | None = None
    ) -> None:
        self._planned, self._limit = planned, 1.0 + spec.threshold
        self._known = dict(known or {})
        self._steps: deque[Sequence[Seconds]] = deque(maxlen=spec.steps)
        self._factors: deque[list[float]] = deque(maxlen=spec.steps)
        self._reported: set[int] = set()

    def note(self, busy: Sequence[Seconds]) -> Noted:
        """Takes in a step; the ranks that have now been slow for long enough, or no longer, each told once."""
        self._steps.append(busy)
        self._factors.append(against_others(busy, self._planned, PASSES))
        noted = Noted([], {})
        if len(self._factors) < (self._factors.maxlen or 0):
            return noted
        for rank, own in enumerate(zip(*self._factors, strict=True)):
            if rank not in self._reported and min(own) > self._limit:
                self._reported.add(rank)
                noted.slow.append(self._straggler(rank, median(own)))
            elif rank in self._reported and max(own) <= self._limit:
                self._reported.discard(rank)
                noted.recovered[rank] = self._known.get(rank, 1.0)
            if rank in self._known and max(own) * self._known[rank] <= self._limit:
                noted.recovered[rank] = 1.0
                del self._known[rank]
        return noted

    def _straggler(self, rank: int, factor: float) -> Straggler:
        medians = [{kind: median(step[r].get(kind, 0.0) for step in self._steps) for kind in planned}
                   for r, planned in enumerate(self._planned)]  # fmt: skip
        excess = {kind: against_others(medians, self._planned, [kind])[rank] for kind in self._planned[rank]}
        return Straggler(rank, factor, max(excess, key=excess.__getitem__), medians[rank], dict(self._planned[rank]))


def against_others(busy: Sequence[Seconds], planned: Sequence[Seconds], kinds: Sequence[str]) -> list[float]:
    """By rank, how many times its plan these kinds took, what most ranks exceed theirs by taken out.

    Ranks faster than planned make no other slow: what is taken out is 1 at least. The lower middle counts as usual, so
    of two ranks the one nearer to its plan. A rank with none of these kinds has 1.
    """
    sums = [(sum(b.get(kind, 0.0) for kind in kinds), sum(p.get(kind, 0.0) for kind in kinds))
            for b, p in zip(busy, planned, strict=True)]  # fmt: skip
    ratios = [measured / expected if expected else 1.0 for measured, expected in sums]
    usual = max(1.0, sorted(ratios)[(len(ratios) - 1) // 2])
    return [ratio / usual for ratio in ratios]


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A plan for the ranks' true speeds: what it takes there, and what the present plan takes."""

    plan: PlanSpec
    step_seconds: float
    present_step_seconds: float
    prediction: Prediction

    @property
    def gain_percent(self) -> float:
        return 100.0 * (self.present_step_seconds / self.step_seconds - 1.0)


def find_remedy(job: Job, layout: Layout, profile: ProfileSpec | None, factors: dict[int, float]) -> Remedy:
    """The best plan with some ranks slower by `factors`, beside the present one. Raises BadInput where none fits."""
    from hethub.planner import plan as make_plan  # only rank 0 plans, so only it loads the search

    cluster, measured = slowed(layout, profile, factors)
    limit = planning_seconds(job.spec)
    wishes = ConstraintsSpec.model_validate({**job.spec.constraints.model_dump(), "time_limit_seconds": limit})
    strategy = "auto" if job.plan_path else job.spec.plan
    found = make_plan(
        job.model, cluster, job.spec.train.batch, wishes, strategy=strategy, with_bounds=False, profile=measured
    )
    present = predict(bind(layout.plan, job.model, cluster), profile=measured)
    return Remedy(
        plan=found.plan, step_seconds=found.prediction.step_seconds, present_step_seconds=present.step_seconds,
        prediction=found.prediction,
    )  # fmt: skip


def planning_seconds(spec: JobSpec) -> float:
    """How long rank 0 may search while the others wait in a collective: well below what passes for a dead rank."""
    return min(spec.constraints.time_limit_seconds or PLANNING_SECONDS, spec.communicator.timeout_seconds / 4)


def slowed(layout: Layout, profile: ProfileSpec | None, factors: dict[int, float]) -> tuple[ClusterSpec, ProfileSpec]:
    """The cluster in which these ranks' accelerators are device types of their own, and a profile that has them slower.

    What was not measured is taken from the estimate, so that a slow rank's every layer takes `factor` times as long.
    """
    cluster, precision = layout.cluster, layout.plan.precision
    levels = sorted({round(factor, 1) for factor in factors.values()})
    classes = [levels.index(round(factors[r], 1)) + 1 if r in factors else 0 for r in range(cluster.size)]
    told = tell_apart(cluster, classes, MARK)
    devices = {(device.accelerator, device.precision): device for device in (profile.devices if profile else ())}
    for place, planned in zip(told.places, cluster.places, strict=True):
        name, number = place.accelerator.name, classes[place.rank]
        if number and (name, precision) not in devices:
            known = devices.get((planned.accelerator.name, precision)) or _estimated(layout, planned.accelerator)
            devices[name, precision] = _slower(known, name, levels[number - 1])
    content = {"date": "", "hethub": hethub.__version__, "software": "stragglers", "model": layout.model}
    base = profile or ProfileSpec(**content, devices=tuple(devices.values()))
    return told, base.replace(devices=tuple(devices.values()))


def _estimated(layout: Layout, accelerator: AcceleratorSpec) -> DeviceProfile:
    """What the predictor expects of an accelerator, as if measured from the smallest to the largest micro-batch there
    can be: only ratios to it count."""
    cost = LayerCost(layout.model, accelerator, layout.plan.seq_len, layout.plan.precision)
    sizes = sorted({1, layout.plan.global_batch})

    def timing(micro_batch: int, passes: PassSeconds) -> dict[str, Any]:
        place = {"micro_batch": micro_batch, "seq_len": layout.plan.seq_len}
        return {**place, "forward_seconds": passes.forward, "backward_seconds": passes.backward}

    embedding = [PartTiming(part="embedding", **timing(size, cost.embedding(size))) for size in sizes]
    head = [PartTiming(part="head", **timing(size, cost.head(size))) for size in sizes]
    return DeviceProfile(
        accelerator=accelerator.name,
        precision=layout.plan.precision,
        layers=tuple(LayerTiming(**timing(size, cost.layer(size))) for size in sizes),
        parts=(*embedding, *head),
    )


def _slower(measured: DeviceProfile, name: str, factor: float) -> DeviceProfile:
    """A device's measurements, all times `factor`, under another name."""

    def times(timing: Any) -> Any:
        return timing.replace(
            forward_seconds=timing.forward_seconds * factor, backward_seconds=timing.backward_seconds * factor
        )

    return measured.replace(
        accelerator=name, layers=tuple(map(times, measured.layers)), parts=tuple(map(times, measured.parts))
    )


def describe(layout: Layout, straggler: Straggler, steps: Sequence[int]) -> str:
    """The report of a slow rank in the steps looked at, without what a new plan would bring."""
    kind = straggler.kind
    return (
        f"{name_of(layout, straggler.rank)} has taken {straggler.factor:.2f}x its planned time in {len(steps)} looked-at steps "
        f"({steps[0]} to {steps[-1]}), measured against the other ranks; most in {kind}: {straggler.measured[kind]:.3g} s a step, "
        f"planned {straggler.planned[kind]:.3g} s"
    )


def name_of(layout: Layout, rank: int) -> str:
    """A rank as reports name it."""
    place = layout.cluster.places[rank]
    return f"rank {rank} ({place.accelerator.name}, node '{place.node.name}')"
