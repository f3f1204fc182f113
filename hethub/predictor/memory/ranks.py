"""The peak memory of every rank, by what it is for. A plan that does not fit is refused before it runs.

`weights`, `gradients`, `optimizer` and `activations` are tensors, which the runtime counts too
(hethub.runtime.memory.accounting). The other parts are what a process holds beside them (`around`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from hethub.predictor.cost.constants import is_cpu
from hethub.predictor.cost.software import HETHUB, Software, element_bytes, held_gradient_bytes
from hethub.predictor.memory.activations import HeldActivations, held_microbatches
from hethub.predictor.memory.parameters import RankWidths, replica_widths
from hethub.predictor.memory.peak import Moment, peak
from hethub.predictor.memory.shards import Shard
from hethub.predictor.memory.state import Resident, resident
from hethub.predictor.memory.surroundings import checkpoint_bytes, pinned, surroundings
from hethub.spec.base import show_gib
from hethub.spec.cluster import ClusterSpec, NodeSpec
from hethub.spec.errors import BadInput, either
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.layout.tensors import LOSS_CHUNK_TOKENS
from hethub.spec.plan import SCHEDULES

COUNTED = ("weights", "gradients", "optimizer", "activations")


class RankMemory(NamedTuple):
    """The bytes of one rank at its peak: the sum, what the accelerator offers, the parts of the sum, and what is in host
    memory, as a sum and in parts.

    On a CPU both lie in the same memory: `bytes` is what the process holds but for what was offloaded.
    """

    rank: int
    accelerator: str
    bytes: int
    limit: int
    parts: dict[str, int]
    host_bytes: int
    host_parts: dict[str, int]

    def fits(self, reserve: float) -> bool:
        return self.bytes <= self.limit * (1.0 - reserve)


def rank_memory(layout: Layout, software: Software = HETHUB, only: Collection[int] | None = None) -> list[RankMemory]:
    """Return the peak memory of every rank, or of those in `only`, in rank order. Equal ranks are computed once."""
    known: dict[object, RankMemory] = {}
    shards: dict[tuple[int, RankWidths], Shard] = {}
    nodes = {node.name: _Node.of(node) for node in layout.cluster.nodes}
    width = element_bytes(software.math_precision(layout.plan.precision))
    result, places = [], layout.cluster.places
    for stage, stage_spec in enumerate(layout.stages):
        named, zero = stage_spec.state_shares, stage_spec.zero
        uneven = any(spec.uneven_shares for spec in stage_spec.replicas)
        for replica, spec in enumerate(stage_spec.replicas):
            load = (stage, spec.micro_batch, spec.samples, layout.in_flight[stage][replica])
            cut = replica_widths(layout.model, spec, software)
            for position, rank in enumerate(spec.ranks):
                if only is not None and rank not in only:
                    continue
                node, widths = nodes[places[rank].node.name], cut[position % len(cut)]
                island = places[rank].island
                # Replicas of unlike degrees join unlike; where cuts are uneven, each rank steps its own part, too.
                own_cut = None if stage_spec.cut_alike else (spec.tp, rank * uneven)
                key = (load, own_cut if zero else replica, widths, named.get(rank), node.on_cpu, island)
                if key not in known:
                    shard = shards.setdefault((stage, widths), Shard(layout, stage, widths, software, width))
                    parts, host = _parts(shard, Assignment(rank, stage, replica, position), node.on_cpu)
                    known[key] = RankMemory(rank, "", sum(parts.values()), 0, parts, sum(host.values()), host)
                one = known[key]
                result.append(
                    RankMemory(rank, node.accelerator, one.bytes, node.limit, one.parts, one.host_bytes, one.host_parts)
                )
    return sorted(result, key=itemgetter(0))


class _Node(NamedTuple):
    """What the ranks of a node have."""

    accelerator: str
    on_cpu: bool
    limit: int

    @staticmethod
    def of(node: NodeSpec) -> "_Node":
        return _Node(node.device.name, is_cpu(node.device), node.usable_memory_bytes)


def check_memory(layout: Layout, reserve: float = 0.06) -> None:
    """Raise BadInput if the plan does not fit. It says what is short."""
    if (short := shortage(layout, rank_memory(layout), reserve)) is not None:
        raise BadInput(short)


def shortage(layout: Layout, used: Sequence[RankMemory], reserve: float) -> str | None:
    """Return in words why a plan does not fit, or None if it fits. It names the rank that exceeds its accelerator's memory the
    most, what fills it and what to do, or else the node whose host memory is too small for what its ranks hold there."""
    if over := [entry for entry in used if not entry.fits(reserve)]:
        worst = max(over, key=lambda entry: entry.bytes / entry.limit)
        largest = max(worst.parts, key=lambda part: worst.parts[part])
        return (
            f"rank {worst.rank} ({worst.accelerator}) would need {show_gib(worst.bytes)} GiB of its {show_gib(worst.limit)} GiB, of which "
            f"{100 * reserve:g} % stay free; {len(over)} of {len(layout.assignments)} ranks are over. Most of it is {largest} "
            f"({show_gib(worst.parts[largest])} GiB): {_remedies(layout, worst.rank, largest)}."
        )
    for node, held in overfull_hosts(layout.cluster, used):
        has = "has" if node.host_memory_gb is not None else "is assumed to have, as its accelerators do,"
        return (
            f"node '{node.name}': its ranks would hold {show_gib(held)} GiB in host memory (what is offloaded, the copy that a "
            f"checkpoint is written from, and on CPUs all else), of which it {has} {node.host_memory_bytes / 2**30:g} GiB; offload "
            "less on its stages, or give host_memory_gb as it is."
        )
    return None


def overfull_hosts(cluster: ClusterSpec, used: Sequence[RankMemory]) -> list[tuple[NodeSpec, int]]:
    """Return the machines that hold more than their host memory: for each its node and the bytes held."""
    return [(node, held) for node, held in _held_by_hosts(cluster, used) if held > node.host_memory_bytes]


def _held_by_hosts(cluster: ClusterSpec, used: Sequence[RankMemory]) -> list[tuple[NodeSpec, int]]:
    """Return for each machine its node and the bytes that its ranks hold in host memory. CPU ranks hold all of theirs there."""
    held: Counter[int] = Counter()
    for entry in used:
        place = cluster.places[entry.rank]
        held[place.machine] += entry.host_bytes + is_cpu(place.accelerator) * entry.bytes
    return [(cluster.machines[machine], own) for machine, own in held.items()]


class AssumedHost(NamedTuple):
    """A node to which state is offloaded, but whose host memory the cluster file does not give: the most that one of its
    machines holds, and what is assumed to be there."""

    node: str
    bytes: int
    assumed_bytes: int

    def sentence(self) -> str:
        return (
            f"The plan holds up to {self.bytes / 2**30:,.0f} GiB in the host memory of a machine of node '{self.node}', of which "
            f"{self.assumed_bytes / 2**30:,.0f} GiB are assumed (a guess: as much as its accelerators have; host_memory_gb of the "
            "cluster file says it)."
        )


def assumed_hosts(layout: Layout, used: Sequence[RankMemory]) -> tuple[AssumedHost, ...]:
    """Return the nodes of which a plan's answer depends on a guess of host memory."""
    cluster = layout.cluster
    ranks = (rank for own in layout.stages if own.offload for rank in own.ranks)
    offloading = {cluster.machines[cluster.places[rank].machine].name for rank in ranks}
    found = [
        AssumedHost(node.name, held, node.host_memory_bytes)
        for node, held in (_held_by_hosts(cluster, used) if offloading else ())
        if node.name in offloading and node.host_memory_gb is None
    ]
    return tuple({host.node: host for host in sorted(found)}.values())  # of a node's machines the one that holds most


