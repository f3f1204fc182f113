"""The fitted constants: where they come from, and how an accelerator finds its own."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from hethub.predictor.software import MathPrecision
from hethub.spec.accelerator import AcceleratorSpec

# Architecture families: efficiency follows the architecture. A prefix of the catalogue's name decides; others go by vendor.
_FAMILIES = (
    ("pascal", ("P100", "P40", "P4")),
    ("volta", ("V100",)),
    ("turing", ("T4", "RTX-2080", "Titan-RTX")),
    ("ampere", ("A100", "A800")),
    ("ampere-ga102", ("A10G", "RTX-A6000", "RTX-3090")),
    ("ada", ("L4", "L40S", "RTX-4090")),
    ("hopper", ("H100", "H200", "H800", "H20", "GH200")),
    ("blackwell", ("B200", "B300", "GB200", "GB300")),
    ("cdna", ("MI",)),
    ("rdna", ("Radeon",)),
)


def family(accelerator: AcceleratorSpec) -> str:
    """The architecture family of an accelerator; its vendor where the name is not one of the catalogue's."""
    name = accelerator.name
    return next((f for f, prefixes in _FAMILIES if name.startswith(prefixes)), accelerator.vendor)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What fraction of its data sheet an accelerator reaches, and what each kernel costs besides."""

    matmul: float  # of the peak rate, for products large in every dimension
    attention: float  # of the peak rate, for fused attention
    memory: float  # of the memory bandwidth, for elementwise kernels
    kernel_seconds: float  # ramp-up and tail of one kernel on the device
    narrow: float  # the dimension at which a product runs at half its rate
    launch_seconds: float  # host time to launch one kernel


@dataclass(frozen=True, kw_only=True, eq=False)
class Constants:
    """All fitted numbers of the predictor. `provenance` says on what they were fitted."""

    default: dict[str, float]
    families: dict[str, dict[str, float]]
    precisions: dict[str, dict[str, float]]
    links: dict[str, float]
    stacks: dict[str, float]
    provenance: str

    def efficiency(self, accelerator: AcceleratorSpec, precision: MathPrecision) -> Efficiency:
        """The efficiency of an accelerator: its family's values where fitted, else the mean of all families."""
        values = self.default | self.families.get(family(accelerator), {})
        values |= self.precisions.get(f"{family(accelerator)} {precision}", {})
        return Efficiency(**values)

    def stack(self, name: str) -> float:
        """The factor of a software stack on device time; 1.0 for a stack never measured."""
        return self.stacks.get(name, 1.0)


@cache
def packaged() -> Constants:
    """The constants that `python -m hethub.predictor.fit` wrote."""
    data: dict[str, Any] = json.loads(files("hethub.predictor").joinpath("constants.json").read_text(encoding="utf-8"))
    return Constants(**data)


def peak_flops(accelerator: AcceleratorSpec, precision: MathPrecision) -> float:
    """Dense peak in FLOP/s; a rate the data sheet lacks is the next wider one's."""
    if precision == "fp8":
        return (accelerator.fp8_tflops or accelerator.bf16_tflops or accelerator.fp16_tflops or accelerator.fp32_tflops) * 1e12
    if precision == "tf32":
        return (accelerator.tf32_tflops or accelerator.fp32_tflops) * 1e12
    return accelerator.peak_flops(precision) or accelerator.peak_flops("fp32")
