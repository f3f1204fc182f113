"""What a run measured of its accelerators, as a profile: what `--calibrate` reads."""

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import date
from statistics import median

import hethub
from hethub.predictor.cost.profile import DeviceProfile, ProfileSpec
from hethub.predictor.cost.profiled_layer import estimated_device
from hethub.runtime.measure.rank_times import PASSES
from hethub.spec.accelerator import AcceleratorSpec
from hethub.spec.layout.bind import Layout

Seconds = Mapping[str, float]  # of a step, by kind of action
STEPS = 1000  # enough for a median; all steps of a long run would fill a rank's memory


class MeasuredSpeeds:
    """How much longer the passes of every device type took than planned, over all its ranks and the last `STEPS` steps
    looked at."""

    def __init__(self) -> None:
        self._medians: dict[str, deque[float]] = {}  # of a step's ranks

    def note(self, layout: Layout, busy: Sequence[Seconds], planned: Sequence[Seconds]) -> None:
        """Takes in a step: what each rank computed, and what it was planned to with its device type's speed."""
        ratios: dict[str, list[float]] = {}
        for place, own, expected in zip(layout.cluster.places, busy, planned, strict=True):
            seconds = sum(expected.get(kind, 0.0) for kind in PASSES)
            if seconds:
                ratio = sum(own.get(kind, 0.0) for kind in PASSES) / seconds
                ratios.setdefault(place.accelerator.name, []).append(ratio)
        for name, of_ranks in ratios.items():
            self._medians.setdefault(name, deque(maxlen=STEPS)).append(median(of_ranks))

    def profile(self, layout: Layout, base: ProfileSpec | None) -> ProfileSpec | None:
        """The profile that the run was planned with, or the estimate, times the median of what was measured; None
        before any step was looked at."""
        precision, devices = layout.plan.precision, {node.device.name: node.device for node in layout.cluster.nodes}
        measured = [
            ((base and base.device(name, precision)) or estimated(layout, devices[name])).slower(median(medians))
            for name, medians in sorted(self._medians.items())
        ]
        if not measured:
            return None
        about = {"date": str(date.today()), "hethub": hethub.__version__, "software": "hethub train"}
        return ProfileSpec(
            **about, model=layout.model, devices=tuple(measured), links=() if base is None else base.links
        )


def estimated(layout: Layout, accelerator: AcceleratorSpec) -> DeviceProfile:
    """What the predictor expects of an accelerator in a plan, from the smallest to the largest micro-batch there can
    be."""
    plan = layout.plan
    return estimated_device(layout.model, accelerator, plan.seq_len, plan.precision, plan.global_batch)
