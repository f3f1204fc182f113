"""Seconds of messages and collectives by level of the network: in a node, between nodes, between islands."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from hethub.predictor.cost.constants import Constants, packaged
from hethub.predictor.cost.profile import LinkTiming, ProfileSpec
from hethub.spec.accelerator import AcceleratorSpec
from hethub.spec.cluster import ClusterSpec, NodeSpec, Place
from hethub.spec.errors import BadInput

PCIE_3_GBYTES_PER_SECOND = 16  # of 16 lanes, each direction; every generation doubles it
UNKNOWN_GENERATION = 5


class Link(NamedTuple):
    """A way between two ranks: seconds of an empty message and of each byte, one direction."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_seconds + num_bytes * self.seconds_per_byte if num_bytes else 0.0


@dataclass(frozen=True)
class Group:
    """Where the ranks of a collective are: how many on each machine, and on each island."""

    size: int
    machines: tuple[tuple[int, int], ...]  # (machine, ranks of the group on it)
    islands: tuple[tuple[str, int], ...]

    @property
    def most_per_machine(self) -> int:
        return max(count for _, count in self.machines)


def through_host(accelerator: AcceleratorSpec, gbytes_per_second: float) -> bool:
    """Whether a link of an accelerator is PCIe, through the host; faster ones are dedicated (NVLink, xGMI)."""
    generation = accelerator.pcie_generation or UNKNOWN_GENERATION
    return gbytes_per_second <= PCIE_3_GBYTES_PER_SECOND * 2 ** (generation - 3)


def host_gbytes_per_second(accelerator: AcceleratorSpec, fit: Mapping[str, float]) -> float:
    """What copies between host memory and an accelerator reach: its PCIe, or its only link where that is slower.

    Collectives over PCIe reach far less of it (`pcie_fraction`): those pass the host several times.
    """
    generation = accelerator.pcie_generation or UNKNOWN_GENERATION
    wire = min(PCIE_3_GBYTES_PER_SECOND * 2.0 ** (generation - 3), accelerator.link_gbytes_per_second)
    return wire * fit["host_copy_fraction"]


