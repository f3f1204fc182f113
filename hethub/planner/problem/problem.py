"""What is to be planned: model, cluster, batch and constraints, with symmetric accelerators collapsed into device types."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.software import HETHUB, Software
from hethub.spec.accelerator import AcceleratorSpec, Precision
from hethub.spec.cluster import ClusterSpec, Place
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.tensors import tp_degrees
from hethub.spec.model import ModelSpec
from hethub.spec.plan import Offload, PlanSpec, Recompute, ScheduleName, StageSpec

# The part of the plan space that the runtime executes and is searched: the planner returns nothing beyond it.
SEARCHED_SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zero_bubble", "interleaved", "layered", "ministages", "gpipe")
ZEROS = (0, 1, 2, 3)
# Selective recompute is executable, but costs time and saves nothing where attention is fused, as in our runtime.
RECOMPUTES: tuple[Recompute, ...] = ("none", "full")
OFFLOADED: tuple[Offload, ...] = ("activations", "parameters", "optimizer")

FEW, MANY = 16, 128  # accelerators


class Batch(NamedTuple):
    """What of a job's training the plan depends on."""

    global_batch: int
    seq_len: int
    precision: Precision


class Unit(NamedTuple):
    """Ranks of one machine that form a replica: the smallest thing the planner moves. `device_type` is an index of the problem's."""

    device_type: int
    ranks: tuple[int, ...]

    @property
    def tp(self) -> int:
        return len(self.ranks)


class Combination(NamedTuple):
    """What does not depend on the line: TP degree and micro-batch of every device type, and recompute."""

    degrees: tuple[int, ...]
    micro_batches: tuple[int, ...]
    recompute: Recompute


