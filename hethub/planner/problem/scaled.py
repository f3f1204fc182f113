"""Clusters and measurements with some of their figures scaled: what binds a plan, and how it holds when figures were wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log2

from hethub.planner.problem.problem import Problem
from hethub.predictor.cost.constants import packaged
from hethub.predictor.cost.node_links import UNKNOWN_GENERATION, through_host
from hethub.predictor.cost.profile import DeviceProfile, LinkTiming, ProfileSpec
from hethub.spec.accelerator import AcceleratorSpec
from hethub.spec.cluster import ClusterSpec, NodeSpec


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Factors on a cluster's figures; `compute` is by accelerator name, `network` of all between nodes, `bridge` of
    staging and of what is given for the bridge alone: where nothing is, its bytes take the nodes' interfaces."""

    compute: Mapping[str, float] = field(default_factory=dict)
    memory: float = 1.0
    in_node: float = 1.0
    network: float = 1.0
    bridge: float = 1.0


def scaled_problem(problem: Problem, scale: Scale) -> Problem:
    """The question where the cluster, and what was measured of it, has every figure times its factor."""
    on = problem.on(scaled(problem.cluster, scale))
    return replace(on, profile=problem.profile and scaled_profile(problem.profile, scale))


def scaled_profile(profile: ProfileSpec, scale: Scale) -> ProfileSpec:
    """The measurements of the scaled cluster: they count instead of its figures, which would be scaled to no effect."""
    return profile.unchecked(
        devices=tuple(_measured(device, scale.compute.get(device.accelerator, 1.0)) for device in profile.devices),
        links=tuple(_faster(link, scale) for link in profile.links),
    )


def _measured(device: DeviceProfile, compute: float) -> DeviceProfile:
    """An optimizer that was not measured goes by the accelerator's figures, which are scaled themselves."""
    estimated = device.optimizer_seconds_per_parameter is None
    return device.slower(1.0 / compute, optimizer=1.0 if estimated else None)


def _faster(link: LinkTiming, scale: Scale) -> LinkTiming:
    factor = {"in_node": scale.in_node, "between_nodes": scale.network, "between_islands": scale.bridge}[link.level]
    return link.unchecked(gbytes_per_second=link.gbytes_per_second * factor)


RATES = [name for name in AcceleratorSpec.model_fields if name.endswith("_tflops")]


def scaled(cluster: ClusterSpec, scale: Scale) -> ClusterSpec:
    """The cluster with every figure times its factor; names stay, so plans still belong to it."""
    links = cluster.links
    inside = links.in_node.gbytes_per_second
    bridge = links.between_islands.gbps_per_node
    staged, hosts = links.staging.gbytes_per_second, links.staging.per_host_gbytes_per_second
    regions = links.regions
    changed = links.unchecked(
        in_node=links.in_node.unchecked(gbytes_per_second=inside and inside * scale.in_node),
        between_islands=links.between_islands.unchecked(gbps_per_node=bridge and bridge * scale.bridge),
        staging=links.staging.unchecked(
            gbytes_per_second=(staged or packaged().links["host_staged_gbytes_per_second"]) * scale.bridge,
            per_host_gbytes_per_second=hosts and hosts * scale.bridge,
        ),
        racks=tuple(rack.unchecked(gbps=rack.gbps * scale.network) for rack in links.racks),
        regions=regions and regions.unchecked(gbps=[[gbps * scale.network for gbps in row] for row in regions.gbps]),
    )
    return cluster.unchecked(nodes=tuple(_node(node, scale, inside) for node in cluster.nodes), links=changed)


def _node(node: NodeSpec, scale: Scale, inside: float | None) -> NodeSpec:
    device = node.device
    peer = device.peer_gbytes_per_second
    compute = scale.compute.get(device.name, 1.0)
    rates = {key: value * compute for key in RATES if (value := getattr(device, key)) is not None}
    accelerator = device.unchecked(
        memory_gb=device.memory_gb * scale.memory,
        memory_gbytes_per_second=device.memory_gbytes_per_second * compute,
        link_gbytes_per_second=device.link_gbytes_per_second * scale.in_node,
        peer_gbytes_per_second=peer and peer * scale.in_node,
        pcie_generation=_pcie(device, inside or device.link_gbytes_per_second, scale.in_node),
        **rates,
    )
    return node.unchecked(accelerator=accelerator, gbps_per_nic=node.gbps_per_nic and node.gbps_per_nic * scale.network)


def _pcie(device: AcceleratorSpec, link: float, factor: float) -> float | None:
    """The generation, scaled with the link where that alone would make PCIe of a dedicated link, or the other way round:
    their fitted fractions differ by more than any factor here."""
    if through_host(device, link) == through_host(device, link * factor):
        return device.pcie_generation
    return (device.pcie_generation or UNKNOWN_GENERATION) + log2(factor) + 1e-9  # a rounding above the link
