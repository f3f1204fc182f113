"""Everything that is checked, in order, on all started ranks: identity, exchange, staging, parity, memory, training."""

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

import hethub
from hethub.communicator import World
from hethub.kernels.bodies import choose
from hethub.kernels.device import all_devices
from hethub.runtime.acceptance.exchange import check_exchange
from hethub.runtime.acceptance.staging import check_staging
from hethub.runtime.acceptance.start import CPU_RANKS, environments, run
from hethub.runtime.launch.launcher_environment import launch_info
from hethub.runtime.launch.preflight import own_facts
from hethub.runtime.launch.session import session
from hethub.runtime.measure.measurement_cache import device_name
from hethub.runtime.measure.profile_run import subject_of
from hethub.runtime.parity.check import check_device
from hethub.runtime.parity.row import Row
from hethub.spec.cluster import ClusterSpec
from hethub.spec.documents import parse_json
from hethub.spec.job import CommunicatorSpec, Job

Progress = Callable[[str], None]
PART_SECONDS = 600.0  # of each process that trains: the plain loop's compiler alone may take minutes
PATIENCE_SECONDS = 3000.0  # of ranks for one of them that computes


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """All rows, and what they were taken on: what a file to send in holds."""

    date: str
    hethub: str
    ranks: list[dict[str, Any]]
    rows: list[Row]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.state == "fail"]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def accept(job: Job | None, progress: Progress) -> Acceptance | None:
    """Everything on the ranks that a launcher has started, the result on rank 0; all of them call it.

    With a job its model and training are taken, and under a launcher its cluster. Raises BadInput and RunFailed as
    `hethub profile` does.
    """
    info = launch_info()
    spec = CommunicatorSpec(timeout_seconds=PATIENCE_SECONDS)
    is_of_job = job is not None and job.cluster is not None and job.cluster.size == info.size
    with session(job if is_of_job else None, spec) as (world, cluster):
        facts = {
            **asdict(own_facts(info, world.device)),
            "processor": device_name(world.device),
            "platform": platform.platform(),
        }
        ranks = world.all_gather_objects({**facts, "identity": world.device.identity})
        rows = [*_identity(ranks), *check_exchange(world, cluster, progress)]
        own: list[Row] = []
        if _speaks_for_type(world, ranks):
            progress("copies between device and host")
            own += check_staging(world.device, cluster.places[world.rank].accelerator)
            own += _parity(world, job, progress)
        world.device.release_memory()  # of which the processes that train need all
        world.barrier()
        if info.local_rank == 0:
            progress("memory, the same bits, speed")
            own += _training()
        gathered = world.all_gather_objects([row.to_dict() for row in own])
        rows += [Row(**row) for of_rank in gathered for row in of_rank]
        rows += _bridged(ranks, cluster)
        if world.rank != 0:
            return None
    return Acceptance(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), hethub=hethub.__version__, ranks=ranks, rows=rows
    )


def _identity(ranks: list[dict[str, Any]]) -> Iterator[Row]:
    """Whether every rank has a device of its own that the catalogue knows: a session has none that it does not."""
    for rank in ranks:
        identity = rank["identity"]
        shared = [other["rank"] for other in ranks if identity is not None and other["identity"] == identity]
        if identity is None:
            yield Row(what="device", where=f"rank {rank['rank']}", state="skipped", found=rank["processor"],
                      reason="a CPU has no identity")  # fmt: skip
        else:
            yield Row(
                what="device", where=f"rank {rank['rank']}", state="fail" if len(shared) > 1 else "pass",
                found=f"{rank['device']} {identity}, {rank['memory_bytes'] / 2**30:.0f} GiB",
                reason=f"ranks {shared} drive one device" if len(shared) > 1 else "",
            )  # fmt: skip


def _speaks_for_type(world: World, ranks: list[dict[str, Any]]) -> bool:
    """Whether this rank is the first with a device of its type."""
    own = ranks[world.rank]
    return next(r["rank"] for r in ranks if (r["vendor"], r["device"]) == (own["vendor"], own["device"])) == world.rank


def _parity(world: World, job: Job | None, progress: Progress) -> list[Row]:
    """The job's layer, head and optimizer step, or those of a usual model, against fp64."""
    subject = subject_of(job, world.device)
    choose(subject.train.compile)  # layers as the job runs them
    masks = job is not None and job.spec.data.document_mask
    try:
        return check_device(
            subject.model, subject.train, world.device, masks_documents=masks,
            progress=lambda what: progress(f"{what} against fp64"),
        )  # fmt: skip
    except torch.OutOfMemoryError as error:
        return [Row(what="against fp64", where=world.device.name, state="fail", reason=str(error))]


def _training() -> Iterator[Row]:
    """Rows of the parts that train, each in processes of its own: on one device, or on all of this machine."""
    devices = len(all_devices())
    for part, ranks in (("repeats", 1), ("speed", 1), ("memory", devices or CPU_RANKS)):
        places = environments(min(ranks, devices), 0 if devices else ranks)
        code, said, errors = run(["hethub.runtime.acceptance", part], places, timeout_seconds=PART_SECONDS)
        if code != 0:
            last = (errors.strip().splitlines() or ["it said nothing"])[-1]
            yield Row(
                what=f"training ({part})", where=platform.node(), state="fail", reason=f"exit code {code}: {last}"
            )
        else:
            # Whoever asked NCCL what it does (NCCL_DEBUG) has its lines there too.
            rows = next((line for line in reversed(said.splitlines()) if line.startswith("[{")), said)
            yield from (Row(**row) for row in parse_json(rows.encode(), part, "rows"))
    if not devices:
        for what in ("memory by the allocator", "1 B parameters, MFU"):
            yield Row(what=what, where=platform.node(), state="skipped", reason="needs a CUDA or ROCm device")


def _bridged(ranks: list[dict[str, Any]], cluster: ClusterSpec) -> Iterator[Row]:
    """What of the bridge was not there to be checked."""
    vendors = {rank["vendor"] for rank in ranks}
    if vendors == {"cpu"}:
        yield Row(what="bridge between NCCL or RCCL and CPUs", where="all ranks", state="skipped",
                  reason="needs a CUDA or ROCm device; here Gloo on both sides")  # fmt: skip
    elif len(cluster.islands) == 1:
        yield Row(what="bridge", where="all ranks", state="skipped", reason="all ranks are one island")
