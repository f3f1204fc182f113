"""Preflight: what all ranks must agree on before a run (versions, vendors, data), with one conclusion on every rank."""

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hethub.communicator import Rendezvous
from hethub.communicator.joining.islands import parse_islands
from hethub.communicator.joining.versions import Software, check_same
from hethub.kernels.device import Device
from hethub.runtime.json_hash import json_hash
from hethub.runtime.launch.consensus import all_gather, consensus
from hethub.runtime.launch.launcher_environment import LaunchInfo, is_restarted
from hethub.runtime.memory.host_limit import host_memory_bytes
from hethub.spec.accelerator import AcceleratorSpec, catalogue
from hethub.spec.base import Source, build
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Facts(Software):
    """What one rank says of itself."""

    rank: int
    host: str
    local_rank: int
    vendor: str
    device: str
    memory_bytes: int | None
    job: str
    tokens: str
    host_memory_bytes: int | None = None  # that ranks of the host may use together
    compute_units: int | None = None  # of the device, None on a CPU
    restarted: bool = False  # its launcher has started it before
    run_folder: str = ""  # as its command line names it, and how

    @property
    def where(self) -> str:
        return f"rank {self.rank} ({self.host})"


AnyFacts = TypeVar("AnyFacts", bound=Facts)


class Agreed(NamedTuple):
    """What all ranks have found alike of each other."""

    cluster: ClusterSpec
    facts: list[Facts]  # by rank
    warnings: list[str]

    @property
    def restarted(self) -> bool:
        """Whether a launcher has started any of the ranks before."""
        return any(own.restarted for own in self.facts)


def own_facts(info: LaunchInfo, device: Device, *, read: Any = None, tokens: str = "", run_folder: str = "") -> Facts:
    """This process's facts; `read` is the JSON-able data of its files, `tokens` the fingerprint of its data, `run_folder` as
    `folder_asked_for` says."""
    return Facts(
        rank=info.rank, host=socket.gethostname(), local_rank=info.local_rank, vendor=device.vendor, device=device.name,
        memory_bytes=device.memory_bytes(), job="" if read is None else json_hash(read), tokens=tokens,
        host_memory_bytes=host_memory_bytes(), compute_units=device.compute_units(), library=device.native_library,
        restarted=is_restarted(), run_folder=run_folder, **Facts.versions(),
    )  # fmt: skip


def folder_asked_for(run_dir: Path | None, resume: Path | None) -> str:
    """A rank's options that name its run folder."""
    given = {"--run-dir": run_dir, "--resume": resume}
    return " ".join(f"{option} {path}" for option, path in given.items() if path is not None) or "none"


def agree(meeting: Rendezvous, own: Facts, cluster: ClusterSpec | None) -> Agreed:
    """The cluster that all ranks make, `cluster` where one is named, the same on every rank. Raises BadInput on every
    rank where they do not fit together."""
    facts = exchange_facts(meeting, "versions and data", own)
    warnings = consensus(meeting, "versions", lambda: check_versions(facts))
    found = consensus(meeting, "cluster", lambda: find_cluster(cluster, facts))
    return Agreed(cluster=found, facts=facts, warnings=warnings)


def exchange_facts(meeting: Rendezvous, key: str, own: AnyFacts) -> list[AnyFacts]:
    """Every rank's facts, by rank."""
    return [type(own)(**row) for row in all_gather(meeting, key, asdict(own))]


def check_versions(facts: Sequence[Facts]) -> list[str]:
    """Warnings about small differences between ranks.

    Raises BadInput naming two ranks where they differ in hethub, Python, torch, byte order, MPI, job, run folder or tokens, or
    those of one maker in the version of its library.
    """
    return check_same([(own.where, own) for own in facts], also=_READ_ALIKE)


_READ_ALIKE = {
    "job": "Every rank must read the same job, model and cluster; copy the files to every node.",
    "run_folder": "One run is trained in one folder, which all ranks must reach; give every rank the same --run-dir and --resume.",
    "tokens": "Every rank must read the same data (python-stdlib differs between Python versions); copy one token file "
    "made by `hethub tokenise` to every node.",
}


def find_cluster(cluster: ClusterSpec | None, facts: Sequence[Facts]) -> ClusterSpec:
    """The cluster named, which the ranks must match, or what the ranks found (HETHUB_ISLANDS emulates islands). Raises
    BadInput."""
    if cluster is None:
        named = os.environ.get("HETHUB_ISLANDS")
        return detect_cluster(facts, parse_islands(named, len(facts)) if named else None)
    check_cluster(cluster, facts)
    return cluster


def check_cluster(cluster: ClusterSpec, facts: Sequence[Facts]) -> None:
    """Raises BadInput naming the first rank whose accelerator is not of the vendor the cluster file gives it."""
    for place, own in zip(cluster.places, facts, strict=True):
        named = (cluster.emulated or place.node.vendor is not None) and own.vendor == "cpu"
        if own.vendor != place.island and not named:
            raise BadInput(
                f"{own.where} runs on {own.device} ({own.vendor}), but cluster '{cluster.name}' places {place.accelerator.name} "
                f"({place.island}) there, in node '{place.node.name}'. List the nodes in the order in which the launcher numbers "
                "the ranks. To rehearse these accelerators on CPUs, set `emulated: true` in the cluster file; to have a CPU node as an "
                "island of its own, describe it with a CPU accelerator and give it a vendor."
            )


