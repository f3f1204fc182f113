"""Stragglers: ranks that take longer for their work than planned, and what a new plan for their true speeds would bring.

What a rank computes in a step is laid over what was planned for it, by kind of action, communication in neither.
Predictions err alike for ranks that are alike, so a rank counts as slow where it takes longer for its plan than those
do, whether they keep theirs or not; one that is alone of its kind, where it exceeds its plan by more than every other
kind does.
"""

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import hethub
from hethub.predictor import Prediction, predict
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import Software, hethub_software
from hethub.runtime.measure.measured_speeds import Seconds, estimated
from hethub.runtime.measure.rank_times import PASSES
from hethub.runtime.measure.speed_classes import SLOW_MARK, keep_forbidden, tell_apart
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import Job, JobSpec, StragglerSpec
from hethub.spec.layout.bind import Layout, bind
from hethub.spec.plan import PlanSpec

WORTHWHILE_PERCENT = 3.0  # gain below which a plan is not changed
PLANNING_SECONDS = 30.0  # of search, while all ranks wait


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

    `known` are the factors by which ranks are planned to be slow already; ranks of one `kind` err alike (None: all).
    """

    def __init__(
        self,
        planned: Sequence[Seconds],
        spec: StragglerSpec,
        known: Mapping[int, float] | None = None,
        kinds: Sequence[Hashable] | None = None,
    ) -> None:
        self._planned, self._limit = planned, 1.0 + spec.threshold
        self._known = dict(known or {})
        self._rank_kinds = kinds or [None] * len(planned)
        self._judges = [rank not in self._known for rank in range(len(planned))]
        self._steps: deque[Sequence[Seconds]] = deque(maxlen=spec.steps)
        self._factors: deque[list[float]] = deque(maxlen=spec.steps)
        self._reported: set[int] = set()

    def note(self, busy: Sequence[Seconds]) -> Noted:
        """Takes in a step; the ranks that have now been slow for long enough, or no longer, each told once."""
        self._steps.append(busy)
        self._factors.append(self._against_others(busy, PASSES))
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
        excess = {kind: self._against_others(medians, [kind])[rank] for kind in self._planned[rank]}
        return Straggler(rank, factor, max(excess, key=excess.__getitem__), medians[rank], dict(self._planned[rank]))

    def _against_others(self, busy: Sequence[Seconds], actions: Sequence[str]) -> list[float]:
        return against_others(busy, self._planned, actions, self._rank_kinds, self._judges)


def against_others(
    busy: Sequence[Seconds],
    planned: Sequence[Seconds],
    actions: Sequence[str],
    kinds: Sequence[Hashable],
    judges: Sequence[bool],
) -> list[float]:
    """Return for each rank how many times as long as planned these actions took, beside what is usual for ranks of its kind.

    The lower middle counts as usual, so of two ranks the faster one: a rank may be slow, none is fast. Those that do not
    judge are planned as slow and may have recovered. A rank alone of its kind has nobody whose prediction errs alike: it
    is held against its plan, or the most that is usual for another kind. A rank with none of these actions has 1.
    """
    sums = [(sum(b.get(action, 0.0) for action in actions), sum(p.get(action, 0.0) for action in actions))
            for b, p in zip(busy, planned, strict=True)]  # fmt: skip
    ratios = [measured / expected if measured and expected else 1.0 for measured, expected in sums]
    of_kind: dict[Hashable, list[float]] = {}
    counts = Counter(kinds)
    for kind, ratio, judging, (_, expected) in zip(kinds, ratios, judges, sums, strict=True):
        if judging and expected and counts[kind] > 1:
            of_kind.setdefault(kind, []).append(ratio)
    usual = {kind: _lower_middle(own) for kind, own in of_kind.items()}
    working = [ratio for ratio, (_, expected) in zip(ratios, sums, strict=True) if expected]
    beyond = max(1.0, max(usual.values(), default=_lower_middle(working or [1.0])))
    return [ratio / usual.get(kind, beyond) for kind, ratio in zip(kinds, ratios, strict=True)]


def _lower_middle(ratios: Sequence[float]) -> float:
    return sorted(ratios)[(len(ratios) - 1) // 2]


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A plan for the ranks' true speeds and what it takes there, and what a step of the present plan takes."""

    plan: PlanSpec
    prediction: Prediction
    present_step_seconds: float

    @property
    def gain_percent(self) -> float:
        return 100.0 * (self.present_step_seconds / self.prediction.step_seconds - 1.0)


def find_remedy(job: Job, layout: Layout, profile: ProfileSpec | None, factors: dict[int, float]) -> Remedy:
    """The best plan with some ranks slower by `factors`, beside the present one. Raises BadInput where none fits."""
    from hethub.planner import plan as make_plan  # only rank 0 plans, so only it loads the search

    limit, software = planning_seconds(job.spec), hethub_software(job.spec.train.compile)
    cluster, measured = slowed(layout, profile, factors, software)
    wishes = keep_forbidden(job.spec.constraints.replace(time_limit_seconds=limit), cluster)
    strategy = "auto" if job.plan_path else job.spec.plan
    found = make_plan(
        job.model,
        cluster,
        job.spec.train.batch,
        wishes,
        strategy=strategy,
        with_bounds=False,
        profile=measured,
        software=software,
    )
    present = predict(bind(layout.plan, job.model, cluster), profile=measured, software=software)
    return Remedy(plan=found.plan, prediction=found.prediction, present_step_seconds=present.step_seconds)


def planning_seconds(spec: JobSpec) -> float:
    """How long rank 0 may search while the others wait in a collective: well below what passes for a dead rank."""
    return min(spec.constraints.time_limit_seconds or PLANNING_SECONDS, spec.communicator.timeout_seconds / 4)


def slowed(
    layout: Layout, profile: ProfileSpec | None, factors: dict[int, float], software: Software
) -> tuple[ClusterSpec, ProfileSpec | None]:
    """The cluster in which these ranks' accelerators are device types of their own, and a profile that has them slower.

    What was not measured is taken from the estimate, so that a slow rank's every layer takes `factor` times as long.
    """
    cluster, precision = layout.cluster, layout.plan.precision
    if not factors:  # who was slow is no longer
        return cluster, profile
    levels = sorted({round(factor, 1) for factor in factors.values()})
    classes = [levels.index(round(factors[r], 1)) + 1 if r in factors else 0 for r in range(cluster.size)]
    told = tell_apart(cluster, classes, SLOW_MARK)
    devices = {(device.accelerator, device.precision): device for device in (profile.devices if profile else ())}
    for place, planned in zip(told.places, cluster.places, strict=True):
        name, number = place.accelerator.name, classes[place.rank]
        if number:  # whatever an earlier run measured of ranks that were slow then
            known = devices.get((planned.accelerator.name, precision))
            known = known or estimated(layout, planned.accelerator, software)
            devices[name, precision] = known.slower(levels[number - 1], name)
    content = {"date": "", "hethub": hethub.__version__, "software": "stragglers", "model": layout.model}
    base = profile or ProfileSpec(**content, devices=tuple(devices.values()))
    return told, base.replace(devices=tuple(devices.values()))


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
