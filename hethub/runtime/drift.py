"""Drift: ranks that take longer for their work than planned, and what a new plan for their true speeds would bring.

What a rank computes in a step is laid over what was planned for it. Predictions err alike for all ranks, so a rank counts as
slow where it exceeds its plan by more than the others do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import hethub
from hethub.predictor import Prediction, predict
from hethub.predictor.constants import packaged
from hethub.predictor.costs import PlanCosts
from hethub.predictor.layer_cost import LayerCost, PassSeconds
from hethub.predictor.profile import DeviceProfile, LayerTiming, PartTiming, ProfileSpec
from hethub.predictor.software import HETHUB
from hethub.runtime.rehearsal import RankTimes
from hethub.runtime.self_measure import tell_apart
from hethub.spec.accelerator import AcceleratorSpec
from hethub.spec.cluster import ClusterSpec
from hethub.spec.job import ConstraintsSpec, DriftSpec, Job
from hethub.spec.layout import Layout, bind
from hethub.spec.plan import PlanSpec
from hethub.spec.schedule import Kind

WORTHWHILE_PERCENT = 3.0  # gain below which a plan is not changed
PLANNING_SECONDS = 30.0  # of search, while all ranks wait
MARK = "!"  # in the name of an accelerator that is slower than others of its kind
PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)


class Drifted(NamedTuple):
    """A rank that took `factor` times what was planned for it, the others' usual factor taken out."""

    rank: int
    factor: float


class DriftWatch:
    """Notes what every rank computed, step by step; all ranks are told the same and so find the same."""

    def __init__(self, planned_seconds: Sequence[float], spec: DriftSpec) -> None:
        self._planned, self._spec = planned_seconds, spec
        self._factors: list[list[float]] = [[] for _ in planned_seconds]
        self._reported: set[int] = set()

    def note(self, busy_seconds: Sequence[float]) -> list[Drifted]:
        """Takes in a step; the ranks that have now been too slow for long enough, each told once until it recovers."""
        ratios = [busy / planned for busy, planned in zip(busy_seconds, self._planned, strict=True)]
        usual = sorted(ratios)[(len(ratios) - 1) // 2]
        found = []
        for rank, ratio in enumerate(ratios):
            own = self._factors[rank]
            own.append(ratio / usual)
            if own[-1] <= 1.0 + self._spec.threshold:
                own.clear()
                self._reported.discard(rank)
            elif len(own) >= self._spec.steps and rank not in self._reported:
                self._reported.add(rank)
                found.append(Drifted(rank, sorted(own)[len(own) // 2]))
        return found


def planned_seconds(
    layout: Layout, profile: ProfileSpec | None, factors: dict[int, float] | None = None
) -> list[float]:
    """What every rank is planned to compute in a step, without communication and optimizer; times its known factor."""
    costs = PlanCosts(layout, HETHUB, packaged(), profile)
    result = []
    for seat in layout.seats:
        times = RankTimes(costs, seat, (factors or {}).get(seat.rank, 1.0))
        layers = range(layout.stages[seat.stage].num_layers)
        tiles = layout.tiles_of(seat.stage, seat.replica)
        sizes = {size: sum(tile.samples.size == size for tile in tiles) for size in {t.samples.size for t in tiles}}
        seconds = sum(
            count * times.layer(kind, layer, size)
            for size, count in sizes.items()
            for kind in PASSES
            for layer in layers
        )
        result.append(seconds)
    return result


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
    limit = job.spec.constraints.time_limit_seconds or PLANNING_SECONDS
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


def slowed(layout: Layout, profile: ProfileSpec | None, factors: dict[int, float]) -> tuple[ClusterSpec, ProfileSpec]:
    """The cluster in which these ranks' accelerators are kinds of their own, and a profile that has them slower.

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
    content = {"date": "", "hethub": hethub.__version__, "software": "drift", "model": layout.model}
    base = profile or ProfileSpec(**content, devices=tuple(devices.values()))
    return told, base.replace(devices=tuple(devices.values()))


def _estimated(layout: Layout, accelerator: AcceleratorSpec) -> DeviceProfile:
    """What the predictor expects of an accelerator, as if measured at one point: only ratios to it count."""
    cost = LayerCost(layout.model, accelerator, layout.plan.seq_len, layout.plan.precision)
    place = {"micro_batch": 1, "seq_len": layout.plan.seq_len}

    def timing(passes: PassSeconds) -> dict[str, Any]:
        return {**place, "forward_seconds": passes.forward, "backward_seconds": passes.backward}

    parts = (
        PartTiming(part="embedding", **timing(cost.embedding(1))),
        PartTiming(part="head", **timing(cost.head(1))),
    )
    return DeviceProfile(
        accelerator=accelerator.name, precision=layout.plan.precision, layers=(LayerTiming(**timing(cost.layer(1))),),
        parts=parts,
    )  # fmt: skip


def _slower(measured: DeviceProfile, name: str, factor: float) -> DeviceProfile:
    """A device's measurements, all times `factor`, under another name."""

    def times(timing: Any) -> Any:
        return timing.replace(
            forward_seconds=timing.forward_seconds * factor, backward_seconds=timing.backward_seconds * factor
        )

    return measured.replace(
        accelerator=name, layers=tuple(map(times, measured.layers)), parts=tuple(map(times, measured.parts))
    )


def describe(layout: Layout, drifted: Drifted, steps: int) -> str:
    """The report of a slow rank, without what a new plan would bring."""
    place = layout.cluster.places[drifted.rank]
    return (
        f"rank {drifted.rank} ({place.accelerator.name}, node '{place.node.name}') has taken {drifted.factor:.2f}x its planned time "
        f"for {steps} steps, measured against the other ranks"
    )
