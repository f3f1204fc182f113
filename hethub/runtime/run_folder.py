"""The run folder: every file of a run lies in it, written by rank 0."""

import json
import mmap
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from hethub.runtime.metrics import StepMetrics
from hethub.spec.base import Spec, build, describe
from hethub.spec.cluster import ClusterSpec, load_cluster
from hethub.spec.documents import Source, dump_yaml, read_bytes, read_json, set_aside, write_whole
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import Job
from hethub.spec.layout.bind import Layout
from hethub.spec.network import RelayName
from hethub.spec.plan import plan_text

AUTO = Path("auto")  # `--resume auto`: the run folder to be found
# Everything in the folder but owner.json and checkpoints/.
FILES = (
    "job.yaml", "model.yaml", "cluster.yaml", "plan.yaml", "prediction.json", "communicator.json", "profile.json", "calibration.json",
    "metrics.jsonl", "drift.jsonl", "log.txt", "rehearsal.json", "communicator_counters.json", "trace.json",
    "report.html",
)  # fmt: skip
# What holds for a run's ranks and for no others.
_OF_RANKS = ("communicator.json", "calibration.json", "communicator_counters.json", "rehearsal.json")
_MOST_METRICS_BYTES = 2**33
SETTLING_STEPS = 2  # the first steps, which warm up and count memory, left out of the measured time


def _ascending(rows: tuple[tuple[int, str], ...]) -> tuple[tuple[int, str], ...]:
    if not rows or rows[0][0] != 0 or list(rows) != sorted(rows):
        raise ValueError("sizes ascend from 0 on.")
    return rows


Thresholds = Annotated[tuple[tuple[Annotated[int, Field(ge=0)], RelayName], ...], AfterValidator(_ascending)]


class RelaysTaken(Spec, extra="ignore"):
    """The relays inside a host and between hosts, by size."""

    near: Thresholds
    far: Thresholds


