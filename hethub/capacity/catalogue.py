"""The node types that can be had: how many of each, their prices, and what goodput and energy are assumed to rest on.

Nodes owned cost nothing; prices come from the user's catalogue and are never invented.
"""

import datetime
from math import sqrt
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from hethub.spec.base import Spec, build, load
from hethub.spec.cluster import ClusterSpec, LinksSpec, NodeSpec
from hethub.spec.documents import Source


class Assumptions(Spec):
    """What goodput and energy rest on; printed with every answer, for none of it is measured.

    A catalogue states its own under the same names.
    """

    node_mtbf_hours: Annotated[float, Field(ge=1e-3, le=1e12)] = 20000.0  # mean time between failures of one node
    checkpoint_seconds: Annotated[float, Field(ge=0, le=1e9)] = 30.0  # that writing one holds training up
    restart_seconds: Annotated[float, Field(ge=0, le=1e9)] = 600.0  # from a failure to the next step
    idle_power_fraction: float = Field(default=0.35, ge=0, le=1)  # of rated power, drawn while waiting
    # hosts, network and cooling on top of the accelerators
    node_overhead_power_fraction: Annotated[float, Field(ge=0, le=100)] = 0.25

    def efficiency(self, num_nodes: int) -> float:
        """The part of the time that trains: checkpoints at Young's interval, lost work and restarts (Young 1974)."""
        mtbf = self.node_mtbf_hours * 3600.0 / num_nodes
        every = sqrt(2.0 * max(self.checkpoint_seconds, 1e-3) * mtbf)
        lost = self.checkpoint_seconds / every + (every / 2.0 + self.restart_seconds) / mtbf
        return max(0.0, 1.0 - lost)

    def watts(self, cluster: ClusterSpec, busy_fraction: float) -> float | None:
        """Mean power of a cluster; None where an accelerator's rated power is unknown."""
        total = 0.0
        for node in cluster.nodes:
            if node.device.tdp_watts is None:
                return None
            total += node.count * node.accelerators * node.device.tdp_watts
        used = self.idle_power_fraction + (1.0 - self.idle_power_fraction) * busy_fraction
        return total * used * (1.0 + self.node_overhead_power_fraction)


class CatalogueSpec(Spec):
    """Node types that can be had: `count` of each is how many there are, prices per node and hour in one currency."""

    currency: str | None = None  # of all prices, EUR for example; must be given beside prices
    date: str | datetime.date | None = None  # of the prices, which must be given beside them too
    # Node types as in a cluster file; `count`: how many can be had, `price_per_hour`: of one.
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)
    links: LinksSpec = LinksSpec()
    assumptions: Assumptions = Assumptions()

    @model_validator(mode="after")
    def _prices_have_a_currency(self) -> "CatalogueSpec":
        priced = [node.name for node in self.nodes if node.price_per_hour is not None]
        if priced and not (self.currency and self.date):
            raise ValueError(
                f"node '{priced[0]}' has a price_per_hour; say its currency and the date of the prices too."
            )
        names = [node.name for node in self.nodes]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two node types are named '{twice}'; give each its own name.")
        self.links.check_names(names)
        return self


def load_catalogue(path: str | Path) -> CatalogueSpec:
    """The catalogue in a YAML file. Raises BadInput."""
    return load(CatalogueSpec, path, "catalogue")


def cluster_of(catalogue: CatalogueSpec, counts: dict[str, int], have: ClusterSpec | None) -> ClusterSpec:
    """The owned nodes and `counts` of the catalogue's, as one cluster. Raises BadInput where they do not make one."""
    owned = list(have.nodes) if have else []
    taken = {node.name for node in owned}
    rented = [
        node.replace(
            count=counts[node.name],
            hosts=None,  # of as many machines as there are
            name=f"{node.name} (rented)" if node.name in taken else node.name,
        )
        for node in catalogue.nodes
        if counts.get(node.name)
    ]
    name = have.name if have and not rented else "capacity"
    links = have.links if have else catalogue.links.among({node.name for node in rented})
    beside = f" beside those of cluster '{have.name}' (--have), whose links count for all" if have else ""
    whose = f"the nodes of the catalogue{beside}"
    emulated = have is not None and have.emulated
    data = {"name": name, "emulated": emulated, "nodes": owned + rented, "links": links}
    return build(ClusterSpec, data, Source(whose), "cluster")
