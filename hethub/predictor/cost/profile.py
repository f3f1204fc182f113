"""Measured profiles: what `hethub profile` writes, and how measurements replace the roofline's estimates.

A profile corrects the roofline rather than replacing it: at every measured point the ratio of measured to estimated
time is known, ratios are interpolated in the logarithm of the samples, the sequence length and the tensor-parallel
degree, and beyond the measured points the nearest ratio holds (and is reported as extrapolated); in microbatches
larger than any measured a sample gets no cheaper.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

import hethub
from hethub.predictor.cost.constants import is_cpu, packaged
from hethub.spec.accelerator import Figure, Positive, Precision
from hethub.spec.base import Spec, build, describe
from hethub.spec.cluster import ClusterSpec, Latency, NodeSpec
from hethub.spec.documents import Source, read_json, write_text
from hethub.spec.errors import BadInput, asked_by
from hethub.spec.model import Count, ModelSpec

if TYPE_CHECKING:
    from hethub.spec.job import Job

# What tells one model's layers from another's.
LAYER_SHAPE = ("family", "hidden", "heads", "num_kv_heads", "head_size", "ffn", "is_gated", "vocab", "sliding_window")
Seconds = Annotated[float, Field(gt=0, le=1e9)]  # beyond, the unit was mistaken, and sums would overflow
Point = tuple[float, float, float]  # logarithms of samples, sequence length, tensor-parallel degree


class LayerTiming(Spec):
    """The seconds of one layer on one rank's shard, compute only."""

    micro_batch: Count
    seq_len: Count
    tp: Count = 1
    forward_seconds: Seconds
    backward_seconds: Seconds


class PartTiming(Spec):
    """The seconds of the embedding or the head (with final norm and loss) on one rank's shard."""

    part: Literal["embedding", "head"]
    micro_batch: Count
    seq_len: Count
    tp: Count = 1
    forward_seconds: Seconds
    backward_seconds: Seconds


Timing = TypeVar("Timing", LayerTiming, PartTiming)


class LinkTiming(Spec):
    """A link between ranks, for messages (send) or for collectives: its latency, and its bandwidth in one direction.

    A collective's bandwidth is that of a ring link: bytes times (n - 1) / n over the seconds of a reduce-scatter.
    """

    level: Literal["in_node", "between_nodes", "between_islands"]
    operation: Literal["send", "all_reduce"]
    latency_seconds: Latency
    gbytes_per_second: Figure
    ranks: Annotated[int, Field(ge=2)] = 2


class DeviceProfile(Spec):
    """The measurements of one device type in one precision."""

    accelerator: str
    precision: Precision
    layers: tuple[LayerTiming, ...] = Field(min_length=1)
    parts: tuple[PartTiming, ...] = ()
    optimizer_seconds_per_parameter: Seconds | None = None
    optimizer_factor: Positive = 1.0  # of that, or of the estimate, as a run has shown
    largest_micro_batch: Count | None = None  # of samples, all layers of the model on one rank; None: not looked for
    compiled: bool | None = None  # small operations, as the job's train.compile had it; None: an earlier hethub's
    half_width: Positive | None = None  # of 80 % intervals, in logarithms; None: as where layers were profiled

    def width(self, table: dict[str, float]) -> float:
        """Return the half width of 80 % intervals of steps on this device."""
        return self.half_width or table["profiled"]

    def slower(self, factor: float, name: str | None = None, *, optimizer: float | None = None) -> "DeviceProfile":
        """Return these measurements with the seconds of layers and parts multiplied by `factor`, and those of the optimizer by a
        factor of its own if one is given; under another name if one is given."""

        def times(timing: Any) -> Any:
            return timing.unchecked(
                forward_seconds=timing.forward_seconds * factor, backward_seconds=timing.backward_seconds * factor
            )

        layers, parts = (tuple(map(times, timings)) for timings in (self.layers, self.parts))
        update = self.optimizer_factor * (factor if optimizer is None else optimizer)
        return self.unchecked(accelerator=name or self.accelerator, layers=layers, parts=parts, optimizer_factor=update)


