"""The watch for drift in a run: who is told what, and when another plan is taken."""

from collections.abc import Callable, Sequence
from typing import Any

from hethub.communicator import World
from hethub.runtime.drift import WORTHWHILE_PERCENT, DriftWatch, Remedy, describe, find_remedy, planned_seconds
from hethub.runtime.prepare import Agreed
from hethub.runtime.trainer import Trainer
from hethub.spec.errors import BadInput
from hethub.spec.job import Job

Rebuild = Callable[[Agreed, Trainer, dict[str, Any]], tuple[Agreed, Trainer]]


class Drifting:
    """One rank's part in the watch. All ranks note the same and find the same slow ranks; rank 0 plans and speaks."""

    def __init__(self, job: Job, agreed: Agreed) -> None:
        self._job = job
        self._factors: dict[int, float] = {}
        self._remedy: Remedy | None = None
        self._is_due = False  # a slow rank has been found since the last plan was made
        self._watch = self._new_watch(agreed)

    def _new_watch(self, agreed: Agreed) -> DriftWatch:
        planned = planned_seconds(agreed.layout, agreed.profile, self._factors)
        return DriftWatch(planned, self._job.spec.drift)

    def note(
        self, step: int, busy_seconds: Sequence[float | None], agreed: Agreed, *, plans: bool
    ) -> list[dict[str, Any]]:
        """Takes in a step; what there is to say of it, a row each. The rank that `plans` looks for a better plan."""
        known = [seconds for seconds in busy_seconds if seconds is not None]
        if len(known) < len(busy_seconds):
            return []
        found = self._watch.note(known)
        if not found:
            return []
        self._is_due = True
        for drifted in found:
            self._factors[drifted.rank] = drifted.factor * self._factors.get(drifted.rank, 1.0)
        gain = self._plan_anew(agreed) if plans else ""
        steps = self._job.spec.drift.steps
        return [
            {
                "step": step, "rank": drifted.rank, "factor": drifted.factor,
                "text": f"step {step}: {describe(agreed.layout, drifted, steps)}; {gain}",
                "gain_percent": None if self._remedy is None else self._remedy.gain_percent,
            }
            for drifted in found
        ]  # fmt: skip

    def _plan_anew(self, agreed: Agreed) -> str:
        """What a plan for the true speeds would bring, in words; keeps it."""
        try:
            self._remedy = find_remedy(self._job, agreed.layout, agreed.profile, self._factors)
        except BadInput as reason:
            self._remedy = None
            return f"no other plan: {reason}"
        gain = self._remedy.gain_percent
        if gain < WORTHWHILE_PERCENT:
            return "no other plan would be faster"
        ways = "is taken at the next checkpoint" if self._job.spec.replan == "auto" else "replan: auto takes it"
        return (
            f"a new plan would be {gain:.0f} % faster ({self._remedy.present_step_seconds:.4g} s → "
            f"{self._remedy.step_seconds:.4g} s a step predicted; {ways})"
        )

    def chosen(self, world: World) -> dict[str, Any] | None:
        """At a checkpoint, the plan to go on with, the same on every rank; None where the present one stays."""
        if self._job.spec.replan != "auto" or not self._is_due:
            return None
        self._is_due = False
        own = None
        if self._remedy is not None and self._remedy.gain_percent >= WORTHWHILE_PERCENT:
            own = {
                "plan": self._remedy.plan.model_dump(mode="json"), "step_seconds": self._remedy.step_seconds,
                "prediction": self._remedy.prediction.to_dict(),
            }  # fmt: skip
        found: dict[str, Any] | None = world.all_gather_objects(own)[0]
        return found

    def follow(self, agreed: Agreed) -> None:
        """Watches the new plan, for which the slow ranks' speeds are known."""
        self._watch = self._new_watch(agreed)