PART_OF_CARD = 0.7  # of its memory: drivers keep less than a tenth
# Of whole cards that can be parted, partitions of which may see all memory (rocm.docs.amd.com, GPU specifications).
COMPUTE_UNITS = {"MI300X": 304, "MI325X": 304, "MI350X": 256, "MI355X": 256}
# With or without one of these words it is another model: RTX 6000 Ada, Quadro RTX 6000, RTX PRO 6000 Blackwell.
OTHER_MODEL = {"ada", "blackwell", "d", "gre", "laptop", "pro", "super", "ti", "xt", "xtx"}
ASSUMED_GBPS = 10.0  # between hosts of a detected cluster; a cluster file says what the interfaces really do


def detect_cluster(facts: Sequence[Facts], islands: Sequence[Sequence[int]] | None = None) -> ClusterSpec:
    """The cluster that the ranks found, for `cluster: detect`: one node per host, accelerators by their names. Nodes
    that share a host share its memory, by their ranks.

    `islands` (ranks of each) emulates vendors on CPUs, named a, b, c… Raises BadInput for a device that is not in the
    catalogue.
    """
    island_of = {rank: index for index, ranks in enumerate(islands or []) for rank in ranks}
    on_host = Counter(own.host for own in facts)

    def place(own: Facts) -> tuple[str, str, str | None]:
        name = "CPU-core" if own.vendor == "cpu" else _catalogue_name(own, catalogue())
        return own.host, name, chr(ord("a") + island_of[own.rank]) if island_of else None

    nodes: list[dict[str, Any]] = []
    for (host, name, vendor), group in groupby(facts, place):
        memory = [own.host_memory_bytes for own in group]
        known = [num_bytes / 2**30 / on_host[host] for num_bytes in memory if num_bytes is not None]
        nodes.append(
            {
                "name": f"{host}-{len(nodes)}",
                "accelerator": name,
                "accelerators": len(memory),
                "gbps_per_nic": ASSUMED_GBPS,
                "vendor": vendor,
                "host_memory_gb": sum(known) if known else None,
            }
        )
    return build(ClusterSpec, {"name": "detected", "nodes": nodes}, Source("cluster: detect"), "cluster")


def _catalogue_name(own: Facts, known: Mapping[str, AcceleratorSpec]) -> str:
    """The catalogue's accelerator that a device's own name means, of several variants the one nearest in memory.

    Makers add words ("NVIDIA GeForce RTX 3090") and leave words out ("NVIDIA H200"), but the model's number is there.
    """
    spoken = set(_words(own.device))
    fitting = [
        name
        for name in known
        if _model_number(name) <= spoken and OTHER_MODEL & spoken == OTHER_MODEL & set(_words(name))
    ]
    if not fitting:
        raise BadInput(
            f"device '{own.device}' ({own.where}) is not in the accelerator catalogue, so `cluster: detect` cannot describe it; "
            "write a cluster file with the accelerator's data in place."
        )
    memory = own.memory_bytes or 0

    def unlike(name: str) -> tuple[int, bool, int]:
        words = set(_words(name))
        # Only PCIe cards say what they are: "NVIDIA H100 80GB HBM3" is the SXM module, the card is "NVIDIA H100 PCIe".
        return -len(spoken & words), "pcie" in words - spoken, abs(known[name].memory_bytes - memory)

    name = min(fitting, key=unlike)
    if part := _part_of(own, known[name]):
        raise BadInput(
            f"device '{own.device}' ({own.where}) has {part}: it is a part of one (MIG, or a partition of AMD's), which is slower too; "
            "write a cluster file with the part's data in place."
        )
    return name


def _part_of(own: Facts, card: AcceleratorSpec) -> str:
    """What the device has less of than the card; empty for a whole one."""
    if 0 < (own.memory_bytes or 0) < PART_OF_CARD * card.memory_bytes:
        return f"{(own.memory_bytes or 0) / 2**30:.0f} GiB of memory, the catalogue's {card.name} {card.memory_gb:g}"
    whole = COMPUTE_UNITS.get(card.name, 0)
    if 0 < (own.compute_units or 0) < PART_OF_CARD * whole:
        return f"{own.compute_units} compute units, {card.name} {whole}"
    return ""


def _words(name: str) -> list[str]:
    return name.lower().replace("-", " ").replace("/", " ").split()


def _model_number(name: str) -> set[str]:
    """The first word with a digit (a100, 3090, mi250x); names without one are meant as a whole."""
    words = _words(name)
    numbered = [word for word in words if any(character.isdigit() for character in word)]
    return set(numbered[:1] or words)