def all_fit(layout: Layout, used: Sequence[RankMemory], reserve: float) -> bool:
    """Whether every rank leaves the fraction `reserve` of its accelerator's memory free, and every machine has enough host
    memory."""
    return all(entry.fits(reserve) for entry in used) and not overfull_hosts(layout.cluster, used)


CUT_FROM = {"optimizer": 1, "gradients": 2, "weights": 3}  # the ZeRO level from which replicas cut it
LARGER = "use an accelerator with more memory"


def _remedies(layout: Layout, rank: int, part: str) -> str:
    """Return in words what would make a part of a rank's memory smaller under its plan."""
    place = layout.assignment_of[rank]
    stage, samples = layout.stages[place.stage], layout.largest_microbatch(place.stage, place.replica)
    shorter = "lower micro_batch" if samples > 1 else "shorten seq_len"
    if part in CUT_FROM:
        cuts = len(stage.replicas) > 1 and stage.zero < CUT_FROM[part]
        offloads = part == "optimizer" and part not in stage.offload
        found = [f"set zero: {CUT_FROM[part]}"] * cuts + ["offload optimizer"] * offloads
        found += ["give the stage fewer layers", "a higher tensor-parallel degree"]
    elif part == "activations":
        plan, some = layout.plan, layout.in_flight[place.stage][place.replica] > 1
        if plan.holds_all:
            found = ["choose schedule 1f1b" + " and lower micro_batch" * (samples > 1)]
        else:
            found = ["lower in_flight"] * (some and plan.schedule != "interleaved") + [shorter]
        found += ["set recompute: full"] * (stage.recompute != "full" and SCHEDULES[plan.schedule].allows("full"))
        found += ["offload activations"] * (part not in stage.offload)
    elif part == "logits":
        few = samples * layout.plan.seq_len <= LOSS_CHUNK_TOKENS
        found = [shorter] * few + ["raise the last stage's tensor-parallel degree"]
    else:
        found = [LARGER if part in ("communicator", "framework") else shorter]
    return either(found)


