"""What it means for a plan that bytes between makers pass through host memory."""

from typing import NamedTuple


class Staging(NamedTuple):
    """The rate of staging between an accelerator and its relay, whose figure that is, and the step of the same plan if
    bytes went straight between devices, over the same wires. What was measured together with the wire does not tell
    the two apart: None."""

    gbytes_per_second: float
    source: str
    limits: bool | None
    step_seconds_device_direct: float | None

    def sentence(self) -> str:
        rate = f"{self.gbytes_per_second:.3g}" if self.gbytes_per_second < 999.5 else f"{self.gbytes_per_second:.0f}"
        said = f"Between makers bytes pass through host memory at {rate} GB/s per accelerator ({self.source})"
        if self.limits is None:
            return f"{said}."
        if not self.limits:
            return f"{said}, which does not limit this plan."
        return (
            f"{said}, which limits this plan: straight between devices the step would be "
            f"{self.step_seconds_device_direct:.4g} s, but hethub has no such relay."
        )
