"""Emulations: CPU ranks that compute the real mathematics and take the time that their emulated accelerators would.

Per layer and per byte the predictor says how long the accelerator or the link takes; all else (order, waits, overlap,
who waits for whom in a collective) is what the real schedule and the real messages do.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.layer import PassSeconds
from hethub.predictor.cost.links import Network, host_gbytes_per_second
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import HETHUB
from hethub.predictor.memory.ranks import rank_memory
from hethub.predictor.pipeline.costs import PlanCosts
from hethub.runtime.emulate.network import Way
from hethub.runtime.emulate.world import EmulatedWorld
from hethub.runtime.loop.trainer import COUNTED_STEPS, Trainer
from hethub.runtime.pace import Pace, StepPace
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import EmulationSpec
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.layout.execution import Action, Kind

REAL_SHARE = 0.25  # of the emulated step, that all ranks at once on these cores may really take
TRIAL_STEPS = COUNTED_STEPS + 1  # the first ones count memory, which slows them
MARGIN = 1.2  # on a scale chosen at start: later steps may find the machine busier than the trial did


class ClusterNetwork:
    """A cluster's links as interfaces that messages take one after the other.

    Per machine its network interfaces, per machine and per rank one way out and one way in: for the bridge, and for
    the links inside the node. Collectives take all interfaces of their machines, messages one of each end.
    """

    def __init__(self, cluster: ClusterSpec, profile: ProfileSpec | None = None) -> None:
        self._network, self._places = Network(cluster, packaged(), profile), cluster.places
        self._machines = [node for node in cluster.nodes for _ in range(node.count)]
        self._slots: dict[tuple[str, int, str], tuple[int, ...]] = {}
        self.num_interfaces = 0
        for machine, node in enumerate(self._machines):
            self._add("nic", machine, node.nics)
            self._add("bridge", machine, 1)
        for place in self._places:
            self._add("rank", place.rank, 1)

    def _add(self, kind: str, owner: int, count: int) -> None:
        for direction in ("out", "in"):
            self._slots[kind, owner, direction] = tuple(range(self.num_interfaces, self.num_interfaces + count))
            self.num_interfaces += count

    def message(self, source: int, target: int, num_bytes: int) -> Way:
        """A message between two ranks: one interface of the sender's kind out, one in."""
        link = self._network.link(source, target)
        a, b = self._places[source], self._places[target]
        kind = "bridge" if a.island != b.island else "rank" if a.machine == b.machine else "nic"
        ends = (source, target) if kind == "rank" else (a.machine, b.machine)
        interfaces = (self._slots[kind, ends[0], "out"], self._slots[kind, ends[1], "in"])
        return Way(num_bytes * link.seconds_per_byte, link.latency_seconds, interfaces)

    def collective(self, name: str, ranks: Sequence[int], num_bytes: int) -> Way:
        """A collective on all interfaces its members have; what else these carry comes before or after."""
        if len(ranks) == 1 or not num_bytes:
            return Way(0.0, 0.0, ())
        if name == "broadcast":
            return self.message(ranks[0], ranks[1], num_bytes)
        group = self._network.group(ranks)
        rounds = 2 if name.startswith("all_reduce") else 1
        whole = self._network.reduce_scatter(group, num_bytes)
        latency = min(whole, self._network.reduce_scatter(group, 1e-6))
        machines = [machine for machine, _ in group.machines]
        kinds = {"bridge", "nic"} if len(group.islands) > 1 else {"nic"} if len(machines) > 1 else {"rank"}
        owners = ranks if kinds == {"rank"} else machines
        slots = [self._slots[kind, owner, way] for kind in kinds for owner in owners for way in ("out", "in")]
        return Way(rounds * (whole - latency), rounds * latency, tuple((slot,) for own in slots for slot in own))


class RankTimes:
    """Seconds of one rank's layers and optimizer on its emulated accelerator, compute only."""

    def __init__(self, costs: PlanCosts, assignment: Assignment, slowdown: float = 1.0) -> None:
        layout, self._slowdown = costs.layout, slowdown
        spec = layout.replica(assignment.stage, assignment.replica)
        stage = layout.stages[assignment.stage]
        self._cost = costs.layer_cost(assignment.rank)
        self._tp, self._fraction = (
            costs.state.tensor_parallel(spec),
            costs.state.rank_fractions(spec)[assignment.position],
        )
        self._recompute = stage.recompute
        self._defers_wgrad = layout.plan.schedule == "zero_bubble"
        self._first = 0 if assignment.stage == 0 else None
        self.host_seconds_per_byte = 1e-9 / host_gbytes_per_second(self._cost.accelerator, packaged().links)
        self._last = stage.num_layers - 1 if assignment.stage == layout.num_stages - 1 else None

    def layer(self, kind: Kind, layer: int, samples: int) -> float:
        """Seconds of a layer of the stage (counted in model order), embedding and head with the model's ends."""
        own = self._cost.layer(samples, self._tp, self._recompute, self._fraction)
        deferred_wgrad = own.backward * self._cost.weight_share(samples, self._fraction) if self._defers_wgrad else 0.0
        if kind not in (Kind.FORWARD, Kind.BACKWARD):
            return self._slowdown * deferred_wgrad
        passes = [PassSeconds(own.forward, own.backward - deferred_wgrad)]
        if layer == self._first:
            passes.append(self._cost.embedding(samples))
        if layer == self._last:
            passes.append(self._cost.head(samples, self._fraction))
        return self._slowdown * sum(each.forward if kind is Kind.FORWARD else each.backward for each in passes)

    def optimizer(self, num_elements: int) -> float:
        """Seconds to update the state of so many parameters."""
        return self._slowdown * self._cost.optimizer(num_elements) if num_elements else 0.0


