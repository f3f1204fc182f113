"""The network of an emulated cluster, from its description: what every message and collective takes of it."""

from collections.abc import Sequence

from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.groups import UNEVEN, Operation
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.resources import Link
from hethub.runtime.emulate.network import Transfer
from hethub.spec.cluster import ClusterSpec

_OF_RANKS = ("rank", "staging")


class ClusterNetwork:
    """A cluster's links as interfaces that messages take one after the other.

    Per machine its network interfaces, per machine and per rank one way out and one way in: for the bridge; for a rank's
    staging, and for the links inside the node. Collectives take all interfaces of their machines and ranks, messages one of
    each end. Between islands both take the ranks' staging alone where that is the slowest; else messages take the bridge,
    and collectives all that is on their way.
    """

    def __init__(self, cluster: ClusterSpec, profile: ProfileSpec | None = None) -> None:
        self._network, self._places = Network(cluster, packaged(), profile), cluster.places
        self._slots: dict[tuple[str, int, str], tuple[int, ...]] = {}
        self.num_interfaces = 0
        for machine, node in enumerate(cluster.machines):
            self._add("nic", machine, node.nics)
            self._add("bridge", machine, 1)
        for place in self._places:
            self._add("rank", place.rank, 1)
            self._add("staging", place.rank, 1)

    def _add(self, kind: str, owner: int, count: int) -> None:
        for direction in ("out", "in"):
            self._slots[kind, owner, direction] = tuple(range(self.num_interfaces, self.num_interfaces + count))
            self.num_interfaces += count

    def message(self, source: int, target: int, num_bytes: int) -> Transfer:
        """A message between two ranks: one interface out at the sender, one in at the receiver."""
        return self._on_its_way(source, target, num_bytes, self._network.link(source, target))

    def _on_its_way(self, source: int, target: int, num_bytes: int, link: Link) -> Transfer:
        a, b = self._places[source], self._places[target]
        kind = "rank" if a.machine == b.machine else "nic"
        if a.island != b.island:
            staged = link.seconds_per_byte * self._network.staging_rate <= 1.0 + 1e-9
            kind = "staging" if staged else "bridge"
        ends = (source, target) if kind in _OF_RANKS else (a.machine, b.machine)
        interfaces = (self._slots[kind, ends[0], "out"], self._slots[kind, ends[1], "in"])
        return Transfer(num_bytes * link.seconds_per_byte, link.latency_seconds, interfaces)

    def collective(self, name: str, ranks: Sequence[int], num_bytes: int, parts: Sequence[int] = ()) -> Transfer:
        """A collective on all interfaces its members have; what else these carry comes before or after."""
        if len(ranks) == 1 or not num_bytes:
            return Transfer(0.0, 0.0, ())
        if name == "broadcast":
            return self._on_its_way(ranks[0], ranks[1], num_bytes, self._network.broadcast(tuple(ranks)))
        group = self._network.group(ranks, dict(zip(ranks, parts, strict=True)) if parts else None)
        operation: Operation = "all_reduce" if name.startswith("all_reduce") else "reduce_scatter"
        is_even = not parts or max(parts) - min(parts) < len(parts)  # but for what cannot be divided
        times = (2 if operation == "all_reduce" else 1) * (1.0 if is_even else UNEVEN)  # an all-reduce is two of them
        whole = times * self._network.reduce_scatter(group, num_bytes, operation=operation)
        latency = min(whole, times * self._network.reduce_scatter(group, 1e-6, operation=operation))
        machines = [machine for machine, _ in group.machines]
        kinds = {"nic"} if len(machines) > 1 else {"rank"}
        if len(group.islands) > 1:
            most = times * num_bytes * self._network.staged_part(group, operation)
            staged = whole - latency <= (1.0 + 1e-9) * most / self._network.staging_rate
            kinds = {"staging"} if staged else {"bridge", "staging", "nic"}
        slots = [
            self._slots[kind, owner, way]
            for kind in kinds
            for owner in (ranks if kind in _OF_RANKS else machines)
            for way in ("out", "in")
        ]
        return Transfer(whole - latency, latency, tuple((slot,) for own in slots for slot in own))