class CommunicatorFile(Spec, extra="ignore"):
    """The part of communicator.json that a resumed run uses again."""

    relays: RelaysTaken | None = None


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
    def cluster(self) -> Path:
        return self.path / "cluster.yaml"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    def check_new(self, *, was_cut_off: bool = False) -> None:
        """Raises BadInput if a run lies here already: nothing is overwritten but one that `was_cut_off` before its
        first checkpoint."""
        if self.metrics.exists() and not was_cut_off:
            raise BadInput(
                f"{self.path}: this folder holds a run already; give another --run-dir, or continue it with --resume"
                f" {shlex.quote(str(self.path))}."
            )
        self._check_files()

    def check_resumable(self, *, was_cut_off: bool = False) -> None:
        """Raises BadInput if there is no run to continue here, nor one that `was_cut_off` before it wrote anything."""
        if not was_cut_off and not any(path.exists() for path in (self.plan, self.checkpoints)):
            raise BadInput(
                f"{self.path}: there is no run to resume here (plan.yaml and checkpoints/ are missing); check --resume."
            )
        self._check_files()

    def _check_files(self) -> None:
        """Raises BadInput where what a run writes is something else than a file: a link would lead out of the folder."""
        for path in (self.path / name for name in FILES):
            if path.is_symlink():
                raise BadInput(
                    f"{path}: is a link, and a run writes its own files only; replace it by what it leads to."
                )
            if path.exists() and not path.is_file():
                raise BadInput(f"{path}: is no file, but a run writes a file of that name; move it away.")
            if path.exists() and not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
                raise BadInput(f"{path}: this user may not read and write it, but the run goes on in it; allow it.")
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise BadInput(f"{self.checkpoints}: is no folder, but a run's checkpoints lie in it; move it away.")

    def start(self, job: Job, layout: Layout, prediction: dict[str, Any], communication: dict[str, Any]) -> None:
        """Writes what the run was given and what was predicted and chosen for it, each whole without other files."""
        self.open(job, layout.cluster, _plan_text(job, layout), prediction, communication)

    def open(
        self, job: Job, cluster: ClusterSpec, plan: str, prediction: dict[str, Any], communication: dict[str, Any]
    ) -> None:
        """Do what `start` does, with `plan` as the text of a plan file."""
        with self._writing("job.yaml"):
            self.path.mkdir(parents=True, exist_ok=True)
        if not self.has_ranks_of(cluster):  # as long as the old cluster's file tells: a start may be cut off behind it
            self._remove(*_OF_RANKS)
        self._write("job.yaml", dump_yaml(with_whole_paths(job)))
        self._write(self.cluster.name, dump_yaml(cluster.to_dict()))
        if job.described is None:
            self._remove("model.yaml")  # of a run that was cut off before this one
        else:
            self._write("model.yaml", dump_yaml(job.described.to_dict()))
        self._write_plan(plan)
        self._write_json("prediction.json", prediction)
        self._write_json("communicator.json", communication)

    def has_ranks_of(self, cluster: ClusterSpec) -> bool:
        """Whether the run here was last on such accelerators, on as many machines."""
        try:
            before = load_cluster(self.cluster)
        except BadInput:
            return False
        return same_ranks(before, cluster)

    def relays(self, cluster: ClusterSpec) -> dict[str, Any] | None:
        """What the run in this folder communicated over (`World.relays`); None where it has not got that far, or was on
        other ranks than the cluster's. Raises BadInput."""
        path = self.path / "communicator.json"
        if not path.exists() or not self.has_ranks_of(cluster):
            return None
        try:
            source = Source(str(path))
            found = build(CommunicatorFile, read_json(path, "record of the relays"), source, "record of the relays")
        except BadInput as error:
            raise BadInput(f"{error} Restore the file, or delete it: relays are then chosen anew.") from None
        return None if found.relays is None else found.relays.model_dump(mode="json")

    def _write_json(self, name: str, data: Any) -> None:
        self._write(name, json.dumps(data, indent=1, allow_nan=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        with self._writing(name):
            write_whole(self.path / name, text)

    def _remove(self, *names: str) -> None:
        for name in names:
            with self._writing(name):
                (self.path / name).unlink(missing_ok=True)

    def _append(self, name: str, line: str) -> None:
        with self._writing(name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Raises RunFailed for what the system refuses."""
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"{self.path / name}: cannot be written ({error.strerror}). Make room or allow it, then go on with --resume "
                f"{self.path}; checkpoints that were whole are untouched."
            ) from None

    def append_straggler(self, row: dict[str, Any]) -> None:
        """Adds a line about a straggler, a rank slower than planned, or a plan that was changed for it."""
        self._append("drift.jsonl", json.dumps(row, allow_nan=False))

    def write_plan(self, job: Job, layout: Layout, prediction: dict[str, Any]) -> None:
        """Replaces the plan that runs, and its prediction."""
        self._write_plan(_plan_text(job, layout))
        self._write_json("prediction.json", prediction)

    def _write_plan(self, text: str) -> None:
        """The plan file; the trace of steps under another plan goes."""
        with self._writing(self.trace.name):
            if not self.plan.exists() or self.plan.read_text(encoding="utf-8", errors="replace") != text:
                self.trace.unlink(missing_ok=True)
        self._write(self.plan.name, text)

    def write_profile(self, profile: dict[str, Any] | None) -> None:
        """What counts instead of estimates, as a profile file has it. Where nothing does, what other ranks had measured
        goes: the next start would take it for these."""
        if profile is not None:
            return self._write_json(self.profile.name, profile)
        self._remove(self.profile.name)

    def write_calibration(self, profile: dict[str, Any]) -> None:
        """What the run has shown of every device type's speed, for `--calibrate`."""
        self._write_json("calibration.json", profile)

    def write_emulation(self, report: dict[str, Any]) -> None:
        """How an emulation kept its pace."""
        self._write_json("rehearsal.json", report)

    def write_counters(self, rows: list[dict[str, Any]]) -> None:
        """What every rank's communicator counted, by rank."""
        self._write_json("communicator_counters.json", rows)

    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without one that was never finished. Raises BadInput naming a damaged one."""
        found = []
        for number, line in enumerate(_read_lines(self.metrics, "metrics"), 1):
            row = _row(line)
            if row is None:
                raise BadInput(f"{self.metrics}, line {number}: is no line of metrics: {describe(line)}. Take it out.")
            found.append(row)
        return found

    def newest_rows(self, count: int) -> list[dict[str, Any]]:
        """The last `count` of `rows`, without reading those before them. Raises BadInput as `rows`."""
        if not self.metrics.exists() or not self.metrics.stat().st_size:
            return []
        with self.metrics.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            stop = start = content.rfind(b"\n") + 1
            for _ in range(count):
                start = content.rfind(b"\n", 0, max(0, start - 1)) + 1
            lines = _lines(content[start:stop])
        rows = [_row(line) for line in lines]
        if None in rows:
            line = describe(lines[rows.index(None)])
            raise BadInput(f"{self.metrics}: near its end is what is no line of metrics: {line}. Take it out.")
        return [row for row in rows if row is not None]

    def cut_behind(self, last_step: int) -> list[str]:
        """Drops the lines of steps behind `last_step`, which a resumed run trains again, and one that was never finished.

        What to say of metrics that were lost: damaged lines are dropped too, and the file as it was is kept.
        """
        self._cut_stragglers(last_step)
        lines = _read_lines(self.metrics, "metrics")
        rows = [_row(line) for line in lines]
        kept = {
            row["step"]: line
            for row, line in zip(rows, lines, strict=True)
            if row is not None and row["step"] <= last_step
        }
        said = []
        if damaged := rows.count(None):
            with self._writing(self.metrics.name):
                was = set_aside(self.metrics)
            said.append(f"damaged lines in metrics.jsonl: {damaged}; as it was, it is {was.name} now")
        if missing := [step for step in range(1, last_step + 1) if step not in kept]:
            said.append(
                f"metrics.jsonl lacks {len(missing)} of the {last_step} steps before this one, {missing[0]} to {missing[-1]}"
            )
        if self.metrics.exists() or damaged:
            self._write(self.metrics.name, "".join(f"{kept[step].decode()}\n" for step in sorted(kept)))
        return said

    def _cut_stragglers(self, last_step: int) -> None:
        path = self.path / "drift.jsonl"
        if path.exists():
            rows = map(_of_step, _read_lines(path, "drift"))
            kept = [row for row in rows if row is not None and row["step"] <= last_step]
            self._write(path.name, "".join(f"{json.dumps(row)}\n" for row in kept))

    def append(self, metrics: StepMetrics) -> None:
        self._append(self.metrics.name, json.dumps(metrics.to_dict(), allow_nan=False))

    def log(self, text: str) -> None:
        """Adds a line with the time to log.txt."""
        self._append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def same_ranks(before: ClusterSpec, now: ClusterSpec) -> bool:
    """Whether the ranks are alike in what they measure: each one's machine and accelerator, and whether they are emulated."""
    alike = [(place.machine, place.accelerator) for place in before.places]
    return before.emulated == now.emulated and alike == [(place.machine, place.accelerator) for place in now.places]


def _read_lines(path: Path, what: str) -> list[bytes]:
    """The finished lines of a file, none where it is missing. Raises BadInput."""
    return _lines(read_bytes(path, what, _MOST_METRICS_BYTES)) if path.exists() else []


def _lines(content: bytes) -> list[bytes]:
    """Finished lines: what stands behind the last end of line was cut off."""
    return content.split(b"\n")[:-1]


def _of_step(line: bytes) -> dict[str, Any] | None:
    """A line that tells of a step, None where it does not."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] >= 1 else None


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of metrics, None where it is none."""
    row = _of_step(line)
    is_row = (
        row is not None
        and isinstance(row.get("step_seconds"), int | float)
        and isinstance(row.get("loss", ""), int | float | None)
    )
    return row if is_row else None


def _plan_text(job: Job, layout: Layout) -> str:
    """A plan file that stands alone."""
    return plan_text(layout.plan, job.planned_for(layout.model, layout.cluster))


def with_whole_paths(job: Job) -> dict[str, Any]:
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
    _make_whole(job, data["data"])
    if job.spec.eval is not None:
        _make_whole(job, data["eval"]["data"])
    return data


def _make_whole(job: Job, data: dict[str, Any]) -> None:
    """Makes the paths of a section of data absolute."""
    for source in data.get("sources", [data]):
        if source.get("path") is not None:
            source["path"] = _whole(job, source["path"])
    if data["tokenizer"] != "bytes":
        # Of a link the place: what belongs to the tokenizer lies beside it, in Hugging Face's cache for one.
        beside, name = os.path.split(data["tokenizer"])
        data["tokenizer"] = str(Path(_whole(job, beside), name))


def _whole(job: Job, path: str) -> str:
    return str((job.base / path).resolve())


def run_and_step(path: Path) -> tuple[Path, int | None]:
    """The run folder `path`, None; where it is the checkpoint RUN_DIR/checkpoints/step-N, RUN_DIR and N."""
    match = re.fullmatch("step-([0-9]+)", path.absolute().name)
    if match is None or path.absolute().parent.name != "checkpoints":
        return path, None
    return path.parent.parent if path.parent.name == "checkpoints" else path.absolute().parents[1], int(match[1])


def run_folders(job_path: Path) -> list[Path]:
    """The folders that `default_run_folder` has named for the job, and `RunClaim.take_new` made; those of exp-2.yaml
    are none of exp.yaml's."""
    named = re.compile(rf"{re.escape(job_path.stem)}-[0-9]{{8}}-[0-9]{{6}}(-[0-9]+)?")
    return [path for path in Path("runs").glob("*") if named.fullmatch(path.name) and path.is_dir()]


def default_run_folder(job_path: Path) -> Path:
    """runs/NAME-TIME in the current folder."""
    return Path("runs") / f"{job_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def logs_written(job: Job, run_dir: Path | None, resume: Path | None) -> dict[Path, int]:
    """The log.txt of every run folder that a start may write to, and when they were last written, in nanoseconds."""
    named = [run_and_step(path)[0] for path in (run_dir, resume) if path is not None and path != AUTO]
    files = [folder / "log.txt" for folder in named or run_folders(job.path)]
    return {file: file.stat().st_mtime_ns for file in files if file.exists()}


def has_finished(job: Job, before: Mapping[Path, int], now: Mapping[Path, int]) -> bool:
    """Whether a run that was started since `before`, as its log tells, has come to the job's last step, or was there already."""
    runs = [RunFolder(file.parent).rows() for file, time in now.items() if before.get(file) != time]
    return any(rows and rows[-1]["step"] >= job.spec.train.steps for rows in runs)
