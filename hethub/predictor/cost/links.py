"""The seconds of messages and collectives, from the resources that they occupy and the rates of these.

A message passes a path of resources: the staging of an accelerator and of its host, a node's network cards or its part of
the bridge, a rack's uplink, the link between two regions. Each carries a number of bytes per second in one direction.
Messages and collectives that are at work at the same time share it equally.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import log2

from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.constants import Constants, packaged
from hethub.predictor.cost.groups import Group, Operation, Owned
from hethub.predictor.cost.node_links import NodeLinks, by_node
from hethub.predictor.cost.profile import LinkTiming, ProfileSpec
from hethub.predictor.cost.resources import IN, OF_RANKS, OUT, BetweenMachines, Link, Path, Resource, ends
from hethub.spec.cluster import ClusterSpec, NodeSpec, Place
from hethub.spec.errors import BadInput


class Network:
    """The links of a cluster, with the fitted fractions that they reach of their data sheets."""

    def __init__(
        self,
        cluster: ClusterSpec,
        constants: Constants | None = None,
        profile: ProfileSpec | None = None,
        unused: Iterable[int] = (),
    ) -> None:
        self.profile = profile
        self.cluster, self.fit = cluster, (constants or packaged()).links
        self.places = cluster.places
        self.between = BetweenMachines(cluster, unused)
        self.machines, self.racks = self.between.machines, self.between.racks
        self._ring_rates: dict[tuple[Group, float], list[tuple[Group, float]]] = {}
        self._node_links = by_node(cluster, self.fit)
        self._paths: dict[tuple[int, int, bool], Path] = {}

    def group(self, ranks: Sequence[int], shares: Mapping[int, float] | None = None) -> Group:
        """Return the group of `ranks`. Its rings go in the order of the ranks. `shares` say how much of what they step together
        each owns, relative to the others; without them all own equal parts."""
        ranks = sorted(ranks)
        machines = Counter(self.places[rank].machine for rank in ranks)
        islands = Counter(self.places[rank].island for rank in ranks)
        owned = None
        if shares and len(islands) > 1 and (whole := sum(shares[rank] for rank in ranks)):  # else they step nothing
            by_island, by_machine, most = (dict.fromkeys(every, 0.0) for every in (islands, machines, machines))
            for rank in ranks:
                place, own = self.places[rank], shares[rank] / whole
                by_island[place.island] += own
                by_machine[place.machine] += own
                most[place.machine] = max(most[place.machine], own)
            owned = Owned(*(tuple(own.values()) for own in (by_island, by_machine, most)))
        return Group(len(ranks), tuple(machines.items()), tuple(islands.items()), owned, self.joined(ranks))

    def sharing(self, group: Group) -> int:
        """Return how many groups like this one share a machine's interfaces, if each of its accelerators at work is in one.
        Where replicas of different degrees meet, the machine with the fewest counts. It has replicas of the smallest degree,
        whose ranks carry the most."""
        return max(1, min([self.between.at_work(machine) // count for machine, count in group.machines]))

    def joined(self, ranks: Sequence[int]) -> bool:
        """Whether the ranks of each machine reach each other by their own links."""
        if self._all_joined:
            return True
        places: dict[int, list[int]] = {}
        for rank in ranks:
            places.setdefault(self.places[rank].machine, []).append(self.places[rank].local)
        return all(self.node_links(self.machines[machine]).joins(own) for machine, own in places.items())

    @cached_property
    def _all_joined(self) -> bool:
        """Whether the links in every machine reach from each accelerator to each other one, as they usually do."""
        return all(self.node_links(node).joins(range(node.accelerators)) for node in self.machines)

    def node_links(self, node: NodeSpec) -> NodeLinks:
        """Return the links inside a node. For a machine described as several nodes they are those of the slowest one."""
        return self._node_links[node.name]

    # -- messages

    def link(self, source: int, target: int, sharing: float = 1.0) -> Link:
        """Return the link from rank to rank if `sharing` messages at a time share everything that is not the two ranks' own."""
        alone, resources = self.path(source, target)
        shared = [sharing / self.rate(resource) for resource in resources if resource.kind not in OF_RANKS]
        return Link(alone.latency_seconds, max([alone.seconds_per_byte, *shared]))

    def path(self, source: int, target: int) -> Path:
        """Return the path from rank to rank. A message uses one network interface at most. A bridge passes the host memory of
        both ends."""
        a, b = self.places[source], self.places[target]
        key = (a.machine, b.machine, self.joined((source, target)))
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = self._path(a, b)
        if a.island != b.island:
            return Path(found.alone, (*ends("staging", source, target), *found.resources))
        return found if a.machine != b.machine else Path(found.alone, ends("port", source, target))

    def _path(self, a: Place, b: Place) -> Path:
        """Return the path between two machines or inside one, without the resources that are the ranks' own."""
        apart = a.machine != b.machine
        resources: list[Resource] = []
        if a.island != b.island:
            alone, resources = self._bridge(a, b)
        elif apart:
            latency = self.fit["in_node_latency_seconds"] + self.cluster.links.between_nodes.latency_seconds
            alone = Link(latency, 1.0 / min(self._interface(node) for node in (a.node, b.node)))
            resources = [*ends("cards", a.machine, b.machine)]
        else:
            rate = self._in_node(a.node, 2, self.joined((a.rank, b.rank)))
            alone = Link(self._in_node_latency, 1.0 / rate)
        latency, per_byte = alone
        added, far = self.between.latencies(a.node, b.node)
        resources += self.between.resources(a.node, b.node)
        measured = self._measured(self._level(a, b), "send")
        if measured is not None:
            return Path(Link(measured.latency_seconds, 1e-9 / measured.gbytes_per_second), tuple(resources))
        slowest = max([per_byte, *(1.0 / self.rate(resource) for resource in resources)])
        return Path(Link(max(latency + added, far), slowest), tuple(resources))

    def _bridge(self, a: Place, b: Place) -> tuple[Link, list[Resource]]:
        """Return the path between islands. Bytes are staged through host memory at both ends and go over the wire. These
        overlap, so the slowest counts."""
        given, resources = self.cluster.links.between_islands, list[Resource]()
        if self.cluster.links.staging.per_host_gbytes_per_second is not None:
            resources += ends("host", a.machine, b.machine)
        rates = [self.staging_rate]
        if given.gbps_per_node is not None:
            resources += ends("bridge", a.machine, b.machine)
        elif self._has_cards(a.node) and self._has_cards(b.node):
            resources += ends("cards", a.machine, b.machine)
            rates += [self._interface(node) for node in (a.node, b.node)]
        return Link(given.latency_seconds, 1.0 / min(rates)), resources

    @memoized
    def rate(self, resource: Resource) -> float:
        """Return the bytes per second that a resource carries in its direction, at least as many as one message was measured
        to get."""
        links, (kind, owner, _) = self.cluster.links, resource
        if kind == "regions":
            assert links.regions is not None
            assert isinstance(owner, tuple)
            return links.regions.gbps[owner[0]][owner[1]] / 8 * 1e9
        if kind == "rack":
            (rack,) = (rack for rack in links.racks if rack.name == owner)
            return rack.gbps / 8 * 1e9 * self.fit["between_nodes_fraction"]
        assert isinstance(owner, int)
        if kind == "port":
            return self._in_node(self.places[owner].node)
        if kind == "cards":
            return self._cards(self.machines[owner])
        bridged = self._measured("between_islands", "send")
        least = 0.0 if bridged is None else bridged.gbytes_per_second * 1e9
        if kind == "staging":
            return max(least, self.staging_rate)
        if kind == "host":
            assert links.staging.per_host_gbytes_per_second is not None
            return max(least, links.staging.per_host_gbytes_per_second * 1e9)
        assert links.between_islands.gbps_per_node is not None
        return max(least, links.between_islands.gbps_per_node / 8 * 1e9 * self.fit["between_nodes_fraction"])

    @property
    def staging_rate(self) -> float:
        """The bytes per second between an accelerator and its relay: what the cluster file gives, or else a guess."""
        given = self.cluster.links.staging.gbytes_per_second
        return (self.fit["host_staged_gbytes_per_second"] if given is None else given) * 1e9

    @staticmethod
    def _level(a: Place, b: Place) -> str:
        if a.island != b.island:
            return "between_islands"
        return "in_node" if a.machine == b.machine else "between_nodes"

    def _measured(self, level: str, operation: str) -> LinkTiming | None:
        return None if self.profile is None else self.profile.link(level, operation)

    def _in_node(self, node: NodeSpec, ranks: int | None = None, joined: bool = True) -> float:
        """Return the bytes per second in each direction between one accelerator and the others of a group in its node, by
        default all of them."""
        return self.node_links(node).bytes_per_second(self.fit, ranks, joined)

    @property
    def _in_node_latency(self) -> float:
        given = self.cluster.links.in_node.latency_seconds
        return self.fit["in_node_latency_seconds"] if given is None else given

    def _cards(self, node: NodeSpec) -> float:
        """Return the bytes per second of all network interfaces of a node, in each direction."""
        measured = self._measured("between_nodes", "send")
        if measured is not None:
            return measured.gbytes_per_second * 1e9 * node.nics
        if node.gbps is None:
            if self.cluster.emulated:
                return self._in_node(node)
            raise BadInput(
                f"cluster '{self.cluster.name}': node '{node.name}' gives no gbps_per_nic, and the plan sends between machines; "
                "add `nics` and `gbps_per_nic` (Gbit/s each) to it."
            )
        rate = node.gbps / 8 * 1e9 / self.cluster.links.between_nodes.oversubscription
        return rate * self.fit["between_nodes_fraction"]

    def _interface(self, node: NodeSpec) -> float:
        """Return the bytes per second of one network interface."""
        return self._cards(node) / node.nics

    # -- collectives

    @memoized
    def broadcast(self, ranks: tuple[int, ...]) -> Link:
        """Return the link from a replica's first rank to its others. It is a ring over all links between them, and over several
        machines as slow as the slowest."""
        first, node, group = self.link(ranks[0], ranks[1]), self.places[ranks[0]].node, self.group(ranks)
        if len(group.machines) > 1:
            return Link(*map(max, zip(*(self.link(ranks[0], other) for other in ranks[1:]), strict=True)))
        pair, ring = self._in_node(node, 2, self.joined(ranks[:2])), self._in_node(node, group.size, group.joined)
        return first._replace(seconds_per_byte=first.seconds_per_byte * pair / ring)

    def reduce_scatter(
        self, group: Group, num_bytes: float, sharing: float = 1, operation: Operation = "reduce_scatter"
    ) -> float:
        """Return the seconds until every rank holds its part of the sum of `num_bytes`. An all-gather takes equally long, and
        so does half of an all-reduce; they only differ in what islands exchange (`operation`).

        In a ring every link carries (n-1)/n of the bytes, in n-1 steps. `sharing` groups like this one are at work on each of
        its machines, and as many on the others of their racks and regions.
        """
        if group.size == 1 or not num_bytes:
            return 0.0
        level = (
            "between_islands" if len(group.islands) > 1 else "between_nodes" if len(group.machines) > 1 else "in_node"
        )
        measured = self._measured(level, "all_reduce")
        nodes = [self.machines[machine] for machine, _ in group.machines]
        part = (group.size - 1) / group.size
        rings = self._rings(group, sharing, measured)
        ring = max([num_bytes * (own.size - 1) / own.size / rate for own, rate in rings])
        if len(rings) > 1:
            ring = max(ring, self._exchange_seconds(group, num_bytes, sharing, measured, operation))
        if measured is not None:
            return measured.latency_seconds / 2 + max(ring, num_bytes * part / (measured.gbytes_per_second * 1e9))
        steps = self._ring_seconds(group)
        latency = self.fit["collective_latency_seconds"] + steps
        if group.most_per_machine > 1 and any(self.node_links(node).hosted(group.joined) for node in nodes):
            latency = self.fit["hosted_latency_seconds"] * log2(group.most_per_machine) + steps
        latency += self.between.latency_of_ring(group)
        if len(group.islands) > 1:
            latency += self.cluster.links.between_islands.latency_seconds
        return latency + ring

    all_gather = reduce_scatter

    def all_reduce(self, group: Group, num_bytes: float, sharing: float = 1) -> float:
        """Return the seconds until every rank holds the sum of `num_bytes`: a reduce-scatter and an all-gather.

        Over machines NCCL's trees were measured to be no faster (benchmarks/collectives.py).
        """
        return 2.0 * self.reduce_scatter(group, num_bytes, sharing, "all_reduce")

    @memoized
    def copied_part(self, group: Group, num_bytes: float) -> float:
        """Return for which fraction of a collective among CPUs their cores copy and sum: the time it would take on one machine.
        A slower link leaves the cores free for the rest."""
        if len(group.machines) == 1:
            return 1.0
        (machine, _), (island, _) = group.machines[0], group.islands[0]
        one_machine = Group(group.size, ((machine, group.size),), ((island, group.size),))
        return min(1.0, self.reduce_scatter(one_machine, num_bytes) / self.reduce_scatter(group, num_bytes))

    def _ring_seconds(self, group: Group) -> float:
        """Return the seconds of the steps of an empty ring. All ranks take each step together, so the longest link counts."""
        step = self.fit["collective_step_seconds"]
        if group.most_per_machine > 1:
            step = max(step, self.cluster.links.in_node.latency_seconds or 0.0)
        if len(group.machines) > 1:
            step = max(step, self.cluster.links.between_nodes.latency_seconds)
        return (group.size - 1) * step

    def _rings(self, group: Group, sharing: float, measured: LinkTiming | None) -> list[tuple[Group, float]]:
        """Return the rings that a group runs, one inside each island, and the bytes per second that each gets."""
        found = self._ring_rates.get((group, sharing))
        if found is None:
            rings = self._by_island(group) if len(group.islands) > 1 else [group]
            found = [(ring, self._ring_rate(ring, sharing, measured)) for ring in rings]
            self._ring_rates[group, sharing] = found
        return found

    def _ring_rate(self, group: Group, sharing: float, measured: LinkTiming | None) -> float:
        """Return the bytes per second that a ring gets on its slowest link."""
        least = 0.0 if measured is None else measured.gbytes_per_second * 1e9
        nodes = [self.machines[machine] for machine, _ in group.machines]
        rates = []
        if group.most_per_machine > 1:
            rates = [
                max(least, self._in_node(node, count, group.joined)) / self._sharing_inside(node, group, sharing)
                for node, (_, count) in zip(nodes, group.machines, strict=True)
                if count > 1
            ]
        if len(nodes) > 1:
            rates += [
                max(least, self.rate(Resource("cards", machine))) / min(sharing, node.accelerators)
                for node, (machine, _) in zip(nodes, group.machines, strict=True)
            ]
            passed = self.between.of_ring(group)
            rates += [self.rate(resource) / (sharing * self.between.like(resource, group)) for resource in passed]
        return min(rates) if rates else max(least, 1e30)

    def _by_island(self, group: Group) -> list[Group]:
        """Return the part of a group on each island. Rings run inside these."""
        machines: dict[str, list[tuple[int, int]]] = {island: [] for island, _ in group.islands}
        for machine in group.machines:
            machines[self.machines[machine[0]].island].append(machine)
        return [
            Group(size, tuple(machines[island]), ((island, size),), joined=group.joined)
            for island, size in group.islands
        ]

    def ring_bytes(self, group: Group, num_bytes: float, operation: Operation) -> dict[Resource, float]:
        """Return the bytes that a collective (for an all-reduce, half of it) sends and receives over each resource that machines
        share."""
        found: dict[Resource, float] = {}
        links = self.cluster.links
        if len(group.islands) > 1:
            wire = "bridge" if links.between_islands.gbps_per_node is not None else "cards"
            for machine, _ in group.machines:
                node = self.machines[machine]
                here = group.exchanged(operation, node.island, machine)
                for way, part in zip((OUT, IN), here, strict=True):
                    if wire == "bridge" or self._has_cards(node):
                        found[Resource(wire, machine, way)] = num_bytes * part
                    if links.staging.per_host_gbytes_per_second is not None:
                        found[Resource("host", machine, way)] = num_bytes * part
            found |= {on: num_bytes * part for on, part in self.between.of_exchange(group, operation).items()}
            for inside in self._by_island(group):
                for resource, carried in self.ring_bytes(inside, num_bytes, operation).items():
                    found[resource] = found.get(resource, 0.0) + carried
        elif len(group.machines) > 1:
            ring = num_bytes * (group.size - 1) / group.size
            found = {Resource("cards", machine, way): ring for machine, _ in group.machines for way in (OUT, IN)}
            found |= dict.fromkeys(self.between.of_ring(group), ring)
        return found

    def rank_bytes(self, group: Group, rank: int, own: Resource, num_bytes: float, operation: Operation) -> float:
        """Return the bytes that a collective (for an all-reduce, half of it) moves over a rank's own staging or port, in its
        direction. All of the group's ranks on a machine count as the one that owns the most."""
        if len(group.islands) > 1:
            place = self.places[rank]
            most = group.exchanged_at_most(operation, place.island, place.machine)
            return num_bytes * most[own.way == IN] if own.kind == "staging" else 0.0
        return num_bytes * (group.size - 1) / group.size if own.kind == "port" and len(group.machines) == 1 else 0.0

    def _has_cards(self, node: NodeSpec) -> bool:
        """Whether what islands exchange uses a node's network interfaces. An emulated node need not have any."""
        return not (self.cluster.emulated and node.gbps is None)

    def _sharing_inside(self, node: NodeSpec, group: Group, sharing: float) -> float:
        """Return how many groups like this one share the links between a node's accelerators.

        Rings that leave a node over PCIe all pass its host; inside, neighbours may sit under switches of their own, and
        NVLink is for each pair alone.
        """
        hosted = len(group.machines) > 1 and self.node_links(node).hosted(group.joined)
        return min(sharing, node.accelerators) if hosted else 1

    def _exchange_seconds(
        self, group: Group, num_bytes: float, sharing: float, measured: LinkTiming | None, operation: Operation
    ) -> float:
        """Return the seconds in which islands exchange partial sums, or what their ranks own. Each rank moves a part of it, in
        both directions at once. It overlaps in chunks with the rings inside the islands."""
        links = self.cluster.links
        least = 0.0 if measured is None else measured.gbytes_per_second * 1e9
        seconds = [num_bytes * self.staged_part(group, operation) / max(least, self.staging_rate)]
        rings = [ring for ring, _ in self._rings(group, sharing, measured) if len(ring.machines) > 1]
        inside = {ring.islands[0][0]: (ring.size - 1) / ring.size for ring in rings}  # which take the same cards
        for machine, _ in group.machines:
            node = self.machines[machine]
            island = node.island
            here = num_bytes * max(group.exchanged(operation, island, machine)) * min(sharing, node.accelerators)
            if links.staging.per_host_gbytes_per_second is not None:
                seconds.append(here / max(least, self.rate(Resource("host", machine))))
            if links.between_islands.gbps_per_node is not None:
                seconds.append(here / max(least, self.rate(Resource("bridge", machine))))
            elif self._has_cards(node):
                here += num_bytes * inside.get(island, 0.0) * min(sharing, node.accelerators)
                seconds.append(here / max(least, self.rate(Resource("cards", machine))))
        return max(*seconds, num_bytes * sharing * self._beyond_machines(group, operation))

    def staged_part(self, group: Group, operation: Operation) -> float:
        """Return which fraction of a collective's bytes passes the staging of the rank that exchanges the most."""
        vendors = [(self.machines[machine].island, machine) for machine, _ in group.machines]
        return max([max(group.exchanged_at_most(operation, *place)) for place in vendors])

    @memoized
    def _beyond_machines(self, group: Group, operation: Operation) -> float:
        """Return the seconds per byte of what islands exchange over racks and regions."""
        passed = self.between.of_exchange(group, operation).items()
        return max([part * self.between.like(on, group) / self.rate(on) for on, part in passed], default=0.0)
