"""The pace of an emulation: CPU ranks compute the real mathematics in the time that their emulated accelerators take.

Per layer and per byte the predictor says how long the accelerator or the link takes; all else (order, waits, overlap,
who waits for whom in a collective) is what the real schedule and the real messages do.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

from hethub.communicator import World
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import HETHUB, Software
from hethub.predictor.memory.ranks import COUNTED, rank_memory
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.runtime.emulate.world import EmulatedWorld
from hethub.runtime.measure.rank_times import RankTimes
from hethub.runtime.memory.accounting import COUNTED_STEPS
from hethub.runtime.pace import Pace, StepPace
from hethub.spec.base import show_gib
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import EmulationSpec
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import Action, Kind

REAL_SHARE = 0.25  # of the emulated step, that all ranks at once on these cores may really take
TRIAL_STEPS = COUNTED_STEPS + 1  # the first ones count memory, which slows them
MARGIN = 1.2  # on a scale chosen at start: later steps may find the machine busier than the trial did


class EmulatedPace(Pace):
    """The pace of a rank in an emulation. Before a scale is set it runs at full speed and notes what that takes."""

    def __init__(
        self,
        layout: Layout,
        world: EmulatedWorld,
        spec: EmulationSpec,
        profile: ProfileSpec | None,
        software: Software,
    ) -> None:
        self.rank, self._clock = world.rank, world.clock
        self._world, self._spec, self._profile, self._software = world, spec, profile, software
        costs = PlanCosts(layout, software, packaged(), profile)
        assignment = layout.assignment_of.get(world.rank)
        if assignment is not None:  # an unused rank is asked for nothing
            self._times = RankTimes(costs, assignment, spec.slowdown.get(world.rank, 1.0))
            (self._memory,) = rank_memory(layout, only=[world.rank])
        self._samples = 0
        self._host_copies_end = {True: 0.0, False: 0.0}  # of fetches, and of what is stored
        self._real: dict[Kind, float] = {}
        self._emulated: dict[Kind, float] = {}
        self._busy: dict[str, float] = {}
        self._began = self._step_began = self._waited = self._overrun = 0.0

    # -- the pace ----------------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        self._clock.start_step()
        self._step_began, self._overrun = self._clock.at, 0.0
        self._real, self._emulated = {}, {}

    def end_step(self) -> StepPace | None:
        late = self._clock.keep()
        if not self._clock.scale:
            return None
        emulated = (self._clock.at - self._step_began) / self._clock.scale
        return StepPace(emulated_seconds=emulated, overrun_seconds=(self._overrun + late) / self._clock.scale)

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        self._samples = 0 if action.microbatch is None else action.microbatch.samples.size
        real, emulated = self._sums()
        yield
        self._count_overrun(real, emulated)

    def enter(self, kind: Kind, layer: int) -> None:
        self._begin(kind, self._times.layer(kind, layer, self._samples) if self._samples else 0.0)

    def leave(self) -> None:
        self._clock.end()
        own = monotonic() - self._began - (self._clock.waited_seconds - self._waited)
        self._real[self._kind] = self._real.get(self._kind, 0.0) + own

    @contextmanager
    def stepping(self, num_elements: int) -> Iterator[None]:
        real, emulated = self._sums()
        self._begin(Kind.STEP, self._times.optimizer(num_elements))
        yield
        self.leave()
        self._count_overrun(real, emulated)

    def take_busy_seconds(self) -> dict[str, float] | None:
        """What the emulated accelerator has computed; that this machine needed longer is overrun and makes no
        straggler."""
        taken, self._busy = self._busy, {}
        return taken if self._clock.scale else None

    def start_host_copy(self, num_bytes: int, *, fetches: bool) -> float | None:
        """Copies of a direction go one after the other, beside those of the other one and what is computed."""
        begins = max(self._clock.at, self._host_copies_end[fetches])
        passes = self._host_copies_end[not fetches] > begins
        each = self._times.host_passing_seconds_per_byte if passes else self._times.host_seconds_per_byte
        self._host_copies_end[fetches] = begins + num_bytes * each * self._clock.scale
        return self._host_copies_end[fetches]

    def end_host_copy(self, end: float | None) -> None:
        if end is not None:
            self._clock.advance(end)

    @contextmanager
    def behind_host_copy(self, end: float | None) -> Iterator[None]:
        before = self._clock.at
        self._clock.at = max(before, end or before)
        yield
        self._clock.at = before

    def _begin(self, kind: Kind, seconds: float) -> None:
        self._kind = kind
        for sums in (self._emulated, self._busy):
            sums[kind] = sums.get(kind, 0.0) + seconds
        self._clock.begin(seconds)
        self._began, self._waited = monotonic(), self._clock.waited_seconds

    def _sums(self) -> tuple[float, float]:
        return sum(self._real.values()), sum(self._emulated.values())

    def _count_overrun(self, real: float, emulated: float) -> None:
        """Counts by how much the work since those sums really took longer than it should, and sleeps till its end."""
        now_real, now_emulated = self._sums()
        if self._clock.scale:
            self._overrun += max(0.0, now_real - real - (now_emulated - emulated) * self._clock.scale)
        self._clock.keep()

    def on(self, layout: Layout) -> "EmulatedPace":
        """The pace of this rank under another plan, at the same scale."""
        return EmulatedPace(layout, self._world, self._spec, self._profile, self._software)

    # -- what is reported --------------------------------------------------------------------------------------------

    @property
    def time_scale(self) -> float | None:  # type: ignore[override]
        return self._clock.scale

    def seconds(self, real_seconds: float) -> float:
        return real_seconds / self._clock.scale if self._clock.scale else real_seconds

    def memory_bytes(self, counted: int) -> int:
        """What the emulated accelerator's allocator would reserve: our count, and what only devices need."""
        parts = self._memory.parts
        used = counted + sum(size for part, size in parts.items() if part not in COUNTED)
        if used > self._memory.limit:
            raise RunFailed(
                f"rank {self.rank} ({self._memory.accelerator}, emulated) is out of memory: it needs {used:,} bytes "
                f"({show_gib(used)} GiB), the accelerator has {self._memory.limit:,}. Lower micro_batch or in_flight, set "
                "recompute: full, or give the stage fewer layers."
            )
        return used

    # -- the scale -----------------------------------------------------------------------------------------------------

    def needed_scale(self, step_seconds: float, predicted_seconds: float) -> float:
        """The scale at which this rank keeps its pace, after a step at full speed that took `step_seconds`.

        The whole step, all ranks at once, may take `REAL_SHARE` of the emulated time; no kind of action on any rank
        more than twice that.
        """
        whole = step_seconds / predicted_seconds
        kinds = [self._real[kind] / self._emulated[kind] / 2 for kind in self._real if self._emulated[kind]]
        return max([whole, *kinds]) / REAL_SHARE

    def set_scale(self, given: float | None, needed: float) -> None:
        """Takes the scale `given`, or one that suits. Raises BadInput where the given one is too small."""
        if given is not None and given < needed:
            raise BadInput(
                f"rehearsal.time_scale is {given:g}, but on these cores the ranks' real computing would take more than "
                f"{REAL_SHARE:.0%} of the emulated time; this job needs at least {round_up(needed):g} here. Give that, remove the key to "
                "have it chosen, or emulate a smaller model."
            )
        self._clock.scale = round_up(needed * MARGIN) if given is None else given


