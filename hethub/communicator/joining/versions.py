"""What every rank runs on, and the one table of what must be the same on all of them."""

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

import hethub
from hethub.spec.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Software:
    """The versions of one rank, as its programs tell them; `mpi` is empty where MPI did not start the rank, `library` (the
    device's own, with its version) on a CPU."""

    hethub: str
    python: str
    torch: str
    byte_order: str
    mpi: str = ""
    library: str = ""

    @classmethod
    def versions(cls) -> dict[str, str]:
        """This process's own."""
        return {
            "hethub": hethub.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "byte_order": sys.byteorder,
            "mpi": mpi_version(),
        }


_SAME_EVERYWHERE = "Install the same version on every node."
MUST_AGREE = {
    "hethub": _SAME_EVERYWHERE,
    "python": _SAME_EVERYWHERE,
    "torch": f"{_SAME_EVERYWHERE} Builds for other vendors (+cu, +rocm, +cpu) may be mixed.",
    "byte_order": "Machines of unlike byte order cannot share tensors.",
    "mpi": f"{_SAME_EVERYWHERE} The mpirun that starts the job must be of that version too.",
}
"""What must agree, and what to do where it does not: Python, torch and MPI in major.minor, the others in full."""


def check_same(ranks: Sequence[tuple[str, Software]], also: Mapping[str, str] | None = None) -> list[str]:
    """Warnings about small differences between ranks, each given as where it is and what it runs on.

    Raises BadInput naming two ranks that differ in something of `MUST_AGREE`, or of `also` (attribute: remedy).
    """
    (first_place, first), warnings = ranks[0], []
    for place, other in ranks[1:]:
        for what, remedy in {**MUST_AGREE, **(also or {})}.items():
            mine, theirs = str(getattr(first, what)), str(getattr(other, what))
            if comparable(what, mine) != comparable(what, theirs):
                raise BadInput(f"{what} differs: {first_place} has {mine}, {place} has {theirs}. {remedy}")
        check_library(place, other, ranks)
        if release(first.torch) != release(other.torch):
            warnings.append(f"torch differs in its patch version: {first_place} {first.torch}, {place} {other.torch}.")
    return list(dict.fromkeys(warnings))


def check_library(place: str, own: Software, ranks: Sequence[tuple[str, Software]]) -> None:
    """Raises BadInput where an earlier rank with devices of the same maker has another version of their library.

    Builds of one torch release for unlike CUDA versions carry unlike NCCLs, which fail to connect, or hang.
    """
    maker = own.library.split(" ")[0]
    peer, peers = next((where, other.library) for where, other in ranks if other.library.split(" ")[0] == maker)
    if peers != own.library:
        raise BadInput(
            f"{peer} has {peers}, {place} has {own.library}: devices of one maker need one version of its library, which"
            " comes with torch. Install the same build of torch (as +cu130) on all nodes of a maker."
        )


def comparable(what: str, version: str) -> str:
    """The part of a version that must agree."""
    if what == "mpi":
        found = re.search(r"(Open MPI|MPICH|Intel\(R\) MPI)\D*(\d+\.\d+)", version)
        return " ".join(found.groups()) if found else version
    return ".".join(version.split(".")[:2]) if what in ("python", "torch") else version


def release(version: str) -> str:
    """2.13.0a0+cu130 as 2.13.0a0: the build's suffix left out."""
    return version.split("+")[0]


def mpi_version() -> str:
    """The MPI library of this process in a line; empty where none is loaded."""
    mpi = sys.modules.get("mpi4py.MPI")
    return "" if mpi is None else str(mpi.Get_library_version()).splitlines()[0].split(",")[0].strip("\0 ")
