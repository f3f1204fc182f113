"""What a run measured of its accelerators, as a profile: what `--calibrate` reads."""

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import date
from statistics import median

import hethub
from hethub.predictor.cost.profile import DeviceProfile, ProfileSpec
from hethub.predictor.cost.profiled_layer import estimated_device
from hethub.predictor.cost.software import Software
from hethub.runtime.measure.rank_times import PASSES
from hethub.spec.accelerator import AcceleratorSpec
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import Kind

Seconds = Mapping[str, float]  # of a step, by kind of action
STEPS = 1000  # enough for a median; all steps of a long run would fill a rank's memory


class MeasuredSpeeds:
    """How much longer the passes and the update of every device type took than planned, over all its ranks and the last
    `STEPS` steps looked at."""

    def __init__(self) -> None:
        self._medians: dict[tuple[str, bool], deque[float]] = {}  # of a step's ranks, and whether of the update

    def note(self, layout: Layout, busy: Sequence[Seconds], planned: Sequence[Seconds]) -> None:
        """Takes in a step: what each rank computed, and what it was planned to with its device type's speed."""
        ratios: dict[tuple[str, bool], list[float]] = {}
        for place, own, expected in zip(layout.cluster.places, busy, planned, strict=True):
            for is_update, kinds in ((False, PASSES), (True, (Kind.STEP,))):
                taken, seconds = (sum(of.get(kind, 0.0) for kind in kinds) for of in (own, expected))
                if taken and seconds:  # the first step's update comes behind it
                    ratios.setdefault((place.accelerator.name, is_update), []).append(taken / seconds)
        for key, of_ranks in ratios.items():
            self._medians.setdefault(key, deque(maxlen=STEPS)).append(median(of_ranks))

    def profile(self, layout: Layout, base: ProfileSpec | None, software: Software) -> ProfileSpec | None:
        """The profile that the run was planned with, or the estimate, times the median of what was measured; None
        before any step was looked at."""
        precision, devices = layout.plan.precision, {node.device.name: node.device for node in layout.cluster.nodes}
        factors = {key: median(medians) for key, medians in sorted(self._medians.items())}
        measured = [
            ((base and base.device(name, precision)) or estimated(layout, devices[name], software)).slower(
                factor, optimizer=factors.get((name, True))
            )
            for (name, is_update), factor in factors.items()
            if not is_update
        ]
        if not measured:
            return None
        about = {"date": str(date.today()), "hethub": hethub.__version__, "software": "hethub train"}
        return ProfileSpec(
            **about, model=layout.model, devices=tuple(measured), links=() if base is None else base.links
        )


def estimated(layout: Layout, accelerator: AcceleratorSpec, software: Software) -> DeviceProfile:
    """What the predictor expects of an accelerator in a plan, from the smallest to the largest micro-batch there can
    be."""
    plan = layout.plan
    return estimated_device(
        layout.model, accelerator, plan.seq_len, plan.precision, plan.global_batch, software=software
    )