class ProfileSpec(Spec):
    """A profile file: who measured when, the layers of which model, and what was measured."""

    version: Literal[1] = 1
    date: str
    hethub: str
    software: str  # the framework's version
    model: ModelSpec
    devices: tuple[DeviceProfile, ...] = Field(min_length=1)
    links: tuple[LinkTiming, ...] = ()

    def check_model(self, model: ModelSpec) -> None:
        """Raise BadInput unless the profile's layers are those of `model`. The number of layers does not matter."""
        for key in LAYER_SHAPE:
            mine, theirs = getattr(self.model, key), getattr(model, key)
            if mine != theirs:
                raise BadInput(
                    f"the profile measured layers of model '{self.model.name}' with {key} {describe(mine)}, but model '{model.name}' has "
                    f"{describe(theirs)}; run `hethub profile` with this model, or leave the profile out."
                )

    def check_version(self) -> None:
        """Raise BadInput unless this version of hethub measured it. Layers of another version need not cost the same."""
        if self.hethub != hethub.__version__:
            raise BadInput(
                f"the profile was measured by hethub {self.hethub}, this is {hethub.__version__}, whose layers may cost otherwise; "
                "run `hethub profile` again."
            )

    def check_devices(self, nodes: Iterable[NodeSpec], precision: Precision) -> None:
        """Raise BadInput if it measured none of the nodes' accelerators in the precision."""
        wanted = sorted({node.device.name for node in nodes})
        if not any(self.device(name, precision) for name in wanted):
            have = ", ".join(f"{device.accelerator} in {device.precision}" for device in self.devices)
            raise BadInput(
                f"the profile measured {have}, but asked for are {', '.join(wanted)} in {precision}; "
                "run `hethub profile` on these accelerators, or leave the profile out."
            )

    def check_compiled(self, nodes: Iterable[NodeSpec], precision: Precision, compiles: bool | None) -> None:
        """Raise BadInput if an accelerator was measured under another `train.compile` than `compiles`."""
        for node in nodes:
            own, wanted = self.device(node.device.name, precision), compiles_on_node(node, compiles)
            if own is not None and own.compiled not in (None, wanted):
                was, now = ("compiled" if each else "not compiled" for each in (own.compiled, wanted))
                raise BadInput(
                    f"the profile measured {own.accelerator} with small operations {was}, and under this train.compile they are {now}; "
                    f"measure again, or set train.compile: {describe(own.compiled)}."
                )

    def as_compiled(self, cluster: ClusterSpec, compiles: bool | None) -> "ProfileSpec":
        """Return the profile as if it had been measured under this `train.compile`."""
        known = {node.device.name: compiles_on_node(node, compiles) for node in cluster.nodes}
        return self.replace(devices=tuple(own.replace(compiled=known.get(own.accelerator)) for own in self.devices))

    def device(self, accelerator: str, precision: Precision) -> DeviceProfile | None:
        """Return the measurements of an accelerator in a precision, or None."""
        return next((d for d in self.devices if (d.accelerator, d.precision) == (accelerator, precision)), None)

    def link(self, level: str, operation: str) -> LinkTiming | None:
        """Return the slowest measured link of a level, or None. A collective is as fast as its slowest link."""
        found = [link for link in self.links if (link.level, link.operation) == (level, operation)]
        return min(found, key=lambda link: (link.gbytes_per_second, -link.latency_seconds), default=None)


def compiles_on_node(node: NodeSpec, compiles: bool | None) -> bool:
    """Whether small operations are compiled on a node under this `train.compile`."""
    return not is_cpu(node.device) if compiles is None else compiles


