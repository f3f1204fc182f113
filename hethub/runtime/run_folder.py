"""The run folder: every file of a run lies in it, written by rank 0."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hethub.spec.base import write_yaml
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import Job
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import save_plan


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    loss: float | None  # None where fp16 overflowed in the forward
    tokens: int
    step_seconds: float
    predicted_step_seconds: float | None
    tokens_per_second: float
    grad_norm: float | None  # None where the step was skipped for an overflow of fp16
    lr: float
    memory_bytes: int  # of the rank with the most
    loss_scale: float = 1.0
    communication: dict[str, Any] | None = None  # of rank 0 in this step: operations with their legs, and links
    time_scale: float | None = None  # of an emulation: `step_seconds` are emulated, real seconds divided by this


class RunFolder:
    """Paths of a run and the writing of its small files. Only rank 0 makes one that writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plan(self) -> Path:
        return self.path / "plan.yaml"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    def check_new(self) -> None:
        """Raises BadInput if a run lies here already: nothing is overwritten."""
        if self.metrics.exists():
            raise BadInput(
                f"{self.path}: this folder holds a run already; give another --run-dir, or continue it with --resume {self.path}."
            )

    def check_resumable(self) -> None:
        """Raises BadInput if there is no run to continue here."""
        if not self.plan.exists() or not self.checkpoints.is_dir():
            raise BadInput(
                f"{self.path}: there is no run to resume here (plan.yaml and checkpoints/ are missing); check --resume."
            )

    def start(self, job: Job, layout: Layout, prediction: dict[str, Any], communication: dict[str, Any]) -> None:
        """Writes what the run was given and what was predicted and chosen for it, whole without other files."""
        self.open(job, layout.cluster, prediction, communication)
        write_yaml(layout.model.to_dict(), self.path / "model.yaml")
        save_plan(layout.plan, self.plan)

    def open(self, job: Job, cluster: ClusterSpec, prediction: dict[str, Any], communication: dict[str, Any]) -> None:
        """As `start`, without model and plan."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_yaml(_with_whole_paths(job), self.path / "job.yaml")
        write_yaml(cluster.to_dict(), self.path / "cluster.yaml")
        self._write_json("prediction.json", prediction)
        self._write_json("communicator.json", communication)

    def relays(self) -> dict[str, Any] | None:
        """What the run in this folder communicated over (`World.relays`); None where it has not got that far."""
        path = self.path / "communicator.json"
        if not path.exists():
            return None
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")).get("relays")
        return found

    def _write_json(self, name: str, data: Any) -> None:
        (self.path / name).write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def append_straggler(self, row: dict[str, Any]) -> None:
        """Adds a line about a straggler, a rank slower than planned, or a plan that was changed for it."""
        with (self.path / "drift.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def write_plan(self, layout: Layout, prediction: dict[str, Any]) -> None:
        """Replaces the plan that runs, and its prediction."""
        save_plan(layout.plan, self.plan)
        self._write_json("prediction.json", prediction)

    def write_emulation(self, report: dict[str, Any]) -> None:
        """How an emulation kept its pace."""
        self._write_json("rehearsal.json", report)

    def write_counters(self, rows: list[dict[str, Any]]) -> None:
        """What every rank's communicator counted, by rank."""
        self._write_json("communicator_counters.json", rows)

    def cut_metrics(self, last_step: int) -> None:
        """Drops the lines behind `last_step`, which a resumed run trains again, and one that was never finished."""
        if self.metrics.exists():
            lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= last_step]
            self.metrics.write_text("".join(whole), encoding="utf-8")

    def append(self, metrics: StepMetrics) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(metrics), allow_nan=False) + "\n")

    def log(self, text: str) -> None:
        """Adds a line with the time to log.txt."""
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def _with_whole_paths(job: Job) -> dict[str, Any]:
    """The job as its file has it, paths made absolute so that they hold in the run folder too."""
    data = job.spec.to_dict()
    if job.factory is None:
        is_folder = data["model"].startswith("hf:")
        data["model"] = f"hf:{_whole(job, data['model'][3:])}" if is_folder else _whole(job, data["model"])
    if job.spec.cluster != "detect":
        data["cluster"] = _whole(job, job.spec.cluster)
    if job.spec.profile is not None:
        data["profile"] = _whole(job, job.spec.profile)
    if job.plan_path is not None:
        data["plan"] = _whole(job, job.spec.plan)
    if job.spec.data.path is not None:
        data["data"]["path"] = _whole(job, job.spec.data.path)
    if job.spec.data.tokenizer != "bytes":
        data["data"]["tokenizer"] = _whole(job, job.spec.data.tokenizer)
    return data


def _whole(job: Job, path: str) -> str:
    return str((job.base / path).resolve())


def default_run_folder(job_path: Path) -> Path:
    """runs/NAME-TIME in the current folder."""
    return Path("runs") / f"{job_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
