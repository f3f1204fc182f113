"""Clusters: nodes of accelerators, the links between them, and the numbering of ranks that follows from their order."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from hethub.spec.accelerator import AcceleratorSpec, Figure, Rate, Vendor, find_accelerator
from hethub.spec.base import Spec, load
from hethub.spec.errors import BrokenRule, suggest
from hethub.spec.network import RelayName, cidr

NonNegative = Annotated[float, Field(ge=0)]
Latency = Annotated[float, Field(ge=0, le=3600)]


def _named_network(text: str) -> str:
    cidr(text)
    return text


def _as_it_is(environment: str) -> str:
    if not environment.startswith("/") or "$" in environment:
        raise ValueError(
            f"'{environment}' is taken as it stands on every machine, no shell expands it; write the whole path, /opt/hethub say."
        )
    return environment


Network = Annotated[str, AfterValidator(_named_network)]
Environment = Annotated[str, AfterValidator(_as_it_is)]
MOST_ACCELERATORS = 1_000_000  # of a cluster: ranks are laid out one by one


def is_host(name: str) -> bool:
    """Whether launchers take it for one machine's name: mpirun lists them as `nv1:8,nv2:8`."""
    return bool(name) and not {*name} & {*" \t\n,:"}


class NodeSpec(Spec):
    """One or `count` equal machines: accelerators of one vendor, network interfaces, host memory."""

    name: str  # of the machine or, with a count, of the group
    count: int = Field(default=1, ge=1)  # equal machines that this entry stands for
    # A machine whose accelerators are of unlike speed: entries in a row that name the same one are its parts.
    part_of: str | None = None
    accelerator: str | AcceleratorSpec  # a name of the catalogue, or a description in place
    accelerators: int = Field(ge=1)  # of one machine; each is a rank (an MI250X has two)
    # Emulates an island: the ranks are of this vendor whatever drives them (two "vendors" on one laptop's CPU).
    vendor: Vendor | None = None
    # Of one machine, for what is offloaded and copies that checkpoints are written from; null: a guess, as much as its
    # accelerators have.
    host_memory_gb: Figure | None = None
    reserved_memory_gb: Annotated[float, Field(ge=0, le=1e9)] = 0.0  # of each accelerator, used by other programs
    nics: int = Field(default=1, ge=1, le=10_000)  # network interfaces of a machine
    # Gbit/s of one interface, each direction; needed where a plan sends between machines.
    gbps_per_nic: Rate | None = None
    network: Network | None = None  # overrides the cluster's CIDR
    environment: Environment | None = None  # the Python environment on this node, for `hethub launch`
    # the machines' host names, for `hethub launch`; None: the name, for one machine
    hosts: tuple[str, ...] | None = None
    # In the catalogue of `hethub size`, of one machine; null: answers count accelerators instead. Nodes of a cluster cost nothing.
    price_per_hour: Annotated[float, Field(ge=0, le=1e12)] | None = None

    @model_validator(mode="after")
    def _accelerator_exists(self) -> "NodeSpec":
        device = self.device
        if self.reserved_memory_gb >= device.memory_gb:
            raise ValueError(
                f"reserved_memory_gb {self.reserved_memory_gb:g} leaves nothing of the {device.memory_gb:g} GiB of {device.name}; "
                "reserve less."
            )
        if self.hosts is None:
            return self
        if len(self.hosts) != self.count:
            raise ValueError(
                f"{len(self.hosts)} hosts for a count of {self.count} machines; name one host per machine."
            )
        if len({*self.hosts}) < self.count or not all(map(is_host, self.hosts)):
            raise ValueError(
                f"hosts are {list(self.hosts)}; give each machine its own name, without spaces, commas or colons."
            )
        return self

    @cached_property
    def device(self) -> AcceleratorSpec:
        """The accelerator in full. Its vendor is who made it, and tells how it computes, whatever island it counts to."""
        return find_accelerator(self.accelerator) if isinstance(self.accelerator, str) else self.accelerator

    @cached_property
    def island(self) -> str:
        """The vendor that its ranks count as: what the node says, else the accelerator's."""
        return self.vendor or self.device.vendor

    @property
    def host_names(self) -> tuple[str, ...] | None:
        """The host names of its machines, if the file says them; for a part of a machine, that machine's name."""
        return (self.part_of,) if self.hosts is None and self.part_of is not None else self.hosts

    @property
    def usable_memory_bytes(self) -> int:
        """Memory of each accelerator in bytes, without what is reserved for others."""
        return self.device.memory_bytes - int(self.reserved_memory_gb * 2**30)

    @property
    def host_memory_bytes(self) -> int:
        """Host memory of one machine in bytes; if the file does not say, as much as its accelerators have: few machines have less."""
        if self.host_memory_gb is None:
            return self.accelerators * self.device.memory_bytes
        return int(self.host_memory_gb * 2**30)

    @property
    def gbps(self) -> float | None:
        """All interfaces of one node together, Gbit/s each direction; None where the file does not say."""
        return None if self.gbps_per_nic is None else self.nics * self.gbps_per_nic


