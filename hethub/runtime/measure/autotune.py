"""Ranks measure themselves before a plan is made (Poplar, arXiv 2408.12596): the largest batch, and the time of every
size.

Nothing is tried that an extrapolation of what was counted so far does not expect to fit, so the edge of memory is found
without falling over it. What a rank measured is kept in a cache folder, for its device, model and versions.
"""

import json
import os
import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import hethub
from hethub.communicator import Rendezvous
from hethub.kernels.device import Device
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.profile import DeviceProfile, LinkTiming, ProfileSpec, smallest_micro_batch
from hethub.runtime.launch.consensus import all_gather, consensus
from hethub.runtime.measure.profiler import build_bench_stage, measure_device
from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.model.layers import TokenLayout
from hethub.spec.accelerator import AcceleratorSpec
from hethub.spec.cluster import ClusterSpec, Place
from hethub.spec.errors import BadInput
from hethub.spec.job import Job, TrainSpec
from hethub.spec.layout.tensors import tp_degrees
from hethub.spec.model import ModelSpec

SECONDS_PER_POINT = 0.1
MOST_SAMPLES = 256  # in a micro-batch: beyond, time per sample no longer falls
UNLIKE = 1.15  # ranks of one accelerator that differ by more are planned as two kinds
MEASURING_SECONDS = 1800.0  # how long ranks wait for each other's measurements


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the ranks found: the cluster with unlike ranks told apart, their profile, and a line about each rank."""

    cluster: ClusterSpec
    profile: ProfileSpec
    lines: list[str]


def measure_ranks(job: Job, device: Device, meeting: Rendezvous, cluster: ClusterSpec) -> Measured:
    """What every rank measured of itself, or remembers; the same on every rank. Raises BadInput."""
    cache = Cache(job.model, job.spec.train, device, meeting.local_rank)
    known = consensus(meeting, "measurements", cache.load)
    remembered = all_gather(meeting, "remembered measurements", known is not None)
    unsaved = None
    if not all(remembered):
        all_gather(meeting, "start of measuring", None)  # all at once, as they will compute
        accelerator = cluster.places[meeting.rank].accelerator
        free = device.free_memory_bytes()
        limit = int((accelerator.memory_bytes if free is None else free) * (1.0 - job.spec.constraints.reserve))
        known = consensus(
            meeting,
            "own measurements",
            lambda: measure_rank(job.model, job.spec.train, accelerator, device, limit, meeting.size),
            patience_seconds=MEASURING_SECONDS,
        )
        unsaved = cache.save(known)
    assert known is not None
    rows = all_gather(meeting, "curves", {"curve": known.to_dict(), "unsaved": unsaved})
    curves = [DeviceProfile.model_validate(row["curve"]) for row in rows]
    found = combine(job.model, cluster, curves, fresh=not all(remembered))
    warnings = dict.fromkeys(f"warning: {row['unsaved']}" for row in rows if row["unsaved"])
    return replace(found, lines=[*found.lines, *warnings])


def measure_rank(
    model: ModelSpec, train: TrainSpec, accelerator: AcceleratorSpec, device: Device, limit_bytes: int, num_ranks: int
) -> DeviceProfile:
    """This rank's largest micro-batch and its times for sizes up to it; without a largest one where not even one sample
    fits with the whole model, so that a plan which divides the model is not held to it. Raises BadInput."""
    most = min(train.global_batch, MOST_SAMPLES)
    state = resident_bytes(model, train, num_ranks)
    count = kept_bytes(model, train, accelerator, device)
    largest = largest_batch(lambda size: state + count(size), limit_bytes, most)
    size = max(1, largest)
    while True:
        sizes = sorted({*(1 << power for power in range(size.bit_length())), size})
        try:
            profile = measure_device(
                model, accelerator, train.precision, device, seq_lens=[train.seq_len], micro_batches=sizes,
                tps=tp_degrees(model) if device.is_gpu else (1,), seconds_per_point=SECONDS_PER_POINT,
            )  # fmt: skip
        except torch.OutOfMemoryError:  # what surrounds a layer took more than was counted
            if size == 1:
                raise BadInput(
                    f"one layer of model '{model.name}' on one sequence of {train.seq_len} tokens does not fit the memory of "
                    f"{accelerator.name}; shorten train.seq_len, end what else uses the device, or set measure: never."
                ) from None
            size //= 2
        else:
            return profile.replace(largest_micro_batch=size if largest else None)


def resident_bytes(model: ModelSpec, train: TrainSpec, num_ranks: int) -> int:
    """Weights, gradients and this rank's part of the optimizer state, were the whole model on every rank (ZeRO-1)."""
    width = {"fp64": 8, "fp32": 4}.get(train.precision, 2)
    wide = max(4, width)
    master = wide if width < 4 else 0
    return model.parameters * (width + wide) + model.parameters * (master + 2 * wide) // num_ranks