class Work(NamedTuple):
    """What a rank's microbatches need. It does not depend on how replicas share state."""

    microbatches: HeldActivations
    around: dict[str, float]  # bytes by part of what surrounds the counted tensors
    host_activations: float  # bytes


def work(shard: Shard, assignment: Assignment, *, on_cpu: bool) -> Work:
    """Return what the microbatches of an assignment need. The planner's probes ask it without their ZeRO level."""
    sizes = [chunk.size for chunk in shard.chunks]
    microbatches, in_host = held_microbatches(shard.layout, assignment, shard.kept, sizes, shard.software)
    around = surroundings(shard, assignment, on_cpu=on_cpu)
    around["logits"] = max(0.0, around["logits"] - microbatches.again)  # gone when a layer runs again
    return Work(microbatches, around, in_host)


def _parts(shard: Shard, assignment: Assignment, on_cpu: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of each part that the process holds on the accelerator, and those in host memory."""
    state, own = resident(shard, assignment, on_cpu=on_cpu), work(shard, assignment, on_cpu=on_cpu)
    host = {
        "weights": state.host_weights_bytes,
        "optimizer": state.host_optimizer_bytes,
        "activations": own.host_activations,
        "checkpoint": checkpoint_bytes(shard, state.owned),
    }
    if not on_cpu:
        host = pinned(shard, assignment, state.owned, host)
    fullest = peak(shard, assignment, own.microbatches, state.moves)
    return device_parts(shard, state, fullest, own.around), {part: int(size) for part, size in host.items()}


def device_parts(shard: Shard, state: Resident, fullest: Moment, around: Mapping[str, float]) -> dict[str, int]:
    """Return the bytes of each part on the accelerator: what stays there, and what is added when the rank is fullest. Only the
    widths of the shard are used."""
    width, wide = shard.width, held_gradient_bytes(shard.width, shard.software)
    at_work = fullest.activations + width * fullest.weights + wide * fullest.gradients
    updated = max(0.0, state.update_bytes - at_work)  # the update comes when what computing needed is gone again
    parts = {
        "weights": width * (state.weights + fullest.weights),
        "gradients": wide * (state.gradients + fullest.gradients),
        "optimizer": shard.software.optimizer_included * state.optimizer_bytes + updated,
        "activations": fullest.activations,
        **around,
        # Joined gradients are all there when what layers kept is gone, and let go before the update.
        "temporaries": around["temporaries"] + max(0.0, state.joined_bytes - fullest.activations - updated),
        "communicator": around["communicator"] + state.block_bytes,
    }
    return {part: int(size) for part, size in parts.items()}
