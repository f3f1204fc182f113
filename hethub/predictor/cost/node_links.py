"""The rates of links inside a node, from data sheets and fitted fractions of these: PCIe, dedicated links, copies to the
host."""

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
    """Whether a link of an accelerator is PCIe and goes through the host. Faster ones are dedicated (NVLink, xGMI)."""
    return gbytes_per_second <= pcie_gbytes_per_second(accelerator)


def pcie_gbytes_per_second(accelerator: AcceleratorSpec) -> float:
    """Return what an accelerator's 16 PCIe lanes carry in each direction, by their generation."""
    generation = accelerator.pcie_generation or UNKNOWN_GENERATION
    return PCIE_3_GBYTES_PER_SECOND * 2.0 ** (generation - 3)


def host_gbytes_per_second(
    accelerator: AcceleratorSpec, fit: Mapping[str, float], per_host: float | None = None, at_once: int = 1
) -> float:
    """Return the rate of copies between host memory and an accelerator. It is that of its PCIe, or of its only link if that is
    slower, and at most its part of what the host carries in all (`per_host`, GB/s) if `at_once` of them copy at once.

    Collectives over PCIe reach far less of it (`pcie_fraction`): those pass the host several times.
    """
    wire = min(pcie_gbytes_per_second(accelerator), accelerator.link_gbytes_per_second)
    own = wire * fit["host_copy_fraction"]
    return own if per_host is None else min(own, per_host / max(1, at_once))


@dataclass(frozen=True)
class NodeLinks:
    """The links between a node's accelerators: through a switch, pair by pair, in bridges of a few, or over PCIe. A rate in the
    cluster file replaces that of the data sheet."""

    device: AcceleratorSpec
    given_gbytes_per_second: float | None = None

    def joins(self, places: Iterable[int]) -> bool:
        """Whether links reach from each of these places in a node to each other one."""
        joined = None if self.given_gbytes_per_second else self.device.linked_accelerators
        return joined is None or len({place // joined for place in places}) <= 1

    def hosted(self, joined: bool) -> bool:
        """Whether bytes pass the host. Links between pairs are dedicated, even slow ones."""
        if self.device.peer_gbytes_per_second is not None:
            return False
        return not joined or through_host(self.device, self._sheet)

    def bytes_per_second(self, fit: Mapping[str, float], ranks: int | None = None, joined: bool = True) -> float:
        """Return the bytes per second in each direction between one accelerator and `ranks` - 1 others at once, or all that its
        links reach. `joined` says whether its links reach them."""
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
    """Return the links of each node, by its name. For a machine described as several nodes they are the slowest of these:
    between accelerators that links do not join, or where these are equally slow, between those that they join."""

    def rates(links: NodeLinks) -> list[float]:
        return [links.bytes_per_second(fit, joined=joined) for joined in (False, True)]

    given, found = cluster.links.in_node.gbytes_per_second, dict[str, NodeLinks]()
    for parts in cluster.machine_types:
        slowest = min([NodeLinks(part.device, given) for part in parts], key=rates)
        found |= dict.fromkeys([part.name for part in parts], slowest)
    return found


@dataclass(frozen=True)
class HostCopies:
    """Copies of a layout's state between accelerators and their hosts. Where a host limits them, all accelerators of a machine
    that offload are taken to copy at once. `fit` are the fitted fractions of data sheets."""

    layout: Layout
    fit: Mapping[str, float]

    def seconds_per_byte(self, place: Place) -> float:
        """Return the seconds of one byte between an accelerator and its host, in either direction."""
        return self._seconds_per_byte(place, 1)

    def passing_seconds_per_byte(self, place: Place) -> float:
        """Return the seconds of one byte to an accelerator and one back. On PCIe they pass each other. A host that limits copies
        carries both, and CPUs, which copy themselves, do one after the other."""
        if is_cpu(place.accelerator) and not self.layout.cluster.emulated:
            return 2 * self.seconds_per_byte(place)
        return self._seconds_per_byte(place, 2)

    def beside(self, place: Place, seconds: float, num_bytes: float, batch_bytes: float) -> float:
        """Return the seconds of work on data that comes to an accelerator in batches, each while the one before is stored. The
        first batch is waited for."""
        first = min(num_bytes, batch_bytes)
        rest = (num_bytes - first) * self.passing_seconds_per_byte(place)
        return first * self.seconds_per_byte(place) + max(seconds, rest)

    @cached_property
    def ranks(self) -> Counter[int]:
        """How many ranks of each machine copy something in a step."""
        places = self.layout.cluster.places
        return Counter(places[rank].machine for stage in self.layout.stages if stage.offload for rank in stage.ranks)

    def at_once(self, machines: Iterable[int]) -> int:
        """Return how many ranks copy something on the busiest of these machines, or 0 if no host limits copies."""
        limited = self.layout.cluster.links.staging.per_host_gbytes_per_second is not None
        return max(self.ranks[machine] for machine in machines) if limited else 0

    def _seconds_per_byte(self, place: Place, directions: int) -> float:
        per_host, at_once = self.layout.cluster.links.staging.per_host_gbytes_per_second, self.ranks[place.machine]
        return 1e-9 / host_gbytes_per_second(place.accelerator, self.fit, per_host, directions * at_once)
