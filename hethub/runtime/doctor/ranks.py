"""`hethub doctor` under a launcher: what each rank has, which relay joins which ranks, and what does not fit
together."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hethub.communicator.relays.shm_connection import host_identity
from hethub.kernels.device import Device, choose_device
from hethub.runtime.doctor.machine import Finding, examine
from hethub.runtime.launch.consensus import leave
from hethub.runtime.launch.launcher_environment import LaunchInfo, one_voice_per_node
from hethub.runtime.launch.preflight import Facts, check_cluster, check_versions, exchange_facts, own_facts
from hethub.runtime.launch.rendezvous import meet
from hethub.runtime.launch.session import watched_meeting
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import CommunicatorSpec

_TOLD = ("CuPy", "relays")  # findings that the paragraph of a rank shows


@dataclass(frozen=True, kw_only=True)
class RankReport(Facts):
    """One rank as it sees itself."""

    host_identity: str
    identity: str | None  # what tells its device from every other; None on a CPU
    address: str
    findings: list[dict[str, str]]

    def found(self, what: str) -> str:
        """What a finding of that name says; empty where there is none."""
        return next((finding["found"] for finding in self.findings if finding["what"] == what), "")


@dataclass(frozen=True, kw_only=True)
class RanksExamined:
    """What rank 0 prints: every rank, and the findings that concern some or all of them."""

    ranks: list[RankReport]
    findings: list[Finding]
    relay: str = "auto"  # what the job says of it

    def relays_of(self, rank: int) -> str:
        """Which relays the job takes from this rank: `shm inside nv1; gloo to amd1`."""
        own = self.ranks[rank]
        near = sum(other.host_identity == own.host_identity for other in self.ranks) > 1
        far = sorted({other.host for other in self.ranks if other.host_identity != own.host_identity})
        inside, between = (self.relay, self.relay) if self.relay != "auto" else ("shm", self._auto_between_hosts())
        parts = [
            *([f"{inside} inside {own.host}"] if near else []),
            *([f"{between} to {', '.join(far)}"] if far else []),
        ]
        return "; ".join(parts) or "none needed"

    def _auto_between_hosts(self) -> str:
        has_mpi = all(report.mpi for report in self.ranks)
        return "gloo, or mpi at sizes where it is faster (timed at start)," if has_mpi else "gloo"

    def paragraphs(self) -> dict[str, list[tuple[str, str]]]:
        """Return, for each group of like ranks (`ranks 0-3 on nv1`), the names and values they share, the important ones first."""
        grouped: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = {}
        for report in self.ranks:
            library = next((f"{name} {report.found(name)}" for name in ("NCCL", "RCCL") if report.found(name)), "gloo")
            lines = (
                ("device", f"{report.device} ({report.vendor})"),
                ("torch", report.torch),
                ("native library", library),
                ("MPI", report.mpi or "not loaded: MPI did not start this rank"),
                ("CuPy", report.found("CuPy")),
                ("listens on", report.address),
                ("relays there", report.found("relays")),
                ("relays taken", self.relays_of(report.rank)),
            )
            grouped.setdefault((report.host, lines), []).append(report.rank)
        return {f"ranks {_listed(ranks)} on {host}": list(lines) for (host, lines), ranks in grouped.items()}

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(report), "relays": self.relays_of(report.rank)} for report in self.ranks]
        return {"ranks": rows, "findings": [finding.to_dict() for finding in self.findings]}


def examine_ranks(info: LaunchInfo, cluster: ClusterSpec | None, spec: CommunicatorSpec) -> RanksExamined | None:
    """What the started ranks have, on rank 0; None on the others. Raises BadInput where they cannot even meet."""
    with one_voice_per_node(info):
        met = meet(info, cluster, spec.timeout_seconds)
    with watched_meeting(met) as meeting:
        findings = examine()
        try:
            device = choose_device(info.local_rank, info.local_size)
        except BadInput as error:
            device = Device(vendor="cpu")
            findings.append(Finding(what="device", state="missing", found=str(error)))
        own = RankReport(
            **asdict(own_facts(info, device)),
            host_identity=host_identity(),
            identity=device.identity,
            address=f"{meeting.interface or ''} {meeting.address}".strip(),
            findings=[finding.to_dict() for finding in findings],
        )
        ranks = exchange_facts(meeting, "doctor", own)
        leave(meeting)
    return evaluate(ranks, cluster, spec.relay) if info.rank == 0 else None


def evaluate(ranks: Sequence[RankReport], cluster: ClusterSpec | None, relay: str = "auto") -> RanksExamined:
    """The ranks with what is to be said of several at once: equal findings in one line, and what does not fit."""
    grouped: dict[tuple[str, str, str, str], list[int]] = {}
    for report in ranks:
        for row in report.findings:
            if row["state"] != "ok" and row["what"] not in _TOLD:
                grouped.setdefault((row["what"], row["state"], row["found"], row["remedy"]), []).append(report.rank)
    findings = [
        Finding(what=what, state=state, found=f"{found} (ranks {_listed(members)})", remedy=remedy)  # type: ignore[arg-type]
        for (what, state, found, remedy), members in grouped.items()
    ]
    findings += _refused("versions", lambda: check_versions(ranks))
    findings += _one_device_each(ranks)
    findings += _refused("relay", lambda: _relay_joins(relay, ranks))
    if cluster is not None:
        findings += _refused("cluster", lambda: _fits(cluster, ranks))
    return RanksExamined(ranks=list(ranks), findings=findings, relay=relay)


def _refused(what: str, check: Callable[[], list[str]]) -> list[Finding]:
    try:
        return [Finding(what=what, state="note", found=warning) for warning in check()]
    except BadInput as error:
        return [Finding(what=what, state="missing", found=str(error))]


def _one_device_each(ranks: Sequence[RankReport]) -> list[Finding]:
    drivers: dict[str, list[int]] = {}
    for report in ranks:
        if report.identity is not None:
            drivers.setdefault(report.identity, []).append(report.rank)
    remedy = "start one rank per device; let every rank of a node see all its devices, or another one each"
    return [
        Finding(
            what="device", state="missing", found=f"ranks {_listed(members)} drive one device ({device})", remedy=remedy
        )
        for device, members in drivers.items()
        if len(members) > 1
    ]


def _relay_joins(relay: str, ranks: Sequence[RankReport]) -> list[str]:
    """No warnings. Raises BadInput where the job's relay cannot join these ranks."""
    if relay == "shm" and len({report.host_identity for report in ranks}) > 1:
        raise BadInput("communicator.relay is shm, which joins ranks of one host, but the ranks are on several.")
    if relay == "mpi" and not all(report.mpi for report in ranks):
        raise BadInput("communicator.relay is mpi, but MPI did not start all ranks; start them with mpirun.")
    return []


def _fits(cluster: ClusterSpec, ranks: Sequence[RankReport]) -> list[str]:
    """No warnings. Raises BadInput unless the cluster file describes these ranks."""
    if cluster.size != len(ranks):
        raise BadInput(
            f"cluster '{cluster.name}' has {cluster.size} accelerators, but {len(ranks)} ranks were started."
        )
    check_cluster(cluster, ranks)
    return []


def _listed(ranks: Sequence[int]) -> str:
    """0-3, 6 for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