class EmulatedPace(Pace):
    """The pace of a rank in an emulation. Before a scale is set it runs at full speed and notes what that takes."""

    def __init__(
        self, layout: Layout, world: EmulatedWorld, spec: EmulationSpec, profile: ProfileSpec | None = None
    ) -> None:
        self.rank, self._clock = world.rank, world.clock
        self._world, self._spec, self._profile = world, spec, profile
        costs = PlanCosts(layout, HETHUB, packaged(), profile)
        self._times = RankTimes(costs, layout.assignments[world.rank], spec.slowdown.get(world.rank, 1.0))
        self._memory = rank_memory(layout)[world.rank]
        self._samples = 0
        self._host_copies_end = 0.0
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
        self._end()

    @contextmanager
    def stepping(self, num_elements: int) -> Iterator[None]:
        real, emulated = self._sums()
        self._begin(Kind.STEP, self._times.optimizer(num_elements))
        yield
        self._end()
        self._count_overrun(real, emulated)

    def take_busy_seconds(self) -> dict[str, float] | None:
        """What the emulated accelerator has computed; that this machine needed longer is overrun, no drift."""
        taken, self._busy = self._busy, {}
        return taken if self._clock.scale else None

    def start_host_copy(self, num_bytes: int) -> float | None:
        """Copies go one after the other on a stream of their own, beside what is computed."""
        seconds = num_bytes * self._times.host_seconds_per_byte * self._clock.scale
        self._host_copies_end = max(self._clock.at, self._host_copies_end) + seconds
        return self._host_copies_end

    def end_host_copy(self, end: float | None) -> None:
        if end is not None:
            self._clock.advance(end)

    def _begin(self, kind: Kind, seconds: float) -> None:
        self._kind = kind
        for sums in (self._emulated, self._busy):
            sums[kind] = sums.get(kind, 0.0) + seconds
        self._clock.begin(seconds)
        self._began, self._waited = monotonic(), self._clock.waited_seconds

    def _end(self) -> None:
        self._clock.end()
        own = monotonic() - self._began - (self._clock.waited_seconds - self._waited)
        self._real[self._kind] = self._real.get(self._kind, 0.0) + own

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
        return EmulatedPace(layout, self._world, self._spec, self._profile)

    # -- what is reported --------------------------------------------------------------------------------------------

    @property
    def time_scale(self) -> float | None:  # type: ignore[override]
        return self._clock.scale

    def seconds(self, real_seconds: float) -> float:
        return real_seconds / self._clock.scale if self._clock.scale else real_seconds

    def memory_bytes(self, counted: int) -> int:
        """What the emulated accelerator's allocator would reserve: our count, and what only devices need."""
        parts = self._memory.parts
        used = counted + sum(parts.get(name, 0) for name in ("framework", "buffers", "logits"))
        if used > self._memory.limit:
            raise RunFailed(
                f"rank {self.rank} ({self._memory.accelerator}, emulated) is out of memory: it needs {used:,} bytes "
                f"({used / 2**30:.2f} GiB), the accelerator has {self._memory.limit:,}. Lower micro_batch or in_flight, set "
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
    build: Callable[[Pace], Trainer],
    profile: ProfileSpec | None = None,
) -> EmulatedPace:
    """The pace of this rank, its scale agreed with all ranks after a few steps at full speed by trainers thrown away.

    Raises BadInput where the scale given is too small for these cores.
    """
    pace = EmulatedPace(layout, world, spec, profile)
    trial = build(pace)
    for step in range(1, TRIAL_STEPS + 1):
        world.barrier()
        start = monotonic()
        trial.run_step(step)
        world.barrier()
        seconds = monotonic() - start
    needed = max(world.all_gather_objects(pace.needed_scale(seconds, predicted_seconds)))
    pace.set_scale(spec.time_scale, needed)
    return pace


def round_up(value: float) -> float:
    """`value` rounded up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit
