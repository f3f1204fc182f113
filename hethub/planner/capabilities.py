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
    family_schedules: tuple[ScheduleName, ...] = ()  # beside `schedules`, by the families of their papers alone
    family_zero: tuple[int, ...] = (0, 1)  # levels that Poplar's, Cephalo's and Zorse's own plans use
    chooses_in_flight: bool = True  # whether more tiles in flight than the default are looked at

    def limited(self, *, chooses_in_flight: bool) -> "Capabilities":
        """The same table for a search that keeps the default number of tiles in flight, or not."""
        return replace(self, chooses_in_flight=chooses_in_flight)

    def left_out(self) -> list[str]:
        """What the plan format knows and this table does not allow, one entry each, for `not_searched`."""
        names: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "ministages", "layered", "zero_bubble")
        of_families, kinds = (
            "only as the families of their papers propose it",
            ("activations", "parameters", "optimizer"),
        )
        missing = [
            f"schedule {name}: {of_families if name in self.family_schedules else 'not searched'}"
            for name in names
            if name not in self.schedules
        ]
        missing += [
            f"zero {level}: {of_families if level in self.family_zero else 'not executable yet'}"
            for level in range(4)
            if level not in self.zero
        ]
        if self.max_chunks == 1:
            missing.append(f"several chunks of layers per stage: {of_families}")
        return missing + [
            f"offload of {kind}: {of_families if kind in self.offload else 'not executable yet'}" for kind in kinds
        ]


# Selective recompute is executable, but costs time and saves nothing where attention is fused, as in our runtime.
RUNTIME = Capabilities(
    schedules=("gpipe", "1f1b", "zero_bubble"),
    zero=(0, 1),
    recompute=("none", "full"),
    offload=("activations", "parameters", "optimizer"),
    max_chunks=1,
    family_schedules=("ministages", "layered"),
    family_zero=(0, 1, 2, 3),
)