class InNodeLink(Spec):
    """Between accelerators of a node; where empty, the accelerator's own link is taken."""

    gbytes_per_second: Rate | None = None  # each direction; null: the accelerator's own link
    # Of one message; null: a guess of microseconds. `hethub profile` measures it.
    latency_seconds: Latency | None = None


class BetweenNodesLink(Spec):
    """Between nodes of one island, over the nodes' own interfaces."""

    latency_seconds: Latency = 5.0e-6  # of one message, through switches and software
    # what the nodes can send over what the network carries
    oversubscription: Annotated[float, Field(ge=1, le=1e6)] = 1.0


class BetweenIslandsLink(Spec):
    """The bridge; gbps_per_node (Gbit/s) defaults to the node's own interfaces."""

    # Read and without effect: a run takes the job's `communicator.relay`, and predictions price the links alone.
    relay: Literal["auto", RelayName] = "auto"
    gbps_per_node: Figure | None = None  # Gbit/s each direction; null: all of the node's interfaces
    latency_seconds: Latency = 5.0e-5  # of one message over the bridge, host copies included


class RegionsSpec(Spec):
    """Regions of nodes and the links between them: `gbps[a][b]` is shared by all traffic from region a to b."""

    of_node: dict[str, str]  # the region of every node, by the node's name
    names: list[str]  # of the regions, in the order of the matrices
    gbps: list[list[Figure]]  # Gbit/s from region (row) to region (column), shared by all traffic between them
    latency_seconds: list[list[Latency]] | None = None  # the same for seconds of one message; null: none is added

    @model_validator(mode="after")
    def _square(self) -> "RegionsSpec":
        size = len(self.names)
        for key, matrix in (("gbps", self.gbps), ("latency_seconds", self.latency_seconds)):
            if matrix is not None and (lengths := [len(row) for row in matrix]) != [size] * size:
                raise ValueError(
                    f"{key} has rows of {lengths} figures for the regions {self.names}; a matrix between {size} regions has "
                    f"{size} rows of {size} figures."
                )
        if twice := next((name for name in self.names if self.names.count(name) > 1), None):
            raise ValueError(f"two regions are named '{twice}'; give each a name of its own.")
        if unknown := sorted(set(self.of_node.values()) - set(self.names)):
            raise ValueError(f"region {unknown[0]!r} is not among the names {self.names}.")
        return self


_RACKS = ("links", "racks")  # in a cluster file


class RackSpec(Spec):
    """Nodes behind one uplink, which all that leaves or enters the rack shares: `gbps` (Gbit/s) each direction."""

    name: str  # how answers call it
    nodes: tuple[str, ...] = Field(min_length=1)  # names of `nodes` entries, with all their machines
    gbps: Figure  # Gbit/s of the uplink, each direction
    latency_seconds: Latency = 0.0  # that leaving or entering the rack adds to a message