@dataclass(frozen=True, kw_only=True)
class DeviceType:
    """Accelerators that are interchangeable for the planner: same device, same island, equally placed nodes."""

    accelerator: AcceleratorSpec
    island: str
    machines: tuple[tuple[int, ...], ...]  # the ranks of each
    memory_bytes: int  # per accelerator, what others reserve taken off

    @property
    def size(self) -> int:
        return sum(map(len, self.machines))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for machine in self.machines for rank in machine)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything a search needs. Build it with `pose.pose`, which refuses what no plan can answer."""

    model: ModelSpec
    cluster: ClusterSpec
    batch: Batch
    constraints: ConstraintsSpec = field(default_factory=ConstraintsSpec)
    device_types: tuple[DeviceType, ...] = ()
    profile: ProfileSpec | None = None
    software: Software = HETHUB  # as the job's `train.compile` has it

    def capacity(self, device_type: int) -> float:
        """Bytes of an accelerator that a rank may use."""
        return self.device_types[device_type].memory_bytes * (1 - self.constraints.reserve)

    @property
    def usual_zero(self) -> int:
        """The ZeRO level that candidates start with: 1 costs nothing but the owners' new weights on the way."""
        return 1 if 1 in self.zeros else max(self.zeros)

    @property
    def size(self) -> int:
        return self.cluster.size

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that some machine can hold and the model's heads allow, ascending."""
        widest = max(len(machine) for device_type in self.device_types for machine in device_type.machines)
        return tuple(d for d in tp_degrees(self.model) if d <= widest)

    @cached_property
    def usable(self) -> tuple[int, ...]:
        """The device types some machine of which can hold a replica of the degree given."""
        least = self.constraints.tp or 1
        every = enumerate(self.device_types)
        return tuple(k for k, own in every if any(len(machine) >= least for machine in own.machines))

    def degrees_of(self, device_type: int) -> list[int]:
        """The degree given, or the powers of two, where a machine of the device type can hold them."""
        if self.constraints.tp:
            return [self.constraints.tp] if device_type in self.usable else []
        widest = max(map(len, self.device_types[device_type].machines))
        return [d for d in self.degrees if d <= widest and d & (d - 1) == 0]

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        """Micro-batch sizes the search tries: powers of two up to what the job allows."""
        if self.constraints.micro_batch:
            return (self.constraints.micro_batch,)
        # Many accelerators leave few samples to each.
        usual = 64 if self.size <= FEW else 16 if self.size <= MANY else 8
        top = min(self.batch.global_batch, self.constraints.max_micro_batch or usual)
        return tuple(1 << i for i in range(top.bit_length()) if 1 << i <= top)

    @cached_property
    def _largest(self) -> tuple[int | None, ...]:
        """Per device type, the largest micro-batch that its ranks measured to fit, None where they did not look for it, or
        with more layers or longer sequences, or where the job names a micro-batch, which then counts."""
        profile, names = self.profile, [own.accelerator.name for own in self.device_types]
        if profile is None or self.constraints.micro_batch or profile.model.layers > self.model.layers:
            return (None,) * len(names)
        found = [profile.device(name, self.batch.precision) for name in names]
        longest = [max(timing.seq_len for timing in own.layers) if own else 0 for own in found]
        return tuple(
            own.largest_micro_batch if own and seq_len <= self.batch.seq_len else None
            for own, seq_len in zip(found, longest, strict=True)
        )

    def at_most(self, device_type: int, micro_batch: int) -> int:
        """The micro-batch, or the largest that a rank of the device type measured to fit, if that is smaller."""
        largest = self._largest[device_type]
        return micro_batch if largest is None else min(micro_batch, largest)

    def allows(self, replicas: Sequence[int]) -> bool:
        """Whether fixed degrees allow stages of so many replicas."""
        given = self.constraints
        return given.pp in (None, len(replicas)) and all(given.dp in (None, own) for own in replicas)

    @cached_property
    def forbidden(self) -> frozenset[frozenset[int]]:
        """Pairs of device types that may not share a stage: those the job forbids and, where every stage is to keep its
        optimizer state whole, those of unlike islands."""
        types = self.device_types
        named = [{own.accelerator.name, own.island} for own in types]
        return frozenset(
            frozenset((a, b))
            for a, b in permutations(range(len(types)), 2)
            if any(one in named[a] and other in named[b] for one, other in self.constraints.forbid)
            or (self.zeros == (0,) and types[a].island != types[b].island)
        )

    def forbids_any(self, mixtures: Iterable[Iterable[int]]) -> bool:
        """Whether one of these mixtures of device types holds a pair that may not share a stage."""
        return bool(self.forbidden) and any(
            pair <= device_types for device_types in map(set, mixtures) for pair in self.forbidden
        )

    @property
    def schedule(self) -> ScheduleName:
        """What candidates begin under: the one asked for, if it needs nothing of its stages."""
        chosen = self.constraints.schedule
        return chosen if chosen in ("gpipe", "zero_bubble") else "1f1b"

    @property
    def schedules(self) -> tuple[ScheduleName, ...]:
        """Those that an answer may have."""
        chosen = self.constraints.schedule
        return (chosen,) if chosen else SEARCHED_SCHEDULES

    @property
    def other_schedules(self) -> tuple[ScheduleName, ...]:
        """Schedules that may be better than 1F1B for the same stages."""
        return ("zero_bubble",) if {"1f1b", "zero_bubble"} <= {*self.schedules} else ()

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        chosen = self.constraints.recompute
        return (chosen,) if chosen else RECOMPUTES

    @property
    def zeros(self) -> tuple[int, ...]:
        chosen = self.constraints.zero
        return ZEROS if chosen is None else (chosen,)

    def zero_of(self, wanted: int, device_types: Iterable[int], replicas: int) -> int:
        """The ZeRO level of a stage that asks for one: a single replica has nothing to shard, a stage over islands shards its
        optimizer state at least."""
        islands = {self.device_types[device_type].island for device_type in device_types}
        return 0 if replicas == 1 else max(wanted, int(len(islands) > 1))

    def plan(self, schedule: ScheduleName, stages: Iterable[StageSpec]) -> PlanSpec:
        """The plan of these stages for this model, cluster and batch; the ranks of none of them are unused."""
        stages = tuple(stages)
        used = {rank for stage in stages for replica in stage.replicas for rank in replica.ranks}
        return PlanSpec(
            model=self.model.name,
            cluster=self.cluster.name,
            global_batch=self.batch.global_batch,
            seq_len=self.batch.seq_len,
            precision=self.batch.precision,
            schedule=schedule,
            stages=stages,
            unused=tuple(rank for rank in range(self.size) if rank not in used),
        )

    @memoized
    def units(self, device_type: int, tp: int) -> tuple[Unit, ...]:
        """The device type's ranks as tensor-parallel groups of `tp` inside machines; what `tp` leaves over of a machine forms
        the largest groups that the heads allow, or is left unused where the degree is given."""
        found = []
        for machine in self.device_types[device_type].machines:
            start = 0
            while start < len(machine):
                size = max(d for d in self.degrees if d <= min(tp, len(machine) - start))
                if size < (self.constraints.tp or 1):
                    break
                found.append(Unit(device_type, machine[start : start + size]))
                start += size
        return tuple(found)

    def of_device_type(self, device_type: int) -> "Problem":
        """Return the problem on the nodes of one device type alone, whose ranks are numbered anew."""
        own, cluster = self.device_types[device_type], self.cluster
        wanted = {cluster.places[rank].node.name for rank in own.ranks}
        nodes = tuple(node for node in cluster.nodes if node.name in wanted)
        name = f"{cluster.name}, {own.accelerator.name} ({own.island}) alone"
        return self.on(cluster.replace(name=name, nodes=nodes, links=cluster.links.among(wanted)))

    def with_constraints(self, constraints: ConstraintsSpec) -> "Problem":
        """Return the question under other constraints."""
        return replace(self, constraints=constraints)

    def on(self, cluster: ClusterSpec) -> "Problem":
        """Return the question on another cluster."""
        return replace(self, cluster=cluster, device_types=collapse(cluster))


def collapse(cluster: ClusterSpec) -> tuple[DeviceType, ...]:
    """The cluster's accelerators by device type, those on nodes with fast interfaces first, whatever the order of nodes in
    the file."""
    regions = cluster.links.regions
    found: dict[tuple[float, str], dict[int, list[Place]]] = {}
    for place in cluster.places:
        node = place.node
        region = regions.of_node[node.name] if regions else None
        rack = next((rack.name for rack in cluster.links.racks if node.name in rack.nodes), None)
        gbps = float("inf") if node.gbps is None else node.gbps
        memory = node.reserved_memory_gb, node.host_memory_bytes
        others = (node.nics, node.device.name, place.island, node.accelerators, *memory, region, rack)
        found.setdefault((-gbps, repr(others)), {}).setdefault(place.machine, []).append(place)
    return tuple(_device_type(found[key]) for key in sorted(found))


def _device_type(machines: dict[int, list[Place]]) -> DeviceType:
    first = next(iter(machines.values()))[0]
    return DeviceType(
        accelerator=first.accelerator,
        island=first.island,
        machines=tuple(tuple(place.rank for place in places) for places in machines.values()),
        memory_bytes=first.node.usable_memory_bytes,
    )
