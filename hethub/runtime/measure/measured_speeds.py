"""What a run measured of its accelerators, as a profile: what `--calibrate` reads."""

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


class MeasuredSpeeds:
    """How much longer the passes of every device type took than planned, over all its ranks and all steps looked at."""

    def __init__(self) -> None:
        self._ratios: dict[str, list[float]] = {}

    def note(self, layout: Layout, busy: Sequence[Seconds], planned: Sequence[Seconds]) -> None:
        """Takes in a step: what each rank computed, and what it was planned to with its device type's speed."""
        for place, own, expected in zip(layout.cluster.places, busy, planned, strict=True):
            seconds = sum(expected.get(kind, 0.0) for kind in PASSES)
            if seconds:
                ratio = sum(own.get(kind, 0.0) for kind in PASSES) / seconds
                self._ratios.setdefault(place.accelerator.name, []).append(ratio)

    def profile(self, layout: Layout, base: ProfileSpec | None) -> ProfileSpec | None:
        """The profile that the run was planned with, or the estimate, times the median of what was measured; None
        before any step was looked at."""
        precision, devices = layout.plan.precision, {node.device.name: node.device for node in layout.cluster.nodes}
        measured = [
            ((base and base.device(name, precision)) or estimated(layout, devices[name])).slower(median(ratios))
            for name, ratios in sorted(self._ratios.items())
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