class StagingSpec(Spec):
    """Between an accelerator and the relay in host memory, each direction: of one accelerator, and of a host in all.

    Where the first is missing the predictor takes a guess; where the second is missing hosts do not limit. What ranks
    offload passes the host's memory as well, and shares the second.
    """

    gbytes_per_second: Rate | None = None  # between one accelerator and host memory; null: a guess
    # of all accelerators of a host together, offloading too; null: no limit
    per_host_gbytes_per_second: Figure | None = None


class LinksSpec(Spec):
    """The levels of the network, innermost first."""

    in_node: InNodeLink = Field(default_factory=InNodeLink)
    between_nodes: BetweenNodesLink = Field(default_factory=BetweenNodesLink)
    between_islands: BetweenIslandsLink = Field(default_factory=BetweenIslandsLink)
    staging: StagingSpec = Field(default_factory=StagingSpec)
    # Nodes behind a shared uplink; without any the nodes' own interfaces alone limit.
    racks: tuple[RackSpec, ...] = ()
    # Data centres with slow links between them; null: all nodes are in one.
    regions: RegionsSpec | None = None

    def among(self, names: set[str]) -> "LinksSpec":
        """The links of these nodes alone: without the racks, and the nodes of racks, that are not there."""
        there = [(rack, tuple(name for name in rack.nodes if name in names)) for rack in self.racks]
        return self.replace(racks=tuple(rack.replace(nodes=nodes) for rack, nodes in there if nodes))

    def place_of(self, node: str) -> dict[str, str | None]:
        """A node's rack and region."""
        rack = next((rack.name for rack in self.racks if node in rack.nodes), None)
        return {"rack": rack, "region": self.regions.of_node.get(node) if self.regions else None}

    def check_names(self, names: list[str]) -> None:
        """Raises BrokenRule where racks and regions do not fit nodes of these names."""
        rack_of: dict[str, str] = {}
        if twice := [rack.name for rack in self.racks if [r.name for r in self.racks].count(rack.name) > 1]:
            raise BrokenRule(f"two racks are named '{twice[0]}' in links.racks; give each a name of its own.", *_RACKS)
        for rack in self.racks:
            for name in rack.nodes:
                if name not in names:
                    raise BrokenRule(
                        f"rack '{rack.name}' holds node '{name}', which is not among nodes: {suggest(name, names)}",
                        *_RACKS,
                    )
                if name in rack_of:
                    raise BrokenRule(
                        f"node '{name}' is in rack '{rack_of[name]}' and in rack '{rack.name}'; a node has one uplink: name it once.",
                        *_RACKS,
                    )
                rack_of[name] = rack.name
        if self.regions and (missing := [name for name in names if name not in self.regions.of_node]):
            raise BrokenRule(
                f"node '{missing[0]}' has no region in links.regions.of_node; name its region there.",
                "links",
                "regions",
            )


class Place(NamedTuple):
    """Where a rank is: machine (0-based over all nodes), position in it, and its node type."""

    rank: int
    machine: int
    local: int
    node: NodeSpec

    @property
    def accelerator(self) -> AcceleratorSpec:
        return self.node.device

    @property
    def island(self) -> str:
        return self.node.island