def load_profile(path: str | Path) -> ProfileSpec:
    """Return the profile in a JSON file. Of equal points the slower one counts. Raises BadInput."""
    profile = build(ProfileSpec, read_json(Path(path), "profile", unique=True), Source(str(path)), "profile")
    with asked_by(path):
        return merge([profile])


def profile_for(job: "Job", path: Path | None) -> ProfileSpec | None:
    """Return the profile at `path`, or else the one that the job names, or else None. Raises BadInput if the file cannot be read
    or is not of the job's model and cluster; it names the file, and the job's key if the job names it."""
    train, nodes = job.spec.train, None if job.cluster is None else job.cluster.nodes
    wanted = job.described, nodes, train.precision, train.compile
    if path is not None or job.spec.profile is None:
        return profile_of(path, *wanted) if path else None
    with asked_by(job.source.at(("profile",))):
        return profile_of(job.base / job.spec.profile, *wanted)


def profile_of(
    file: Path,
    model: ModelSpec | None,
    nodes: Sequence[NodeSpec] | None,
    precision: Precision,
    compiles: bool | None,
) -> ProfileSpec:
    """Return the profile in a file. Raises BadInput, which names the file, if it is not of the model, the nodes and
    `train.compile`, as far as these are given, or if another version of hethub measured it."""
    profile = load_profile(file)
    with asked_by(file):
        if nodes is not None:
            profile.check_devices(nodes, precision)
            profile.check_compiled(nodes, precision, compiles)
        if model is not None:
            profile.check_model(model)
        profile.check_version()
    return profile


def assumed_speeds(
    cluster: ClusterSpec, precision: Precision, profile: ProfileSpec | None, ranks: Sequence[int] | None = None
) -> list[str]:
    """Return the accelerators whose speed nobody has looked up or measured: the catalogue assumes it, and no profile corrects
    it. They are those of all ranks, or of the `ranks` that the step depends on."""
    places = cluster.places if ranks is None else [cluster.places[rank] for rank in ranks]
    devices = {place.accelerator.name: place.accelerator for place in places}
    return [
        name
        for name, device in devices.items()
        if device.source == "assumed" and (profile is None or profile.device(name, precision) is None)
    ]


def save_profile(profile: ProfileSpec, path: str | Path) -> None:
    write_text(json.dumps(profile.to_dict(), indent=1) + "\n", Path(path))


def merge(profiles: Iterable[ProfileSpec]) -> ProfileSpec:
    """Merge several nodes' measurements of the same model into one profile. Of equal points the slower one counts.

    Raises BadInput if they measured different models, were measured by different versions of hethub, or measured an accelerator
    under different `train.compile`.
    """
    profiles = list(profiles)
    first = profiles[0]
    for other in profiles[1:]:
        other.check_model(first.model)
        if other.hethub != first.hethub:
            raise BadInput(
                f"profiles of hethub {first.hethub} and {other.hethub} cannot be merged; measure again with one version."
            )
    alike: dict[tuple[str, str], list[DeviceProfile]] = {}
    for device in (device for profile in profiles for device in profile.devices):
        alike.setdefault((device.accelerator, device.precision), []).append(device)
    links = dict.fromkeys(link for profile in profiles for link in profile.links)
    return first.replace(devices=tuple(map(_slowest_of, alike.values())), links=tuple(links))


def _slowest_of(devices: Sequence[DeviceProfile]) -> DeviceProfile:
    """Merge the measurements of one device type. Of equal points the slower one counts, and the result is as sure as the least
    sure of them. An optimizer that was measured is preferred to one that was not."""
    first = devices[0]
    if len({device.compiled for device in devices}) > 1:
        raise BadInput(
            f"{first.accelerator} was measured in {first.precision} under unlike train.compile, as the keys `compiled` say; layers cost "
            "otherwise then, so measure again under one."
        )
    update = max(
        devices,
        key=lambda own: ((own.optimizer_seconds_per_parameter or 0.0) * own.optimizer_factor, own.optimizer_factor),
    )
    return first.replace(
        layers=_slowest(timing for device in devices for timing in device.layers),
        parts=_slowest(timing for device in devices for timing in device.parts),
        optimizer_seconds_per_parameter=update.optimizer_seconds_per_parameter,
        optimizer_factor=update.optimizer_factor,
        largest_micro_batch=smallest_micro_batch(devices),
        half_width=max(devices, key=lambda own: own.width(packaged().interval)).half_width,
    )