def kept_bytes(
    model: ModelSpec, train: TrainSpec, accelerator: AcceleratorSpec, device: Device
) -> Callable[[int], int]:
    """A function that runs one layer on so many samples, forward and backward, and says what all layers would keep for
    backward; it lets torch.OutOfMemoryError out."""
    stage = build_bench_stage(model, accelerator, train.precision, device, train.seq_len, 1)

    def count(samples: int) -> int:
        meter = MemoryMeter([stage.storage.weights, stage.storage.grads, stage.cos, stage.sin])
        tokens = TokenLayout(batch=samples, seq_len=stage.seq_len, cos=stage.cos, sin=stage.sin)
        x = torch.zeros(
            samples * stage.seq_len, stage.hidden, dtype=stage.storage.weights.dtype, device=device.torch_device
        )
        with meter.counting():
            result = stage.layers[0](x.requires_grad_(), tokens)
        kept = meter.peak_bytes * model.layers
        result.backward(torch.ones_like(result))
        return kept

    return count


def largest_batch(bytes_of: Callable[[int], int], limit_bytes: int, most: int) -> int:
    """The largest size up to `most` whose `bytes_of` stay within the limit; 0 where one sample is too many.

    Doubles, then halves the gap. A size is only tried where the line through the two last tries expects it to fit, so
    that memory which grows no faster than it did is never exceeded. A size that runs out of memory does not fit.
    """
    tried: list[tuple[int, int]] = []

    def fits(size: int) -> bool:
        if len(tried) > 1:
            (a, bytes_a), (b, bytes_b) = sorted(tried)[-2:]
            if bytes_b + (bytes_b - bytes_a) / (b - a) * (size - b) > limit_bytes:
                return False
        elif tried and tried[0][1] * size / tried[0][0] > limit_bytes and size > 2:
            return False
        try:
            found = bytes_of(size)
        except torch.OutOfMemoryError:
            return False
        if found <= limit_bytes:
            tried.append((size, found))
        return found <= limit_bytes

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def combine(model: ModelSpec, cluster: ClusterSpec, curves: Sequence[DeviceProfile], *, fresh: bool) -> Measured:
    """One profile of all ranks' curves; ranks of one accelerator whose speeds differ become kinds of their own.

    Of alike ranks the slowest curve counts, and the smallest of their largest micro-batches.
    """
    classes = speed_classes(cluster.places, curves)
    told = tell_apart(cluster, classes)
    slowest: dict[str, DeviceProfile] = {}
    for place, curve in zip(told.places, curves, strict=True):
        known = slowest.get(place.accelerator.name)
        if known is None or seconds_per_sample(curve) > seconds_per_sample(known):
            slowest[place.accelerator.name] = curve.replace(accelerator=place.accelerator.name)
    alike: dict[str, list[DeviceProfile]] = {name: [] for name in slowest}
    for place, curve in zip(told.places, curves, strict=True):
        alike[place.accelerator.name].append(curve)
    profile = ProfileSpec(
        date="", hethub=hethub.__version__, software=f"torch {torch.__version__}", model=model,
        devices=tuple(
            own.replace(largest_micro_batch=smallest_micro_batch(alike[name])) for name, own in slowest.items()
        ),
        links=_links_of_split(cluster, told),
    )  # fmt: skip
    how = "measured itself" if fresh else "remembers"
    lines = [
        f"rank {place.rank} ({place.accelerator.name}) {how}: {1e3 * seconds_per_sample(curve):.3g} ms a layer and sample, "
        + (
            f"largest micro-batch {curve.largest_micro_batch}"
            if curve.largest_micro_batch
            else "no room for the whole model"
        )
        for place, curve in zip(told.places, curves, strict=True)
    ]
    return Measured(cluster=told, profile=profile, lines=lines)


def seconds_per_sample(curve: DeviceProfile) -> float:
    """The rank's best time of a layer and a sample."""
    return min((t.forward_seconds + t.backward_seconds) / t.micro_batch for t in curve.layers if t.tp == 1)


def speed_classes(places: Sequence[Place], curves: Sequence[DeviceProfile]) -> list[int]:
    """Per rank, which of the unlike speeds of its accelerator it has; 0 is the fastest."""
    result = [0] * len(places)
    for name in {place.accelerator.name for place in places}:
        own = sorted((seconds_per_sample(curves[p.rank]), p.rank) for p in places if p.accelerator.name == name)
        number, first = 0, own[0][0]
        for seconds, rank in own:
            if seconds > UNLIKE * first:
                number, first = number + 1, seconds
            result[rank] = number
    return result


