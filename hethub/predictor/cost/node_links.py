"""Rates of links inside a node, by data sheets and the fitted fractions of them: PCIe, dedicated links, host copies."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hethub.predictor.cost.constants import is_cpu
from hethub.spec.accelerator import AcceleratorSpec
from hethub.spec.cluster import ClusterSpec, Place
from hethub.spec.layout.bind import Layout

PCIE_3_GBYTES_PER_SECOND = 16  # of 16 lanes, each direction; every generation doubles it
UNKNOWN_GENERATION = 5


def through_host(accelerator: AcceleratorSpec, gbytes_per_second: float) -> bool:
    """Whether a link of an accelerator is PCIe, through the host; faster ones are dedicated (NVLink, xGMI)."""
    return gbytes_per_second <= pcie_gbytes_per_second(accelerator)


def pcie_gbytes_per_second(accelerator: AcceleratorSpec) -> float:
    """What an accelerator's 16 lanes carry each direction, by their generation."""
    generation = accelerator.pcie_generation or UNKNOWN_GENERATION
    return PCIE_3_GBYTES_PER_SECOND * 2.0 ** (generation - 3)


def host_gbytes_per_second(
    accelerator: AcceleratorSpec, fit: Mapping[str, float], per_host: float | None = None, at_once: int = 1
) -> float:
    """What copies between host memory and an accelerator reach: its PCIe, or its only link where that is slower; no more
    than its part of what the host carries in all (`per_host`, GB/s) where so many copy at once.

    Collectives over PCIe reach far less of it (`pcie_fraction`): those pass the host several times.
    """
    wire = min(pcie_gbytes_per_second(accelerator), accelerator.link_gbytes_per_second)
    own = wire * fit["host_copy_fraction"]
    return own if per_host is None else min(own, per_host / max(1, at_once))


@dataclass(frozen=True)
class NodeLinks:
    """The links between a node's accelerators: through a switch, pair by pair, in bridges of a few, or over PCIe. What a
    cluster file gives stands for the data sheet's link."""

    device: AcceleratorSpec
    given_gbytes_per_second: float | None = None

    def joins(self, places: Iterable[int]) -> bool:
        """Whether the link reaches from each of these places in a node to each other."""
        joined = None if self.given_gbytes_per_second else self.device.linked_accelerators
        return joined is None or len({place // joined for place in places}) <= 1

    def hosted(self, joined: bool) -> bool:
        """Whether bytes pass the host. Links pair by pair are dedicated, however slow one is."""
        if self.device.peer_gbytes_per_second is not None:
            return False
        return not joined or through_host(self.device, self._sheet)

    def bytes_per_second(self, fit: Mapping[str, float], ranks: int | None = None, joined: bool = True) -> float:
        """Of one accelerator to `ranks` - 1 others at once, each direction, or to all that its links reach. `joined`
        tells whether its link reaches them."""
        sheet, peer = self._sheet, self.device.peer_gbytes_per_second
        if not joined:
            sheet = min(sheet, pcie_gbytes_per_second(self.device))
        elif ranks is not None and peer is not None:
            sheet = min(sheet, (ranks - 1) * peer)
        return sheet * 1e9 * fit["pcie_fraction" if self.hosted(joined) else "in_node_fraction"]

    @property
    def _sheet(self) -> float:
        return self.given_gbytes_per_second or self.device.link_gbytes_per_second


def by_node(cluster: ClusterSpec, fit: Mapping[str, float]) -> dict[str, NodeLinks]:
    """The links of each node, by its name; of a machine in parts those of the slowest, between accelerators that they do
    not join, or if these are equally slow, that they do."""

    def rates(links: NodeLinks) -> list[float]:
        return [links.bytes_per_second(fit, joined=joined) for joined in (False, True)]

    given, found = cluster.links.in_node.gbytes_per_second, dict[str, NodeLinks]()
    for parts in cluster.machine_types:
        slowest = min([NodeLinks(part.device, given) for part in parts], key=rates)
        found |= dict.fromkeys([part.name for part in parts], slowest)
    return found


@dataclass(frozen=True)
class HostCopies:
    """Copies of a layout's state between accelerators and their hosts; where hosts limit, all of a machine that offload
    copy at once. `fit` are the fitted fractions of data sheets."""

    layout: Layout
    fit: Mapping[str, float]

    def seconds_per_byte(self, place: Place) -> float:
        """Of one byte between an accelerator and its host, either way."""
        return self._seconds_per_byte(place, 1)

    def passing_seconds_per_byte(self, place: Place) -> float:
        """Of one byte to an accelerator and one back, which pass each other on PCIe: a host that limits carries both, and
        CPUs that copy themselves do it one after the other."""
        if is_cpu(place.accelerator) and not self.layout.cluster.emulated:
            return 2 * self.seconds_per_byte(place)
        return self._seconds_per_byte(place, 2)

    def beside(self, place: Place, seconds: float, num_bytes: float, batch_bytes: float) -> float:
        """Seconds of work on what comes to an accelerator batch by batch while the one before is stored: the first is waited
        for."""
        first = min(num_bytes, batch_bytes)
        rest = (num_bytes - first) * self.passing_seconds_per_byte(place)
        return first * self.seconds_per_byte(place) + max(seconds, rest)

    @cached_property
    def ranks(self) -> Counter[int]:
        """By machine, how many of its ranks copy something in a step."""
        places = self.layout.cluster.places
        return Counter(places[rank].machine for stage in self.layout.stages if stage.offload for rank in stage.ranks)

    def at_once(self, machines: Iterable[int]) -> int:
        """How many of them copy something on the busiest of these machines, where hosts limit what they copy."""
        limited = self.layout.cluster.links.staging.per_host_gbytes_per_second is not None
        return max(self.ranks[machine] for machine in machines) if limited else 0

    def _seconds_per_byte(self, place: Place, directions: int) -> float:
        per_host, at_once = self.layout.cluster.links.staging.per_host_gbytes_per_second, self.ranks[place.machine]
        return 1e-9 / host_gbytes_per_second(place.accelerator, self.fit, per_host, directions * at_once)
