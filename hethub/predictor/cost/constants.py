"""The fitted constants: where they come from, and how an accelerator finds its own."""

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from math import exp
from typing import Any

from hethub.predictor.cost.software import MathPrecision
from hethub.spec.accelerator import AcceleratorSpec

# Efficiency follows the architecture. A prefix of the catalogue's name decides; for others their vendor stands for one.
_ARCHITECTURES = (
    ("pascal", ("P100", "P40", "P4")),
    ("volta", ("V100",)),
    ("turing", ("T4", "RTX-2080", "Titan-RTX")),
    ("ampere-ga102", ("A10G", "A40", "RTX-A6000", "RTX-3090")),
    ("ampere", ("A100", "A800")),
    ("ada", ("L4", "L40S", "RTX-4090", "RTX-6000-Ada")),
    ("blackwell-gb202", ("RTX-5090",)),
    ("hopper", ("H100", "H200", "H800", "H20", "GH200")),
    ("blackwell", ("B200", "B300", "GB200", "GB300")),
    ("cdna3", ("MI300", "MI325")),
    ("cdna4", ("MI350", "MI355")),
    ("cdna", ("MI",)),
    ("rdna3", ("RX-7",)),
    ("rdna", ("Radeon",)),
    ("cpu", ("CPU",)),
)
# An architecture's scales are on top of its predecessor's: clocks, kernels and attention carry over.
_PREDECESSORS = {"blackwell": "hopper", "blackwell-gb202": "ada"}
# One chip sold with fewer units or slower links: what was measured of the one holds for the other.
_SAME_CHIP = {
    "MI250-GCD": "MI250X-GCD",
    "A800-SXM4-80GB": "A100-SXM4-80GB",
    "H800-SXM5-80GB": "H100-SXM5-80GB",
}
# What no fit told, and where it comes from.
ASSUMED = {
    "memory": "a guess: kernels reach 0.8 of the memory bandwidth; `passes` is fitted beside it and takes up the rest",
    "in_node_latency_seconds": "a guess",
    "collective_step_seconds": "a guess: a step of a ring inside a node",
    "host_staged_gbytes_per_second": "a guess: one TCP connection, with copies through host memory at both ends",
    "host_copy_fraction": "the median of eight host copies over PCIe of A100, H100, H200 and MI300X (Azure AI benchmarking guide)",
}
NARROW = ("fp8", "mxfp8", "nvfp4")  # narrower than half: products only, the rest of a layer stays in bf16
# Without matrix units half precision runs through the fp32 units (P100 and P40 measure alike in fp16 and fp32).
_NO_MATRIX_UNITS = ("pascal", "rdna", "cpu")


def architecture(accelerator: AcceleratorSpec) -> str:
    """The architecture of an accelerator; its vendor where the name is not one of the catalogue's."""
    name = accelerator.name
    return next((own for own, prefixes in _ARCHITECTURES if name.startswith(prefixes)), accelerator.vendor)


def is_cpu(accelerator: AcceleratorSpec) -> bool:
    """Whether ranks compute on their host's own cores."""
    return architecture(accelerator) == "cpu"


def on_matrix_units(accelerator: AcceleratorSpec, precision: MathPrecision) -> bool:
    """Whether matrix products of this precision run on matrix units."""
    if precision in ("fp32", "fp64"):
        return (accelerator.fp32_matrix_tflops or 0.0) > accelerator.fp32_tflops
    return architecture(accelerator) not in _NO_MATRIX_UNITS


def peak_flops(accelerator: AcceleratorSpec, precision: MathPrecision) -> float:
    """Dense peak in FLOP/s of the units that do the work; a rate the data sheet lacks is the next wider one's."""
    if precision == "tf32":
        return (accelerator.tf32_tflops or accelerator.fp32_tflops) * 1e12
    if precision in ("fp32", "fp64"):
        return accelerator.peak_flops(precision)
    if not on_matrix_units(accelerator, precision):
        return accelerator.fp32_tflops * 1e12
    half = accelerator.peak_flops("bf16" if precision == "bf16" else "fp16") or accelerator.peak_flops("fp32")
    rates = [half]
    if precision in NARROW:
        rates.append((accelerator.fp8_tflops or 0.0) * 1e12)
    if precision == "nvfp4":
        rates.append((accelerator.fp4_tflops or 0.0) * 1e12)
    return max(rates)


def largest_peak(accelerator: AcceleratorSpec, precision: MathPrecision) -> float:
    """What no measured row of a table can exceed: those in fp32 may have been computed in tf32, which tables mix."""
    math: tuple[MathPrecision, ...] = ("fp32", "tf32") if precision == "fp32" else (precision,)
    return max(peak_flops(accelerator, each) for each in math)


def attention_peak_flops(accelerator: AcceleratorSpec, precision: MathPrecision) -> float:
    """The peak that fused attention runs at: narrower products leave attention in bf16."""
    return peak_flops(accelerator, "bf16" if precision in NARROW else precision)


def precision_class(precision: MathPrecision) -> str:
    """Precisions that share their fitted scales: fp32 (and fp64), and everything narrower."""
    return "fp32" if precision in ("fp32", "fp64") else "fp16"


