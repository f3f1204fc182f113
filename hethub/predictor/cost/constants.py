"""The fitted constants: where they come from, and how an accelerator finds its own."""

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from math import exp
from typing import Any

from hethub.predictor.cost.software import MathPrecision
from hethub.spec.accelerator import AcceleratorSpec

# Architecture families: efficiency follows the architecture. A prefix of the catalogue's name decides; others go by
# vendor.
_FAMILIES = (
    ("pascal", ("P100", "P40", "P4")),
    ("volta", ("V100",)),
    ("turing", ("T4", "RTX-2080", "Titan-RTX")),
    ("ampere-ga102", ("A10G", "RTX-A6000", "RTX-3090")),
    ("ampere", ("A100", "A800")),
    ("ada", ("L4", "L40S", "RTX-4090")),
    ("hopper", ("H100", "H200", "H800", "H20", "GH200")),
    ("blackwell", ("B200", "B300", "GB200", "GB300")),
    ("cdna3", ("MI300", "MI325")),
    ("cdna4", ("MI350", "MI355")),
    ("cdna", ("MI",)),
    ("rdna", ("Radeon",)),
    ("cpu", ("CPU",)),
)
# Where nothing of a family was measured its predecessor's scales stand for it: clocks, kernels and attention carry
# over.
_PREDECESSORS = {"blackwell": "hopper"}
# What no fit told, and where it comes from.
ASSUMED = {
    "memory": "a guess: kernels reach 0.8 of the memory bandwidth; `passes` is fitted beside it and takes up the rest",
    "in_node_latency_seconds": "a guess",
    "collective_step_seconds": "a guess: a step of a ring inside a node",
    "host_staged_gbytes_per_second": "a guess: one TCP connection, with copies through host memory at both ends",
    "host_copy_fraction": "the median of eight host copies over PCIe of A100, H100, H200 and MI300X (Azure AI benchmarking guide)",
}
# Without matrix units half precision runs through the fp32 units (P100 and P40 measure alike in fp16 and fp32).
_NO_MATRIX_UNITS = ("pascal", "rdna", "cpu")


def family(accelerator: AcceleratorSpec) -> str:
    """The architecture family of an accelerator; its vendor where the name is not one of the catalogue's."""
    name = accelerator.name
    return next((f for f, prefixes in _FAMILIES if name.startswith(prefixes)), accelerator.vendor)


def is_cpu(accelerator: AcceleratorSpec) -> bool:
    """Whether ranks compute on their host's own cores."""
    return family(accelerator) == "cpu"


def on_matrix_units(accelerator: AcceleratorSpec, precision: MathPrecision) -> bool:
    """Whether matrix products of this precision run on matrix units."""
    if precision in ("fp32", "fp64"):
        return (accelerator.fp32_matrix_tflops or 0.0) > accelerator.fp32_tflops
    return family(accelerator) not in _NO_MATRIX_UNITS


def peak_flops(accelerator: AcceleratorSpec, precision: MathPrecision) -> float:
    """Dense peak in FLOP/s of the units that do the work; a rate the data sheet lacks is the next wider one's."""
    if precision == "tf32":
        return (accelerator.tf32_tflops or accelerator.fp32_tflops) * 1e12
    if precision in ("fp32", "fp64"):
        return accelerator.peak_flops(precision)
    if not on_matrix_units(accelerator, precision):
        return accelerator.fp32_tflops * 1e12
    half = accelerator.peak_flops("bf16" if precision == "bf16" else "fp16") or accelerator.peak_flops("fp32")
    return max(half, (accelerator.fp8_tflops or 0.0) * 1e12) if precision == "fp8" else half


def attention_peak_flops(accelerator: AcceleratorSpec, precision: MathPrecision) -> float:
    """The peak that fused attention runs at: fp8 products leave attention in bf16."""
    return peak_flops(accelerator, "bf16" if precision == "fp8" else precision)


