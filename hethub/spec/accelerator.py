"""Accelerators: what a data sheet says of one device, and the packaged catalogue of them."""

import re
from functools import cache, partial
from importlib.resources import files
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field

from hethub.spec.base import Spec
from hethub.spec.errors import BadInput, suggest_some

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
_VENDOR = r"[a-z][a-z0-9_-]*"


def _vendor(text: str) -> str:
    if not re.fullmatch(_VENDOR, text):
        raise ValueError(f"'{text}' is no vendor; write one word in lower case (nvidia, amd, cpu, intel, …).")
    return text


Vendor = Annotated[
    str,
    Field(json_schema_extra={"pattern": f"^{_VENDOR}$"}, description="nvidia, amd, cpu, intel, …: names the island"),
    AfterValidator(_vendor),
]
Positive = Annotated[float, Field(gt=0)]
# Of a data sheet or a price list: beyond these bounds the unit was mistaken, and sums of such figures would overflow.
Figure = Annotated[float, Field(ge=1e-9, le=1e9)]


def _reached(value: float, most: float = 1e5) -> float:
    if value > most:
        raise ValueError(f"{value:g} is beyond physics, no device comes near; give it in the unit that the key names.")
    return value


# Of one device or card: ten times what the fastest of 2026 reach, so that Mbit/s for Gbit/s or MB/s for GB/s are noticed.
Rate = Annotated[Figure, AfterValidator(_reached)]
# More than the largest hosts have, since a CPU rank may have one to itself, and less than 32 GB in MiB, as nvidia-smi counts.
Memory = Annotated[Figure, AfterValidator(partial(_reached, most=3e4))]


class AcceleratorSpec(Spec):
    """One device as the framework sees it (an MI250X GCD is one). Peaks are dense; a missing peak is unknown or
    absent."""

    name: str  # how plans, profiles and answers call it
    vendor: Vendor
    memory_gb: Memory  # 2**30 bytes each, as data sheets of accelerators count
    memory_gbytes_per_second: Rate  # of the device's own memory, as the data sheet says
    # Peaks are dense, of the data sheet (no sparsity); null: unknown or absent. This: half of fp32 is then assumed.
    fp64_tflops: Rate | None = None
    fp32_tflops: Rate  # without matrix units
    tf32_tflops: Rate | None = None  # training never takes it: tf32 rounds fp32; `validate` reads rows measured so
    fp32_matrix_tflops: Rate | None = None  # of matrix units that compute true fp32 (CDNA has some)
    fp16_tflops: Rate | None = None  # dense; without it no fp16 job is planned there
    bf16_tflops: Rate | None = None  # dense; without it no bf16 job is planned there
    fp8_tflops: Rate | None = None  # for rows of `hethub validate`; no job trains in it
    fp4_tflops: Rate | None = None  # for rows of `hethub validate`; no job trains in it
    link_gbytes_per_second: Rate  # to its neighbours in the node, each direction
    peer_gbytes_per_second: Rate | None = None  # of that link, to one neighbour, without a switch; null: all
    linked_accelerators: Annotated[int, Field(ge=2)] | None = None  # on one link; others over PCIe. null: the node
    # Tells how fast host copies are, and that a link which is no faster is PCIe too; null: 5.
    pcie_generation: Annotated[int, Field(ge=1, le=20)] | None = None
    compute_capability: Rate | None = None  # NVIDIA's: torch has attention of cuDNN's for 9.0 and 10.0; null: unknown
    tdp_watts: Figure | None = None  # rated power, for the energy of `hethub size`; null: none is stated
    source: str = "the user's own description"  # where the figures are from; `assumed` makes every answer say so
    notes: str = ""  # for readers

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