def emulated_pace(
    layout: Layout,
    world: EmulatedWorld,
    spec: EmulationSpec,
    predicted_seconds: float,
    build_trial: Callable[[Pace], Callable[[int], object]],
    profile: ProfileSpec | None = None,
    software: Software = HETHUB,
) -> EmulatedPace:
    """The pace of this rank, its scale agreed with all ranks after a few steps at full speed.

    `build_trial` gives, for a pace, the function that trains a step (counted from 1); it is thrown away afterwards.
    Raises BadInput where the scale given is too small for these cores.
    """
    pace = EmulatedPace(layout, world, spec, profile, software)
    run_step = build_trial(pace)
    for step in range(1, TRIAL_STEPS + 1):
        world.barrier()
        start = monotonic()
        run_step(step)
        world.barrier()
        seconds = monotonic() - start
    needed = max(world.all_gather_objects(pace.needed_scale(seconds, predicted_seconds)))
    pace.set_scale(spec.time_scale, needed)
    return pace


def round_up(value: float) -> float:
    """`value` rounded up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


def kept_pace(world: World, time_scale: float, paces: Sequence[StepPace]) -> dict[str, Any]:
    """How much of the emulated time of these steps, by rank, real work came too late for; all ranks ask."""
    overrun = 100.0 * sum(pace.overrun_seconds for pace in paces) / sum(pace.emulated_seconds for pace in paces)
    rows: list[float] = world.all_gather_objects(overrun)
    return {"time_scale": time_scale, "overrun_percent": max(rows), "overrun_percent_by_rank": rows}
