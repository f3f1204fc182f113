"""The one table of what the runtime executes today: the planner returns nothing beyond it."""

from dataclasses import dataclass

from hethub.spec.plan import Offload, Recompute, ScheduleName


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The part of the plan space that can be executed and is searched."""

    schedules: tuple[ScheduleName, ...]
    zero: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    offload: tuple[Offload, ...]
    chooses_in_flight: bool = True  # whether more microbatches in flight than the default are looked at
    any_micro_batch: bool = True  # whether micro-batches between powers of two are looked at


# Selective recompute is executable, but costs time and saves nothing where attention is fused, as in our runtime.
RUNTIME = Capabilities(
    schedules=("1f1b", "zero_bubble", "interleaved", "layered", "ministages", "gpipe"),
    zero=(0, 1, 2, 3),
    recompute=("none", "full"),
    offload=("activations", "parameters", "optimizer"),
)