class Network:
    """The links of a cluster, with the fitted fractions of what their data sheets promise."""

    def __init__(
        self, cluster: ClusterSpec, constants: Constants | None = None, profile: ProfileSpec | None = None
    ) -> None:
        self.profile = profile
        self.cluster, self.fit = cluster, (constants or packaged()).links
        self.places = cluster.places
        self.machines = [node for node in cluster.nodes for _ in range(node.count)]

    def group(self, ranks: Sequence[int]) -> Group:
        """Where `ranks` are."""
        machines = Counter(self.places[rank].machine for rank in ranks)
        islands = Counter(self.places[rank].island for rank in ranks)
        return Group(len(ranks), tuple(machines.items()), tuple(islands.items()))

    def link(self, source: int, target: int, sharing: float = 1.0) -> Link:
        """The way from rank to rank, its node's interfaces shared by `sharing` messages at a time."""
        a, b = self.places[source], self.places[target]
        measured = self._measured(self._level(a, b), "send")
        if measured is not None:
            return Link(measured.latency_seconds, sharing / (measured.gbytes_per_second * 1e9))
        near, far = self._near(a, b, sharing), self._between_regions([a.node, b.node], sharing)
        return Link(max(near.latency_seconds, far.latency_seconds), max(near.seconds_per_byte, far.seconds_per_byte))

    def _near(self, a: Place, b: Place, sharing: float) -> Link:
        """The way as it is inside one region."""
        if a.island != b.island:
            return self._bridge(a.node, b.node, a.machine == b.machine, sharing)
        if a.machine == b.machine:
            return Link(self._in_node_latency(a.node), 1.0 / self._in_node(a.node))
        rate = min(self._node_rate(node, sharing) for node in (a.node, b.node))
        return Link(self.fit["in_node_latency_seconds"] + self.cluster.links.between_nodes.latency_seconds, 1.0 / rate)

    def _between_regions(self, nodes: Sequence[NodeSpec], sharing: float) -> Link:
        """The slowest way between the regions of `nodes`, shared by `sharing` flows; no limit inside one region."""
        regions = self.cluster.links.regions
        if regions is None:
            return Link(0.0, 0.0)
        here = sorted({regions.names.index(regions.of_node[node.name]) for node in nodes})
        pairs = [(a, b) for a in here for b in here if a != b]
        rate = min((regions.gbps[a][b] / 8 * 1e9 for a, b in pairs), default=None)
        latency = (
            max((regions.latency_seconds[a][b] for a, b in pairs), default=0.0) if regions.latency_seconds else 0.0
        )
        return Link(latency, 0.0 if rate is None else sharing / rate)

    @staticmethod
    def _level(a: Place, b: Place) -> str:
        if a.island != b.island:
            return "between_islands"
        return "in_node" if a.machine == b.machine else "between_nodes"

    def _measured(self, level: str, operation: str) -> LinkTiming | None:
        return None if self.profile is None else self.profile.link(level, operation)

    def _in_node(self, node: NodeSpec) -> float:
        """Bytes per second of one accelerator to its neighbours, each direction."""
        given = self.cluster.links.in_node.gbytes_per_second
        sheet = given or node.device.link_gbytes_per_second
        fraction = "pcie_fraction" if self._hosted(node) else "in_node_fraction"
        return sheet * 1e9 * self.fit[fraction]

    def _hosted(self, node: NodeSpec) -> bool:
        """Whether a node's accelerators reach each other through their host."""
        sheet = self.cluster.links.in_node.gbytes_per_second or node.device.link_gbytes_per_second
        return through_host(node.device, sheet)

    def _sharing_inside(self, node: NodeSpec, num_nodes: int, sharing: int) -> int:
        """How many like groups share the way between a node's accelerators.

        Rings that leave a node over PCIe all pass its host; inside, neighbours may sit under switches of their own, and
        NVLink is for each pair alone.
        """
        return min(sharing, node.accelerators) if num_nodes > 1 and self._hosted(node) else 1

    def _in_node_latency(self, node: NodeSpec) -> float:
        given = self.cluster.links.in_node.latency_seconds
        return self.fit["in_node_latency_seconds"] if given is None else given

    def _node_rate(self, node: NodeSpec, sharing: float) -> float:
        """Bytes per second of one of `sharing` flows out of a node; one flow has one interface at most."""
        if node.gbps is None:
            if self.cluster.emulated:
                return self._in_node(node) / sharing
            raise BadInput(
                f"cluster '{self.cluster.name}': node '{node.name}' gives no gbps_per_nic, and the plan sends between machines; "
                "add `nics` and `gbps_per_nic` (Gbit/s each) to it."
            )
        flows = max(sharing, node.nics)
        rate = node.gbps / 8 * 1e9 / self.cluster.links.between_nodes.oversubscription
        return rate * self.fit["between_nodes_fraction"] / flows

    def _bridge(self, a: NodeSpec, b: NodeSpec, one_machine: bool, sharing: float) -> Link:
        """Between islands: staged through host memory, then the wire; the slower of both counts, for they overlap."""
        given = self.cluster.links.between_islands
        staged = self.fit["host_staged_gbytes_per_second"] * 1e9
        wire = staged
        if given.gbps_per_node is not None:
            wire = given.gbps_per_node / 8 * 1e9 * self.fit["between_nodes_fraction"] / sharing
        elif not one_machine and not (self.cluster.emulated and (a.gbps is None or b.gbps is None)):
            wire = min(self._node_rate(a, sharing), self._node_rate(b, sharing))
        return Link(given.latency_seconds, 1.0 / min(staged, wire))

    def reduce_scatter(self, group: Group, num_bytes: float, sharing: int = 1) -> float:
        """Seconds until every rank holds its part of the sum of `num_bytes`; an all-gather takes as long.

        A ring: every link carries (n-1)/n of the bytes; between nodes `sharing` like groups use the same interfaces.
        """
        if group.size == 1 or not num_bytes:
            return 0.0
        level = (
            "between_islands" if len(group.islands) > 1 else "between_nodes" if len(group.machines) > 1 else "in_node"
        )
        measured = self._measured(level, "all_reduce")
        if measured is not None:
            return measured.latency_seconds / 2 + num_bytes * (group.size - 1) / group.size / (
                measured.gbytes_per_second * 1e9
            )
        nodes = {machine: self.machines[machine] for machine, _ in group.machines}
        inside = [self._sharing_inside(node, len(nodes), sharing) / self._in_node(node) for node in nodes.values()]
        slowest = max(inside) if group.most_per_machine > 1 else 0.0
        steps = (group.size - 1) * self.fit["collective_step_seconds"]
        hosted = group.most_per_machine > 1 and any(self._hosted(node) for node in nodes.values())
        latency = self.fit["collective_latency_seconds"] + min(steps, 2e-4)
        if hosted:
            latency = self.fit["hosted_latency_seconds"] * log2(group.most_per_machine) + min(steps, 2e-4)
        if len(nodes) > 1:
            rates = [self._collective_node_rate(node, min(sharing, node.accelerators)) for node in nodes.values()]
            slowest = max(slowest, 1.0 / min(rates))
            latency += self.cluster.links.between_nodes.latency_seconds * len(nodes).bit_length()
            far = self._between_regions(list(nodes.values()), sharing)
            slowest, latency = max(slowest, far.seconds_per_byte), latency + far.latency_seconds
        if len(group.islands) > 1:
            return latency + self._bridged(group, num_bytes, slowest)
        return latency + num_bytes * slowest * (group.size - 1) / group.size

    all_gather = reduce_scatter

    def all_reduce(self, group: Group, num_bytes: float, sharing: int = 1) -> float:
        """Seconds until every rank holds the sum of `num_bytes`: a reduce-scatter and an all-gather."""
        return 2.0 * self.reduce_scatter(group, num_bytes, sharing)

    def _bridged(self, group: Group, num_bytes: float, inner: float) -> float:
        """Island legs and the exchange overlap in chunks: the slowest leg counts. Every island sends its partial
        sum."""
        given = self.cluster.links.between_islands
        exchanged = num_bytes * (len(group.islands) - 1) / 2
        flows = min(count for _, count in group.islands)
        rate = self.fit["host_staged_gbytes_per_second"] * 1e9 * flows
        if given.gbps_per_node is not None:
            rate = min(rate, given.gbps_per_node / 8 * 1e9 * self.fit["between_nodes_fraction"])
        return given.latency_seconds + max(exchanged / rate, num_bytes * inner)

    def _collective_node_rate(self, node: NodeSpec, sharing: int) -> float:
        """Bytes per second that one of `sharing` collectives gets of a node's interfaces; a ring uses all of them."""
        if node.gbps is None:
            return self._node_rate(node, sharing)
        rate = node.gbps / 8 * 1e9 / self.cluster.links.between_nodes.oversubscription
        return rate * self.fit["between_nodes_fraction"] / sharing