def tell_apart(cluster: ClusterSpec, classes: Sequence[int], mark: str = "~") -> ClusterSpec:
    """The cluster in which ranks of class 1 and up have accelerators of other names; the order of ranks stays.

    Parts of a machine that was split are priced as if its network joined them, where it has one.
    """
    if not any(classes):
        return cluster
    nodes = []
    for (machine, number), group in groupby(cluster.places, key=lambda place: (place.machine, classes[place.rank])):
        places = list(group)
        node, device = places[0].node, places[0].node.unnamed_device
        name = device.name if number == 0 else f"{device.name}{mark}{number}"
        nodes.append(
            node.replace(
                name=f"{node.name}-{machine}-{places[0].local}", count=1, accelerators=len(places), hosts=None,
                accelerator=device.replace(name=name), gbps_per_nic=node.gbps_per_nic or 8 * device.link_gbytes_per_second,
            )
        )  # fmt: skip
    links = cluster.links
    if links.regions is not None:
        origin = {place.rank: links.regions.of_node[place.node.name] for place in cluster.places}
        split = ClusterSpec(name="split", nodes=tuple(nodes))
        regions = links.regions.replace(of_node={place.node.name: origin[place.rank] for place in split.places})
        links = links.replace(regions=regions)
    return cluster.replace(nodes=tuple(nodes), links=links)


def _links_of_split(cluster: ClusterSpec, told: ClusterSpec) -> tuple[LinkTiming, ...]:
    """Where one machine was split: between its parts there is the machine's own link, no network."""
    machines = {place.machine for place in cluster.places}
    inside = [place.rank for place in cluster.places if place.island == cluster.places[0].island]
    if told is cluster or len(machines) > 1 or len(inside) < 2:
        return ()
    link = Network(cluster).link(inside[0], inside[1])
    rate = 1e-9 / link.seconds_per_byte
    return tuple(
        LinkTiming(
            level="between_nodes", operation=operation, latency_seconds=link.latency_seconds, gbytes_per_second=rate,
            ranks=2 if operation == "send" else len(inside),
        )
        for operation in ("send", "all_reduce")
    )  # fmt: skip


class Cache:
    """Where a rank keeps what it measured: a file for its place on the host, model, precision and sequence length."""

    def __init__(self, model: ModelSpec, train: TrainSpec, device: Device, local_rank: int) -> None:
        self._facts = {
            "device": device_name(device), "hethub": hethub.__version__, "torch": torch.__version__,
            "python": platform.python_version(), "model": model.to_dict(), "batch": train.global_batch,
        }  # fmt: skip
        place = f"{socket.gethostname()}-{local_rank}-{model.name}-{train.precision}-{train.seq_len}"
        self.path = cache_folder() / "measured" / f"{place.replace(os.sep, '_')}.json"

    def load(self) -> DeviceProfile | None:
        """What was measured; None where nothing was, by other versions, or where it cannot be reached. Raises BadInput
        for another device's."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError:  # measured anew; whether that can be kept, `save` says
            return None
        try:
            data = json.loads(text)
            facts, profile = data["facts"], DeviceProfile.model_validate(data["profile"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{self.path}: this cache of measurements cannot be read ({error}); delete it.") from None
        if facts.get("device") != self._facts["device"]:
            raise BadInput(
                f"{self.path}: these measurements are of another device, {facts.get('device')}; this rank has {self._facts['device']}. "
                "Delete the file, name another folder in HETHUB_CACHE, or set measure: never."
            )
        return profile if facts == self._facts else None

    def save(self, profile: DeviceProfile) -> str | None:
        """Keeps the measurements, whole or not at all; where it cannot, what to tell the user, for the run goes on."""
        data: dict[str, Any] = {"facts": self._facts, "profile": profile.to_dict()}
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            draft.replace(self.path)
        except OSError as error:
            return (
                f"measurements are not remembered: {self.path.parent} cannot be written ({error.strerror}); name a folder that "
                "can be in HETHUB_CACHE."
            )
        return None


def cache_folder() -> Path:
    """HETHUB_CACHE, or hethub's folder in the user's cache."""
    named = os.environ.get("HETHUB_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hethub"


def device_name(device: Device) -> str:
    """What the maker calls this rank's device; of a CPU, its model."""
    if device.is_gpu:
        return device.name
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
