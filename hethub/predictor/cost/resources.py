"""Resources that bytes occupy, links and paths between two ranks, and the racks and regions between machines."""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from hethub.predictor.cost.groups import Group, Operation
from hethub.spec.cluster import ClusterSpec, NodeSpec, RackSpec, RegionsSpec

OUT, IN = "out", "in"
OF_RANKS = ("port", "staging")  # resources that the ranks of a machine do not share


class Resource(NamedTuple):
    """Something that bytes occupy, in one direction: its kind, and which of this kind it is."""

    kind: str  # port, staging (of a rank); host, cards, bridge (of a machine); rack (by name); regions (from, to)
    owner: object
    way: str = OUT


class Link(NamedTuple):
    """A link between two ranks in one direction: the seconds of an empty message, and those of each byte."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_seconds + num_bytes * self.seconds_per_byte if num_bytes else 0.0


class Path(NamedTuple):
    """The link between two ranks if nobody else uses it, and the resources on it."""

    alone: Link
    resources: tuple[Resource, ...]


def ends(kind: str, source: int, target: int) -> tuple[Resource, Resource]:
    """Return the resource of this kind that a message leaves, and the one it enters."""
    return Resource(kind, source, OUT), Resource(kind, target, IN)


class BetweenMachines:
    """The uplinks of racks and the links between regions."""

    def __init__(self, cluster: ClusterSpec, unused: Iterable[int] = ()) -> None:
        """`unused` ranks send nothing."""
        self.cluster, self.regions = cluster, cluster.links.regions
        self.machines = cluster.machines
        self._unused = Counter(cluster.places[rank].machine for rank in unused)

    def at_work(self, machine: int) -> int:
        """Return how many of a machine's accelerators send anything."""
        return self.machines[machine].accelerators - self._unused[machine]

    @cached_property
    def racks(self) -> dict[str, RackSpec]:
        """The rack of each node, by the node's name."""
        return {name: rack for rack in self.cluster.links.racks for name in rack.nodes}

    def latencies(self, a: NodeSpec, b: NodeSpec) -> tuple[float, float]:
        """Return the latency that racks add to a message between two nodes, and the latency between their regions."""
        added = sum(self.racks[node.name].latency_seconds for node, _ in self._uplinks(a, b))
        seconds, regions = self.regions and self.regions.latency_seconds, self._regions(a, b)
        return added, seconds[regions[0]][regions[1]] if seconds and regions else 0.0

    def resources(self, a: NodeSpec, b: NodeSpec) -> list[Resource]:
        """Return the resources that a message between two nodes passes."""
        uplinks = [Resource("rack", self.racks[node.name].name, way) for node, way in self._uplinks(a, b)]
        regions = self._regions(a, b)
        return uplinks + [Resource("regions", regions)] * bool(regions)

    def _uplinks(self, a: NodeSpec, b: NodeSpec) -> list[tuple[NodeSpec, str]]:
        racks = self.racks.get(a.name), self.racks.get(b.name)
        return [] if racks[0] is racks[1] else [end for end in ((a, OUT), (b, IN)) if end[0].name in self.racks]

    def _regions(self, a: NodeSpec, b: NodeSpec) -> tuple[int, int] | None:
        """Return the regions of two nodes if they differ, else None."""
        if self.regions is None or self.regions.of_node[a.name] == self.regions.of_node[b.name]:
            return None
        return self._region(self.regions, a), self._region(self.regions, b)

    @staticmethod
    def _region(regions: RegionsSpec, node: NodeSpec) -> int:
        return regions.names.index(regions.of_node[node.name])

    def _ring(self, group: Group) -> Iterable[tuple[NodeSpec, NodeSpec]]:
        """Return the pairs of different nodes that are neighbours in a ring. There are none in a cluster without racks and
        regions."""
        nodes = [self.machines[machine] for machine, _ in group.machines] if self.racks or self.regions else []
        return {(a.name, b.name): (a, b) for a, b in pairwise([*nodes, *nodes[:1]])}.values()

    def latency_of_ring(self, group: Group) -> float:
        """Return the latency of racks and regions for a part of a collective. Between islands it goes once. In a ring it goes
        round, without one step, the one with the least latency."""
        found = [seconds for pair in self._ring(group) if (seconds := sum(self.latencies(*pair)))]
        if len(group.islands) > 1:
            return max(found, default=0.0)
        return sum(found) - (min(found, default=0.0) if len(found) == group.size else 0.0)

    def of_ring(self, group: Group) -> set[Resource]:
        """Return the resources that a ring passes. Both directions are equally full, so one stands for both."""
        passed = {resource for pair in self._ring(group) for resource in self.resources(*pair)}
        return {resource for resource in passed if resource.way == OUT}

    def of_exchange(self, group: Group, operation: Operation) -> Counter[Resource]:
        """Return which fraction of a collective's bytes islands exchange over each resource."""
        found = Counter[Resource]()
        if self.racks or self.regions:
            nodes = {self.machines[machine].name: self.machines[machine] for machine, _ in group.machines}
            islands = {
                machine: (self.machines[machine].island, self.machines[machine].name) for machine, _ in group.machines
            }
            for (here, there), part in group.exchanged_between(operation, islands).items():
                for resource in self.resources(nodes[here], nodes[there]):
                    found[resource] += part
        return found

    def like(self, resource: Resource, group: Group) -> float:
        """Return how many groups share the resource for each group that is on one of the group's machines."""

        def is_behind(node: NodeSpec) -> bool:
            if resource.kind == "rack":
                return node.name in self.racks and self.racks[node.name].name == resource.owner
            assert self.regions is not None
            assert isinstance(resource.owner, tuple)
            return self._region(self.regions, node) == resource.owner[0]

        machines = sum(map(is_behind, self.machines))
        machines -= sum(not self.at_work(own) and is_behind(self.machines[own]) for own in self._unused)
        return machines / sum(is_behind(self.machines[machine]) for machine, _ in group.machines)
