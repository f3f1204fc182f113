"""Jobs: what to train, on what, how; and the loading of everything a job file names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hethub.spec.accelerator import Positive, Precision
from hethub.spec.base import Spec, build
from hethub.spec.cluster import ClusterSpec, NonNegative, load_cluster
from hethub.spec.documents import Source, parse_yaml, read_yaml
from hethub.spec.errors import BadInput, suggest
from hethub.spec.lookup import load_model
from hethub.spec.model import Count, ModelSpec
from hethub.spec.plan import PlanSpec, ScheduleName, load_plan

STRATEGIES = ("auto", "exhaustive", "hethub", "poplar", "cephalo", "zorse", "hap", "uniform")


class DataSpec(Spec):
    """Where tokens come from. `path` is relative to the job file; `python-stdlib` needs none."""

    source: Literal["python-stdlib", "text", "jsonl", "tokens"] = "python-stdlib"
    path: str | None = None
    tokenizer: str = "bytes"  # bytes, or a tokenizer.json
    document_mask: bool = False

    @model_validator(mode="after")
    def _path_where_needed(self) -> "DataSpec":
        if (self.path is None) != (self.source == "python-stdlib"):
            raise ValueError(
                f"source {self.source} needs data.path, the file or folder to read."
                if self.path is None
                else "source python-stdlib reads the interpreter's own files; remove data.path or choose another source."
            )
        return self


class TrainSpec(Spec):
    """The mathematics of training; none of it depends on the plan."""

    steps: Count = 60
    global_batch: Annotated[int, Field(ge=1, le=10_000_000)] = (
        16  # sequences; beyond, microbatches are too many to plan
    )
    seq_len: Count = 128
    precision: Precision = "fp32"
    lr: NonNegative = 3.0e-4
    min_lr: NonNegative = 3.0e-5
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: NonNegative = 0.1
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Positive = 1.0e-8
    grad_clip: Positive | None = 1.0
    seed: int = 1

    @model_validator(mode="after")
    def _lr_falls(self) -> "TrainSpec":
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} exceeds lr {self.lr}; the schedule falls from lr to min_lr.")
        return self

    @property
    def batch(self) -> tuple[int, int, Precision]:
        """What a plan depends on: sequences per step, their length, and the precision."""
        return self.global_batch, self.seq_len, self.precision


class ConstraintsSpec(Spec):
    """What the planner must keep to; an empty value leaves it free."""

    tp: Count | None = None
    pp: Count | None = None
    dp: Count | None = None
    micro_batch: Count | None = None
    max_micro_batch: Count | None = None
    schedule: ScheduleName | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    zero: Annotated[int, Field(ge=0, le=3)] | None = None
    reserve: Annotated[float, Field(ge=0, lt=1)] = 0.06  # of an accelerator's memory, kept free
    forbid: tuple[tuple[str, str], ...] = ()  # pairs of accelerators or vendors that no stage may hold together
    keep_global_batch: bool = False  # where no plan fits, no smaller batch is proposed
    time_limit_seconds: Positive | None = None  # of the search: then the best plan found so far is taken
    seed: int = 0  # reserved: the search draws nothing at random, so every seed has the same answer

    @field_validator("forbid")
    @classmethod
    def _pairs_differ(cls, pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        for one, other in pairs:
            if one == other:
                raise ValueError(f"'{one}' is forbidden beside itself; name two unlike accelerators or vendors.")
        return pairs


class CommunicatorSpec(Spec):
    """How islands are bridged."""

    relay: Literal["auto", "gloo", "shm", "mpi"] = "auto"
    wire: Literal["exact", "bf16", "int8", "fp8"] = "exact"
    # Below a second a heartbeat is late by chance; above a million the clocks of the libraries end.
    timeout_seconds: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = 120.0


class CheckpointSpec(Spec):
    """When a checkpoint is written (every_steps: null, only at the end) and how many are kept."""

    every_steps: Count | None = 20
    keep: Count = 2


class EmulationSpec(Spec):
    """How a cluster marked `emulated` is emulated."""

    time_scale: Positive | None = None  # real seconds per emulated second; None: chosen at start
    # What if an accelerator is slower than planned: the factor by rank.
    slowdown: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=1)]] = {}  # noqa: RUF012


class StragglerSpec(Spec):
    """When a rank counts as slower than planned: by how much beyond the others, and for how many steps on end."""

    threshold: Positive = 0.2
    steps: Count = 5


class JobSpec(Spec):
    """A job file, one to one."""

    model: str
    cluster: str
    data: DataSpec = Field(default_factory=DataSpec)
    train: TrainSpec = Field(default_factory=TrainSpec)
    plan: str = "auto"
    constraints: ConstraintsSpec = Field(default_factory=ConstraintsSpec)
    communicator: CommunicatorSpec = Field(default_factory=CommunicatorSpec)
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    rehearsal: EmulationSpec = Field(default_factory=EmulationSpec)
    profile: str | None = None  # a file made by `hethub profile`, which counts instead of estimates
    # Ranks measure themselves before a plan is made: `auto` on devices, unless micro-batch or profile are given.
    measure: Literal["auto", "always", "never"] = "auto"
    drift: StragglerSpec = Field(default_factory=StragglerSpec)
    # A rank slower than planned is reported, or a new plan taken at the next checkpoint. null: reported, except on
    # CPUs.
    replan: Literal["auto", "report", "never"] | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job file with everything it names loaded. `cluster` is None for `detect`: only the ranks know it."""

    spec: JobSpec
    model: ModelSpec
    cluster: ClusterSpec | None
    path: Path

    @property
    def base(self) -> Path:
        """The folder that the job's relative paths start from."""
        return self.path.parent

    @property
    def plan_path(self) -> Path | None:
        """The plan file the job names, or None where it names a strategy."""
        return None if self.spec.plan in STRATEGIES else self.base / self.spec.plan

    @property
    def hugging_face_folder(self) -> Path | None:
        """The folder to take initial weights from, for a model given as `hf:`."""
        return self.base / self.spec.model[3:] if self.spec.model.startswith("hf:") else None


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job in a YAML file, `overrides` ("train.steps=5") applied first. Raises BadInput."""
    path = Path(path)
    data, source = read_yaml(path, "job file")
    for override in overrides:
        _apply(override, data, source)
    spec = build(JobSpec, data, source, "job file")
    model = load_model(spec.model, path.parent)
    if spec.train.seq_len > model.max_seq_len:
        raise BadInput(
            f"{source.at(('train', 'seq_len'))} is {spec.train.seq_len}, but model '{model.name}' takes at most "
            f"{model.max_seq_len} tokens; shorten train.seq_len or choose a model with a larger max_seq_len."
        )
    cluster = None if spec.cluster == "detect" else load_cluster(path.parent / spec.cluster)
    if cluster is not None:
        _check_slowdown(spec.rehearsal, cluster, source)
    return Job(spec=spec, model=model, cluster=cluster, path=path)


def _check_slowdown(rehearsal: EmulationSpec, cluster: ClusterSpec, source: Source) -> None:
    strangers = [rank for rank in rehearsal.slowdown if rank >= cluster.size]
    if strangers:
        raise BadInput(
            f"{source.at(('rehearsal', 'slowdown'))} names rank {strangers[0]}, but cluster '{cluster.name}' has "
            f"{cluster.size} accelerators; name ranks from 0 to {cluster.size - 1}."
        )


def load_plan_of(job: Job, path: Path) -> PlanSpec:
    """The plan in a YAML file, for use with `job`. Raises BadInput where it was made for other training settings."""
    if path == job.plan_path and not path.exists():
        raise BadInput(
            f"{path}: there is no such plan file, and '{job.spec.plan}' is no strategy; {suggest(job.spec.plan, STRATEGIES)}"
        )
    plan = load_plan(path)
    for key in ("global_batch", "seq_len", "precision"):
        planned, wanted = getattr(plan, key), getattr(job.spec.train, key)
        if planned != wanted:
            raise BadInput(
                f"{path}: the plan was made for {key} {planned}, but the job's train.{key} is {wanted}; plan again, or set "
                "one to the other's value."
            )
    return plan


def _apply(override: str, data: Any, source: Source) -> None:
    """Sets one `key.path=value` in the raw data, the value read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise BadInput(f"--set {override}: write key.path=value, for example --set train.steps=5.")
    value, _ = parse_yaml(text, f"--set {override}", "value")
    *parents, last = key.split(".")
    here = data
    for parent in parents:
        here = here.setdefault(parent, {}) if isinstance(here, dict) else None
    if not isinstance(here, dict):
        raise BadInput(f"--set {override}: {source.name} has no mapping at '{'.'.join(parents)}' to put '{last}' into.")
    here[last] = value