class ClusterSpec(Spec):
    """Nodes in order; ranks are numbered through them, so node order is rank order."""

    name: str  # what plans call it
    emulated: bool = False  # CPU ranks stand in for its accelerators, at their pace
    network: Network | None = None  # a CIDR, in which each rank finds its interface
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)  # in the order in which the launcher numbers the ranks
    links: LinksSpec = Field(default_factory=LinksSpec)

    @model_validator(mode="after")
    def _names_once(self) -> "ClusterSpec":
        names = [node.name for node in self.nodes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BrokenRule(
                f"two nodes are named '{twice[0]}'; equal machines are one entry with a count, others need their own name.",
                *("nodes", len(names) - 1 - names[::-1].index(twice[0])),
            )
        known: dict[str, NodeSpec] = {}
        for place, node in enumerate(self.nodes):
            first = known.setdefault(node.device.name, node)
            if unlike := _unlike_figures(first.device, node.device):
                raise BrokenRule(
                    f"nodes '{first.name}' and '{node.name}' both have an accelerator named '{node.device.name}', but of unlike "
                    f"{', '.join(unlike)}; give the one that is not the catalogue's a name of its own.",
                    *("nodes", place),
                )
        for parts in self.machine_types:
            figures = [
                {key: getattr(part, key) for key in _OF_MACHINES} | self.links.place_of(part.name) for part in parts
            ]
            unlike = [key for key, value in figures[0].items() if any(other[key] != value for other in figures)]
            if unlike or (parts[0].part_of is not None and parts[0].count > 1):
                wrong = f"differ in {', '.join(unlike)}" if unlike else "have a count above 1"
                raise BrokenRule(
                    f"entries that are part_of '{parts[0].part_of}' are one machine, but {wrong}; give them a count of 1, one "
                    "vendor, and the same host, interfaces, host memory, rack and region.",
                    *("nodes", self.nodes.index(parts[-1])),
                )
        boxes = [parts[0].part_of for parts in self.machine_types]
        if apart := next((box for box in boxes if box is not None and boxes.count(box) > 1), None):
            raise BrokenRule(
                f"entries that are part_of '{apart}' stand apart, as those of two machines; put the parts of one in a row.",
                "nodes",
            )
        self.links.check_names(names)
        if self.size > MOST_ACCELERATORS:
            raise BrokenRule(
                f"count x accelerators of the nodes is {self.size:,} accelerators; hethub plans {MOST_ACCELERATORS:,} at most.",
                "nodes",
            )
        return self

    @cached_property
    def machines(self) -> tuple[NodeSpec, ...]:
        """The node type of every machine; of one that is in parts its first, with the accelerators of all."""
        return tuple(
            parts[0] if len(parts) == 1 else parts[0].unchecked(accelerators=sum(part.accelerators for part in parts))
            for parts in self._by_machine
        )

    @cached_property
    def machine_types(self) -> tuple[tuple[NodeSpec, ...], ...]:
        """The entries of every sort of machine: the one that stands for some, or the parts of one."""
        found: list[tuple[NodeSpec, ...]] = []
        for node in self.nodes:
            if found and node.part_of is not None and node.part_of == found[-1][0].part_of:
                found[-1] += (node,)
            else:
                found.append((node,))
        return tuple(found)

    @property
    def _by_machine(self) -> Iterator[tuple[NodeSpec, ...]]:
        """The entries of every machine."""
        return (parts for parts in self.machine_types for _ in range(parts[0].count))

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """One entry per rank, in rank order."""
        slots = []
        for machine, parts in enumerate(self._by_machine):
            nodes = [part for part in parts for _ in range(part.accelerators)]
            slots += [(machine, local, node) for local, node in enumerate(nodes)]
        return tuple(Place(rank, *slot) for rank, slot in enumerate(slots))

    @property
    def size(self) -> int:
        """Number of accelerators, which is the number of ranks."""
        return sum(node.count * node.accelerators for node in self.nodes)

    def network_of(self, rank: int) -> str | None:
        """The CIDR in which this rank's node listens: the node's own, else the cluster's. Emulated ranks are not in it."""
        if self.emulated:
            return None
        own = self.places[rank].node.network if rank < self.size else None
        return own or self.network

    @cached_property
    def islands(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each island by its vendor, in order of first appearance."""
        islands: dict[str, list[int]] = {}
        for place in self.places:
            islands.setdefault(place.island, []).append(place.rank)
        return {vendor: tuple(ranks) for vendor, ranks in islands.items()}


# What the parts of a machine have in common.
_OF_MACHINES = ("count", "island", "hosts", "nics", "gbps_per_nic", "host_memory_gb")


def _unlike_figures(one: AcceleratorSpec, other: AcceleratorSpec) -> list[str]:
    """The keys in which two accelerators differ, beside who made them and where that is said."""
    if one is other:
        return []
    a, b = one.to_dict(), other.to_dict()
    return [key for key in {**a, **b} if key not in ("vendor", "source") and a.get(key) != b.get(key)]


def load_cluster(path: str | Path) -> ClusterSpec:
    """The cluster described in a YAML file. Raises BadInput."""
    return load(ClusterSpec, path, "cluster file")