def precision_class(precision: MathPrecision) -> str:
    """Precisions that share their fitted scales: fp32 (and fp64), and everything narrower."""
    return "fp32" if precision in ("fp32", "fp64") else "fp16"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What an accelerator reaches of its data sheet, and what each kernel costs besides. Fields may be arrays in
    fits."""

    matmul: Any  # fraction of the peak rate
    traffic: Any  # bytes that a product moves through memory per FLOP, blocked into tiles as it is
    attention: Any  # fraction of the peak rate, for fused attention
    memory: Any  # fraction of the memory bandwidth
    passes: Any  # bytes that elementwise kernels move, over those counted
    backward: Any  # time of the backward's products relative to their FLOPs
    gradient_bytes: Any  # moved per parameter and backward to accumulate half-precision gradients
    logit_bytes: Any  # moved per score over the vocabulary and pass by the loss
    kernel_seconds: Any  # ramp-up and tail of one kernel on the device
    narrow: Any  # the dimension at which a product runs at half its rate
    wave_area: Any  # elements of a product's result that keep the whole device busy; a last wave is never full
    launch_seconds: Any  # host time to launch one kernel
    scale: Any  # of the device's time: family, accelerator and software stack
    throttle: Any  # by how much sustained load is slower than a burst


@dataclass(frozen=True, kw_only=True, eq=False)
class Constants:
    """All fitted numbers of the predictor. `provenance` says on what they were fitted."""

    common: dict[str, float]
    families: dict[str, dict[str, float]]  # "ampere fp16": scale, throttle
    accelerators: dict[str, dict[str, float]]  # "A100-SXM4-40GB fp16": the same, on top of the family's
    links: dict[str, float]
    stacks: dict[str, float]
    interval: dict[str, float]
    provenance: str
    residuals: dict[str, float] = field(default_factory=dict)

    def efficiency(self, accelerator: AcceleratorSpec, precision: MathPrecision) -> Efficiency:
        """The efficiency of an accelerator: its own and its family's scales where fitted, else the mean of all."""
        common, width = self.common, precision_class(precision)
        units = "matrix" if on_matrix_units(accelerator, precision) else "vector"
        scale = throttle = attention = 0.0
        name = family(accelerator)
        own = self.families.get(f"{name} {width}") or self.families.get(f"{_PREDECESSORS.get(name)} {width}")
        for values in (
            own,
            self.accelerators.get(f"{accelerator.name} {width}"),
        ):
            if values is not None:
                scale, throttle = scale + values["log_scale"], throttle + values["throttle"]
                attention += values.get("log_attention", 0.0)
        return Efficiency(
            matmul=common[f"{units}_matmul"],
            traffic=common[f"{units}_traffic"],
            attention=common[f"{units}_attention"] * exp(attention),
            memory=common["memory"],
            passes=common["passes"],
            backward=common[f"backward_{width}"],
            gradient_bytes=common["gradient_bytes"] if width == "fp16" else 0.0,
            logit_bytes=common["logit_bytes"],
            kernel_seconds=common["kernel_seconds"],
            narrow=common["narrow"],
            wave_area=common["wave_area"],
            launch_seconds=common["launch_seconds"],
            scale=exp(scale),
            throttle=max(throttle, -0.5),
        )

    def stack(self, name: str) -> float:
        """The factor of a software stack on device time; 1.0 for a stack never measured."""
        return self.stacks.get(name, 1.0)

    @property
    def count(self) -> int:
        """How many numbers were fitted: all but those assumed, and what CPUs reach, which no table has."""
        tables = {key: own for table in (self.families, self.accelerators) for key, own in table.items()}
        scales = sum(len(values) for key, values in tables.items() if not key.startswith("cpu"))
        return len({*self.common, *self.links} - ASSUMED.keys()) + len(self.stacks) + scales

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@cache
def packaged() -> Constants:
    """The constants that `python -m hethub.predictor.calibration.fit` wrote."""
    data: dict[str, Any] = json.loads(
        files("hethub.predictor.cost").joinpath("constants.json").read_text(encoding="utf-8")
    )
    return Constants(**data)
