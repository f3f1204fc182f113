"""Which ranks of one accelerator are of unlike speed: they are planned as device types of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, product
from statistics import median

import torch

import hethub
from hethub.predictor.cost.profile import DeviceProfile, ProfileSpec, smallest_micro_batch
from hethub.spec.cluster import ClusterSpec, Place
from hethub.spec.job import ConstraintsSpec
from hethub.spec.model import ModelSpec

UNLIKE = 1.15  # ranks of one accelerator that differ by more are planned as two device types
MARK = "~"  # in the name of an accelerator that measured itself slower than others of its device type
SLOW_MARK = "!"  # of one that turned out slower in training


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the ranks found: the cluster with unlike ranks told apart, their profile, and a line about each rank."""

    cluster: ClusterSpec
    profile: ProfileSpec
    lines: list[str]


def combine(model: ModelSpec, cluster: ClusterSpec, curves: Sequence[DeviceProfile], *, fresh: bool) -> Measured:
    """One profile of all ranks' curves; ranks of one accelerator whose speeds differ become device types of
    their own.

    Of alike ranks the slowest curve counts, and the smallest of their largest micro-batches.
    """
    speeds = seconds_per_sample(cluster.places, curves)
    told = tell_apart(cluster, speed_classes(cluster.places, speeds))
    slowest: dict[str, DeviceProfile] = {}
    for place in sorted(told.places, key=lambda place: speeds[place.rank]):
        name = place.accelerator.name
        slowest[name] = curves[place.rank].replace(accelerator=name)
    alike: dict[str, list[DeviceProfile]] = {name: [] for name in slowest}
    for place, curve in zip(told.places, curves, strict=True):
        alike[place.accelerator.name].append(curve)
    profile = ProfileSpec(
        date="", hethub=hethub.__version__, software=f"torch {torch.__version__}", model=model,
        devices=tuple(
            own.replace(largest_micro_batch=smallest_micro_batch(alike[name])) for name, own in slowest.items()
        ),
    )  # fmt: skip
    how = "measured itself" if fresh else "remembers"
    lines = [
        f"rank {place.rank} ({place.accelerator.name}) {how}: {1e3 * speeds[place.rank]:.3g} ms a layer and sample, "
        + (
            f"largest micro-batch {curve.largest_micro_batch}"
            if curve.largest_micro_batch
            else "no room for the whole model"
        )
        + _beside_others(place)
        for place, curve in zip(told.places, curves, strict=True)
    ]
    return Measured(cluster=told, profile=profile, lines=lines)


def _beside_others(place: Place) -> str:
    name, mark, _ = place.accelerator.name.partition(MARK)
    return f", slower than others of {name}" if mark else ""


def seconds_per_sample(places: Sequence[Place], curves: Sequence[DeviceProfile]) -> list[float]:
    """Return for each rank the seconds of a layer and a sample: the median over the micro-batches that all ranks of its
    accelerator have measured. With only one of these, or the best one, a rank that had a shared core to itself for a moment
    would look twice as fast."""
    of_size = [
        {
            timing.micro_batch: (timing.forward_seconds + timing.backward_seconds) / timing.micro_batch
            for timing in curve.layers
            if timing.tp == 1
        }
        for curve in curves
    ]
    sizes: dict[str, set[int]] = {}
    for place, own in zip(places, of_size, strict=True):
        sizes[place.accelerator.name] = sizes.get(place.accelerator.name, {*own}) & {*own}
    return [
        median(own[size] for size in sizes[place.accelerator.name]) for place, own in zip(places, of_size, strict=True)
    ]


def speed_classes(places: Sequence[Place], speeds: Sequence[float]) -> list[int]:
    """Return for each rank which of the different speeds of its accelerator it has; 0 is the fastest. `speeds` are seconds by
    rank."""
    result = [0] * len(places)
    for name in {place.accelerator.name for place in places}:
        own = sorted((speeds[p.rank], p.rank) for p in places if p.accelerator.name == name)
        number, first = 0, own[0][0]
        for seconds, rank in own:
            if seconds > UNLIKE * first:
                number, first = number + 1, seconds
            result[rank] = number
    return result


def tell_apart_as(cluster: ClusterSpec, before: ClusterSpec) -> ClusterSpec:
    """The cluster, its ranks told apart as they were `before`; as it is where that has other accelerators."""
    names = [place.accelerator.name.partition(MARK) for place in before.places]
    if [name for name, _, _ in names] != [place.accelerator.name for place in cluster.places]:
        return cluster
    return tell_apart(cluster, [int(number or 0) for _, _, number in names])


def tell_apart(cluster: ClusterSpec, classes: Sequence[int], mark: str = MARK) -> ClusterSpec:
    """The cluster in which ranks of class 1 and up have accelerators of other names; the order of ranks stays, and which of
    them share a machine."""
    if not any(classes):
        return cluster
    nodes = []
    for (machine, number), group in groupby(cluster.places, key=lambda place: (place.machine, classes[place.rank])):
        places = list(group)
        node, device = places[0].node, places[0].node.device
        name = device.name if number == 0 else f"{device.name}{mark}{number}"
        box = node.part_of or f"{node.name}-{machine}"  # a machine may be in parts already
        nodes.append(
            node.replace(
                name=f"{box}-{places[0].local}", count=1, accelerators=len(places), hosts=None,
                accelerator=device.replace(name=name), part_of=box,
            )
        )  # fmt: skip
    links = cluster.links
    split = ClusterSpec(name="split", nodes=tuple(nodes))
    parts: dict[str, dict[str, None]] = {}  # of each node as it was named, in order
    for place, part in zip(cluster.places, split.places, strict=True):
        parts.setdefault(place.node.name, {})[part.node.name] = None
    if links.regions is not None:
        of_node = {part: region for name, region in links.regions.of_node.items() for part in parts.get(name, {})}
        links = links.replace(regions=links.regions.replace(of_node=of_node))
    racks = (rack.replace(nodes=tuple(part for name in rack.nodes for part in parts[name])) for rack in links.racks)
    links = links.replace(racks=tuple(racks))
    return cluster.replace(nodes=tuple(nodes), links=links)


def keep_forbidden(constraints: ConstraintsSpec, cluster: ClusterSpec) -> ConstraintsSpec:
    """The constraints, with what they forbid of an accelerator forbidden of all in the cluster that were told apart from it."""
    names = dict.fromkeys(node.device.name for node in cluster.nodes)

    def told_apart(name: str) -> list[str]:
        return [each for each in names if each.partition(MARK)[0].partition(SLOW_MARK)[0] == name] or [name]

    pairs = (product(told_apart(one), told_apart(other)) for one, other in constraints.forbid)
    return constraints.replace(forbid=tuple(chain.from_iterable(pairs)))
