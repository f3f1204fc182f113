"""The one table of what the runtime executes today: the planner returns nothing beyond it."""

from dataclasses import dataclass, replace

from hethub.spec.plan import Offload, Recompute, ScheduleName


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The part of the plan space that can be executed, and the words for what is left out."""

    schedules: tuple[str, ...]
    zero: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    offload: tuple[Offload, ...]
    max_chunks: int
    chooses_in_flight: bool = True  # whether more tiles in flight than the default are looked at

    def limited(self, *, chooses_in_flight: bool) -> "Capabilities":
        """The same table for a search that keeps the default number of tiles in flight, or not."""
        return replace(self, chooses_in_flight=chooses_in_flight)

    def left_out(self) -> list[str]:
        """What the plan format knows and this table does not allow, one entry each, for `not_searched`."""
        names: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "ministages", "layered", "zero_bubble")
        missing = [f"schedule {name}: not executable yet" for name in names if name not in self.schedules]
        missing += [f"zero {level}: not executable yet" for level in range(4) if level not in self.zero]
        if self.max_chunks == 1:
            missing.append("several chunks of layers per stage: not executable yet")
        kinds: tuple[Offload, ...] = ("activations", "parameters", "optimizer")
        return missing + [f"offload of {kind}: not executable yet" for kind in kinds if kind not in self.offload]


# Selective recompute is executable, but costs time and saves nothing where attention is fused, as in our runtime.
RUNTIME = Capabilities(schedules=("gpipe", "1f1b"), zero=(0, 1), recompute=("none", "full"), offload=(), max_chunks=1)