def _slowest(timings: Iterable[Timing]) -> tuple[Timing, ...]:
    """Return for each point the timing that took longest."""
    found: dict[tuple[object, ...], Timing] = {}
    for timing in timings:
        key = (getattr(timing, "part", None), timing.micro_batch, timing.seq_len, timing.tp)
        found[key] = max(found.get(key, timing), timing, key=lambda each: each.forward_seconds + each.backward_seconds)
    return tuple(found.values())


def smallest_micro_batch(devices: Iterable[DeviceProfile]) -> int | None:
    """Return the largest micro-batch that fits on all devices that looked for it, or None if none did."""
    return min((d.largest_micro_batch for d in devices if d.largest_micro_batch is not None), default=None)


class Corrections:
    """The ratios of measured to estimated seconds at the measured points, interpolated between them."""

    def __init__(self, points: dict[Point, float]) -> None:
        self._points = points
        self._axes = [sorted({point[axis] for point in points}) for axis in range(3)]

    @staticmethod
    def of(
        timings: Iterable[LayerTiming | PartTiming], passed: str, estimate: Callable[[int, int, int], float]
    ) -> "Corrections":
        """The ratios of one pass ("forward_seconds" or "backward_seconds"); `estimate` prices (samples, seq_len,
        tp)."""
        return Corrections(
            {
                (log(t.micro_batch), log(t.seq_len), log(t.tp)): getattr(t, passed)
                / estimate(t.micro_batch, t.seq_len, t.tp)
                for t in timings
            }
        )

    @property
    def most_samples(self) -> int:
        """The largest micro-batch that was measured. It is rounded, since exp(log(8)) is less than 8."""
        return round(exp(self._axes[0][-1]))

    def extrapolates(self, samples: float, seq_len: int, tp: float) -> bool:
        """Whether these arguments are outside the measured points."""
        asked = (log(samples), log(seq_len), log(tp))
        return any(not axis[0] - 1e-9 <= x <= axis[-1] + 1e-9 for axis, x in zip(self._axes, asked, strict=True))

    def at(self, samples: float, seq_len: int, tp: float) -> float:
        """Return the ratio there. It is multilinear in the logarithms if all corners were measured, else that of the nearest
        point."""
        asked = (log(samples), log(seq_len), log(tp))
        corners: list[tuple[Point, float]] = [((), 1.0)]  # type: ignore[list-item]
        for axis, x in zip(self._axes, asked, strict=True):
            corners = [
                ((*point, value), weight * part)  # type: ignore[misc]
                for point, weight in corners
                for value, part in _bracket(axis, x)
            ]
        if all(point in self._points for point, _ in corners):
            return exp(sum(weight * log(self._points[point]) for point, weight in corners))
        nearest = min(self._points, key=lambda point: sum((p - x) ** 2 for p, x in zip(point, asked, strict=True)))
        return self._points[nearest]


def _bracket(axis: list[float], x: float) -> list[tuple[float, float]]:
    """Return the measured values around x with their weights, or only one value if x is equal to it or outside of all."""
    index = bisect_left(axis, x)
    if index == 0:
        return [(axis[0], 1.0)]
    if index == len(axis):
        return [(axis[-1], 1.0)]
    low, high = axis[index - 1], axis[index]
    part = (x - low) / (high - low)
    return [(high, 1.0)] if part == 1.0 else [(low, 1.0 - part), (high, part)]
