"""Accelerators: what a data sheet says of one device, and the packaged catalogue of them."""

from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

import yaml
from pydantic import Field

from hethub.spec.base import Spec
from hethub.spec.errors import BadInput, suggest_some

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
Vendor = Annotated[
    str, Field(pattern=r"^[a-z][a-z0-9_-]*$", description="nvidia, amd, cpu, intel, …: names the island")
]
Positive = Annotated[float, Field(gt=0)]
# Of a data sheet or a price list: beyond these bounds the unit was mistaken, and sums of such figures would overflow.
Figure = Annotated[float, Field(ge=1e-9, le=1e9)]


class AcceleratorSpec(Spec):
    """One device as the framework sees it (an MI250X GCD is one). Peaks are dense; a missing peak is unknown or
    absent."""

    name: str
    vendor: Vendor
    memory_gb: Figure  # 2**30 bytes each, as data sheets of accelerators count
    memory_gbytes_per_second: Figure
    fp64_tflops: Figure | None = None
    fp32_tflops: Figure
    tf32_tflops: Figure | None = None
    fp32_matrix_tflops: Figure | None = None
    fp16_tflops: Figure | None = None
    bf16_tflops: Figure | None = None
    fp8_tflops: Figure | None = None
    link_gbytes_per_second: Figure  # to its neighbours in the node, each direction
    pcie_generation: Annotated[int, Field(ge=1, le=20)] | None = None
    tdp_watts: Figure | None = None
    source: str = "the user's own description"
    notes: str = ""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 2**30)

    def peak_flops(self, precision: Precision) -> float:
        """Dense peak in FLOP/s of matrix products in `precision`; 0.0 where the accelerator lacks it.

        TF32 is off unless asked for (rule 11 of exactness), so fp32 is the plain or the matrix-unit fp32 rate. Where no
        fp64 rate is known, half of fp32 is assumed.
        """
        if precision == "fp32":
            return max(self.fp32_tflops, self.fp32_matrix_tflops or 0.0) * 1e12
        if precision == "fp64":
            return (self.fp64_tflops or self.fp32_tflops / 2) * 1e12
        return ((self.bf16_tflops if precision == "bf16" else self.fp16_tflops) or 0.0) * 1e12


@cache
def catalogue() -> dict[str, AcceleratorSpec]:
    """The packaged accelerators by name."""
    text = files("hethub.spec").joinpath("catalogue/accelerators.yaml").read_text(encoding="utf-8")
    rows = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: AcceleratorSpec(name=name, **row) for name, row in rows.items()}


def find_accelerator(name: str) -> AcceleratorSpec:
    """The catalogue's entry. Raises BadInput with the nearest name and how to describe an accelerator in full."""
    found = catalogue().get(name)
    if found is None:
        raise BadInput(
            f"accelerator '{name}' is not in the catalogue; {suggest_some(name, list(catalogue()))} An accelerator that is not "
            "there can be described in place: a mapping with name, vendor, memory_gb, memory_gbytes_per_second, "
            "fp32_tflops, fp16_tflops, bf16_tflops and link_gbytes_per_second."
        )
    return found
