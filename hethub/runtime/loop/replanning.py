"""Replanning for stragglers in a run: who is told what, and when another plan is taken."""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from hethub.communicator import World
from hethub.kernels.device import Device
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import hethub_software
from hethub.runtime.measure.measured_speeds import MeasuredSpeeds
from hethub.runtime.measure.rank_times import planned_seconds
from hethub.runtime.measure.straggler import (
    WORTHWHILE_PERCENT,
    Remedy,
    Straggler,
    StragglerDetector,
    describe,
    find_remedy,
    name_of,
)
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import Job
from hethub.spec.layout.bind import Layout


def is_watched(job: Job, device: Device, cluster: ClusterSpec) -> bool:
    """Whether ranks slower than planned are watched for: not where the job says so, nor on CPUs unless it asks."""
    shares_cores = not device.is_gpu and not cluster.emulated
    return job.spec.replan != "never" and not (job.spec.replan is None and shares_cores)


def make_replanner(job: Job, device: Device, layout: Layout, profile: ProfileSpec | None) -> "Replanner | None":
    """Who watches for ranks slower than planned; None where nobody does."""
    return Replanner(job, layout, profile) if is_watched(job, device, layout.cluster) else None


class Replanner:
    """One rank's part in the watch. All ranks note the same and find the same slow ranks; rank 0 plans and speaks."""

    def __init__(self, job: Job, layout: Layout, profile: ProfileSpec | None) -> None:
        self._job, self._profile = job, profile
        self._software = hethub_software(job.spec.train.compile)
        self._factors: dict[int, float] = {}  # of the ranks that are slow, beside what the job's profile says
        self._remedy: Remedy | None = None
        self._speeds = MeasuredSpeeds()
        self.follow(layout)

    def follow(self, layout: Layout) -> None:
        """Watches this plan, for which the slow ranks' speeds are known."""
        self._layout = layout
        self._planned_for = dict(self._factors)
        self._is_due = False  # the factors are not those last decided on
        self._looked_at: deque[int] = deque(maxlen=self._job.spec.drift.steps)
        planned = planned_seconds(layout, self._profile, self._factors, self._software)
        self._usual = planned_seconds(layout, self._profile, software=self._software) if self._factors else planned
        # Ranks whose predictions err alike: of one device type, in layers of one size; unused ones make none.
        kinds: list[Hashable] = [None] * layout.plan.num_ranks
        for own in layout.assignments:
            replica = layout.replica(own.stage, own.replica)
            kinds[own.rank] = (layout.cluster.places[own.rank].accelerator.name, replica.tp, replica.micro_batch)
        self._watch = StragglerDetector(planned, self._job.spec.drift, self._factors, kinds)

    def note(self, step: int, busy_seconds: Sequence[dict[str, float] | None], world: World) -> list[dict[str, Any]]:
        """Takes in a step; what there is to say of it, a row each. Where rank 0 looks for a better plan, the others wait:
        what they did of the next step meanwhile would be missing from its time."""
        known = [seconds for seconds in busy_seconds if seconds is not None]
        if len(known) < len(busy_seconds):
            return []
        self._looked_at.append(step)
        self._speeds.note(self._layout, known, self._usual)
        noted = self._watch.note(known)
        if not noted.slow and not noted.recovered:
            return []
        for straggler in noted.slow:
            self._factors[straggler.rank] = straggler.factor * self._planned_for.get(straggler.rank, 1.0)
        for rank, factor in noted.recovered.items():
            self._factors.pop(rank, None)
            if factor > 1.0:
                self._factors[rank] = factor
        self._is_due, self._remedy = self._factors != self._planned_for, None
        gain = self._plan_anew() if world.rank == 0 and self._is_due else "the plan stays"
        if self._is_due:
            world.barrier()
        percent = None if self._remedy is None else self._remedy.gain_percent
        rows = [self._slow_row(straggler) for straggler in noted.slow]
        rows += [
            {"rank": rank, "factor": factor, "text": f"{name_of(self._layout, rank)} is no longer slow"}
            for rank, factor in noted.recovered.items()
        ]
        return [
            {**row, "step": step, "text": f"step {step}: {row['text']}; {gain}", "gain_percent": percent}
            for row in rows
        ]

    def measured(self) -> ProfileSpec | None:
        """What the run has shown of every device type's speed; None before any step was looked at."""
        found = self._speeds.profile(self._layout, self._profile, self._software)
        return found and found.as_compiled(self._layout.cluster, self._job.spec.train.compile)

    def _slow_row(self, straggler: Straggler) -> dict[str, Any]:
        return {
            "rank": straggler.rank, "factor": straggler.factor, "kind": straggler.kind, "looked_at_steps": list(self._looked_at),
            "measured_seconds": straggler.measured, "planned_seconds": straggler.planned,
            "text": describe(self._layout, straggler, list(self._looked_at)),
        }  # fmt: skip

    def _plan_anew(self) -> str:
        """What a plan for the true speeds would bring, in words; keeps it."""
        try:
            self._remedy = find_remedy(self._job, self._layout, self._profile, self._factors)
        except BadInput as reason:
            return f"no other plan: {reason}"
        gain = self._remedy.gain_percent
        if gain < WORTHWHILE_PERCENT:
            return "no other plan would be faster"
        ways = "is taken at the next checkpoint" if self._job.spec.replan == "auto" else "replan: auto takes it"
        return (
            f"a new plan would be {gain:.0f} % faster ({self._remedy.present_step_seconds:.4g} s → "
            f"{self._remedy.prediction.step_seconds:.4g} s a step predicted; {ways})"
        )

    def chosen(self, world: World) -> dict[str, Any] | None:
        """At a checkpoint, the plan to go on with, the same on every rank; None where the present one stays."""
        if self._job.spec.replan != "auto" or not self._is_due:
            return None
        own = None
        if self._remedy is not None and self._remedy.gain_percent >= WORTHWHILE_PERCENT:
            own = {
                "plan": self._remedy.plan.model_dump(mode="json"),
                "prediction": self._remedy.prediction.to_dict(),
            }
        found: dict[str, Any] | None = world.all_gather_objects(own)[0]
        self._is_due = found is not None  # until it is followed
        return found
