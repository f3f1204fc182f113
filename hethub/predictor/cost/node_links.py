"""Rates of links inside a node, by data sheets and the fitted fractions of them: PCIe, dedicated links, host copies."""

from collections.abc import Mapping

from hethub.spec.accelerator import AcceleratorSpec

PCIE_3_GBYTES_PER_SECOND = 16  # of 16 lanes, each direction; every generation doubles it
UNKNOWN_GENERATION = 5


def through_host(accelerator: AcceleratorSpec, gbytes_per_second: float) -> bool:
    """Whether a link of an accelerator is PCIe, through the host; faster ones are dedicated (NVLink, xGMI)."""
    generation = accelerator.pcie_generation or UNKNOWN_GENERATION
    return gbytes_per_second <= PCIE_3_GBYTES_PER_SECOND * 2 ** (generation - 3)


def host_gbytes_per_second(accelerator: AcceleratorSpec, fit: Mapping[str, float]) -> float:
    """What copies between host memory and an accelerator reach: its PCIe, or its only link where that is slower.

    Collectives over PCIe reach far less of it (`pcie_fraction`): those pass the host several times.
    """
    generation = accelerator.pcie_generation or UNKNOWN_GENERATION
    wire = min(PCIE_3_GBYTES_PER_SECOND * 2.0 ** (generation - 3), accelerator.link_gbytes_per_second)
    return wire * fit["host_copy_fraction"]