def scales_key(name: str, precision: MathPrecision) -> str:
    """Where the scales of an architecture or an accelerator are found."""
    return f"{name} {precision_class(precision)}"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What an accelerator reaches of its data sheet, and what each kernel costs besides. Fields may be arrays in
    fits."""

    matmul: Any  # fraction of the peak rate
    traffic: Any  # bytes that a product moves through memory per FLOP, blocked into tiles as it is
    cast: Any  # bytes moved to cast operands to a narrower precision, per byte of them
    attention: Any  # fraction of the peak rate, for fused attention
    memory: Any  # fraction of the memory bandwidth
    passes: Any  # bytes that elementwise kernels move, over those counted
    backward: Any  # time of the backward's products relative to their FLOPs
    gradient_bytes: Any  # moved per parameter and backward to accumulate half-precision gradients
    logit_bytes: Any  # moved per score over the vocabulary and pass by the loss
    kernel_seconds: Any  # ramp-up and tail of one kernel on the device
    narrow: Any  # the dimension at which a product runs at half its rate
    misaligned: Any  # by how much products take longer where a dimension is no multiple of 64
    wave_area: Any  # elements of a product's result that keep the whole device busy; a last wave is never full
    launch_seconds: Any  # host time to launch one kernel
    scale: Any  # of the device's time: architecture, accelerator and software stack
    throttle: Any  # by how much sustained load is slower than a burst


@dataclass(frozen=True, kw_only=True, eq=False)
class Constants:
    """All fitted numbers of the predictor. `provenance` says on what they were fitted."""

    common: dict[str, float]
    architectures: dict[str, dict[str, float]]  # "ampere fp16": scale, throttle
    accelerators: dict[str, dict[str, float]]  # "A100-SXM4-40GB fp16": the same, on top of the architecture's
    links: dict[str, float]
    stacks: dict[str, float]
    interval: dict[str, float]
    provenance: str
    residuals: dict[str, float] = field(default_factory=dict)

    def efficiency(self, accelerator: AcceleratorSpec, precision: MathPrecision) -> Efficiency:
        """The efficiency of an accelerator: its own or its chip's and its architecture's scales where fitted, else the mean of
        all."""
        common, width = self.common, precision_class(precision)
        units = "matrix" if on_matrix_units(accelerator, precision) else "vector"
        bits = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}.get(precision)
        scale = throttle = attention = matmul = 0.0
        name = architecture(accelerator)
        for values in (
            self.architectures.get(f"{_PREDECESSORS.get(name)} {width}"),
            self.architectures.get(f"{name} {width}"),
            self.of_accelerator(scales_key(accelerator.name, precision)),
        ):
            if values is not None:
                scale += values.get("log_scale", 0.0)
                throttle += values.get("throttle", 0.0)
                attention += values.get("log_attention", 0.0)
                matmul += values.get("log_matmul", 0.0)
        return Efficiency(
            matmul=common[f"{units}_matmul"] * (common[f"{bits}_matmul"] if bits else 1.0) * exp(matmul),
            traffic=common[f"{units}_traffic"],
            cast=common["cast_bytes"] if bits else 0.0,
            attention=common[f"{units}_attention"] * exp(attention),
            memory=common["memory"],
            passes=common["passes"],
            backward=common[f"backward_{width}"],
            gradient_bytes=common["gradient_bytes"] if width == "fp16" else 0.0,
            logit_bytes=common["logit_bytes"],
            kernel_seconds=common["kernel_seconds"],
            narrow=common["narrow"],
            misaligned=common["misaligned"] if units == "matrix" else 0.0,
            wave_area=common["wave_area"],
            launch_seconds=common["launch_seconds"],
            scale=exp(scale),
            throttle=max(throttle, -0.5),
        )

    def of_accelerator(self, key: str) -> dict[str, float]:
        """The scales under an accelerator's `scales_key`, else those of the same chip under another name."""
        name, width = key.rsplit(maxsplit=1)
        return self.accelerators.get(key) or self.accelerators.get(f"{_SAME_CHIP.get(name)} {width}", {})

    def knows(self, accelerator: str, precision: MathPrecision) -> bool:
        """Whether the fit saw an accelerator of this name compute layers or steps, and not products alone."""
        return "log_scale" in self.accelerators.get(scales_key(accelerator, precision), {})

    def stack(self, name: str, precision: MathPrecision) -> float:
        """The factor of a software stack on device time: what stacks have in the mean, times its own where measured.

        The mean is of whole steps over layers that were timed alone, in bursts. Only matrix units slow down so under
        load; fp32's products on vector units keep their rate.
        """
        mean = self.common["stack_mean"] if precision_class(precision) == "fp16" else 0.0
        return exp(mean) * self.stacks.get(name, 1.0)

    @property
    def count(self) -> int:
        """How many numbers were fitted: all but those assumed, and what CPUs reach, which no table has."""
        tables = {key: own for table in (self.architectures, self.accelerators) for key, own in table.items()}
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
