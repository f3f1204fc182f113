"""Jobs: what to train, on what, how; and the loading of everything a job file names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from hethub.spec.accelerator import Positive, Precision
from hethub.spec.base import Spec, build, describe
from hethub.spec.cluster import ClusterSpec, NonNegative
from hethub.spec.documents import Source, read_yaml, set_key
from hethub.spec.errors import BadInput, suggest
from hethub.spec.job.data import DataSpec, EvalSpec
from hethub.spec.lookup import load_cluster_of, load_model_of
from hethub.spec.model import Count, ModelSpec
from hethub.spec.network import RelayName, WireName
from hethub.spec.plan import Index, PlannedFor, PlanSpec, Recompute, Samples, ScheduleName, load_plan

TOKENIZER = "tokenizer.json"  # of a Hugging Face folder
PYTHON = "python:"  # begins the name of a model that is Python: python:package.module:factory
ScheduleKind = Literal["cosine", "wsd", "linear", "constant"]  # of the learning rate
_KINDS = {"enum": list(get_args(ScheduleKind)), "type": "string"}
SCHEDULE_FORMS: dict[str, Any] = {  # as a file may have it
    "anyOf": [_KINDS, {
        "type": "object", "required": ["kind"], "additionalProperties": False,
        "properties": {"kind": _KINDS, "decay_steps": {"type": "integer", "minimum": 1}},
    }]
}  # fmt: skip
STRATEGIES = ("auto", "exhaustive", "hethub", "poplar", "cephalo", "zorse", "hap", "uniform")


class TrainSpec(Spec):
    """The mathematics of training; none of it depends on the plan."""

    steps: int = Field(default=60, ge=1, le=10**12)  # optimizer steps in all
    # sequences of a step; with more there would be too many microbatches to plan
    global_batch: Samples = 16
    seq_len: Count = 128  # tokens of a sequence
    precision: Precision = "fp32"  # of computing; masters are kept in fp32 beside half precisions
    compile: bool | None = None  # a layer's small operations, by Inductor; null: on devices, not on CPUs
    lr: NonNegative = 3.0e-4  # the highest rate
    min_lr: NonNegative = 3.0e-5  # the rate that the schedule falls to
    warmup_steps: int = Field(default=10, ge=0, le=10**12)  # steps over which the rate rises to lr
    schedule: Annotated[ScheduleKind, WithJsonSchema(SCHEDULE_FORMS)] = "cosine"  # of lr; or {kind, decay_steps}
    decay_steps: Count | None = None  # None: until the last step; of wsd its last tenth
    weight_decay: NonNegative = 0.1  # AdamW's, of matrices; norms and biases have none
    # AdamW's decay of its two moments; raise the second for small batches, lower it where the loss spikes.
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Positive = 1.0e-8  # added to AdamW's denominator; raise it where low precision makes steps blow up
    grad_clip: Positive | None = 1.0  # the largest norm of the gradient; null: none
    seed: int = 1  # of initial weights and of the order of samples

    @model_validator(mode="before")
    @classmethod
    def _schedule_as_mapping(cls, data: Any) -> Any:
        """`schedule: {kind: wsd, decay_steps: 500}` says in one place what the two keys say."""
        if isinstance(data, Mapping) and isinstance(schedule := data.get("schedule"), Mapping):
            strange = [key for key in schedule if key not in ("kind", "decay_steps")]
            if strange or "kind" not in schedule or ("decay_steps" in schedule and "decay_steps" in data):
                raise ValueError(
                    f"schedule {dict(schedule)} is a name ({', '.join(get_args(ScheduleKind))}) or a mapping of `kind` and "
                    "`decay_steps`, which then stands nowhere else."
                )
            return {**data, "schedule": schedule["kind"], **{k: v for k, v in schedule.items() if k != "kind"}}
        return data

    @model_validator(mode="after")
    def _rate_falls(self) -> "TrainSpec":
        if self.schedule == "constant" and self.decay_steps is not None:
            raise ValueError("decay_steps goes with a schedule that falls; schedule constant has none. Remove it.")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} exceeds lr {self.lr}; the schedule falls from lr to min_lr.")
        return self

    @property
    def batch(self) -> tuple[int, int, Precision]:
        """What a plan depends on: sequences per step, their length, and the precision."""
        return self.global_batch, self.seq_len, self.precision


class ConstraintsSpec(Spec):
    """What the planner must keep to; an empty value leaves it free."""

    tp: Count | None = None  # tensor-parallel ranks of a replica
    pp: Count | None = None  # pipeline stages
    dp: Count | None = None  # replicas of a stage
    micro_batch: Count | None = None  # samples that a replica processes at once
    max_micro_batch: Count | None = None  # the most samples that the planner may choose; null: what memory allows
    schedule: ScheduleName | None = None  # of the pipeline; null: the planner weighs all (docs/plans.md)
    recompute: Recompute | None = None  # of activations in the backward
    # 0: a stage's replicas lie on one island and hold all state; 1, 2, 3 cut optimizer state, gradients, weights; null: weighed by stage.
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

    relay: Literal["auto", RelayName] = "auto"  # what carries bytes between islands
    wire: WireName = "exact"  # how sums of fp32 pass the bridge; exact loses nothing
    lanes: Count = 1  # TCP connections a pair and way, over which gloo cuts large messages; 1 fills a slow link
    # A rank that is silent for so long counts as failed. Below 1 a slow rank would; above 1e6 libraries overflow.
    timeout_seconds: Annotated[float, Field(ge=1, le=1e6)] = 120.0


class CheckpointSpec(Spec):
    """When a checkpoint is written, and how many are kept."""

    every_steps: Count | None = 20  # null: only at the end
    keep: Count = 2  # how many of the newest stay
    keep_every: Count | None = None  # 5000: those of steps 5000, 10000, … stay for good


class LogSpec(Spec):
    """What is told of the steps of a run, beside metrics.jsonl, which has them all."""

    every_steps: Count = 1  # steps that a line on the terminal and in log.txt stands for
    tensorboard: bool = False  # events in the run folder
    wandb: str | None = None  # the project at Weights & Biases
    profile_steps: tuple[Count, Count] | None = None  # first and last step that torch.profiler traces, on every rank

    @model_validator(mode="after")
    def _profile_ascends(self) -> "LogSpec":
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            given = list(self.profile_steps)
            raise ValueError(f"profile_steps {given} end before they begin; give the first step and the last.")
        return self


class EmulationSpec(Spec):
    """How a cluster marked `emulated` is emulated."""

    time_scale: Positive | None = None  # real seconds per emulated second; None: chosen at start
    # What if an accelerator is slower than planned: the factor by rank.
    slowdown: dict[Index, Annotated[float, Field(ge=1)]] = {}  # noqa: RUF012


class StragglerSpec(Spec):
    """When a rank counts as slower than planned: by how much beyond the others, and for how many steps on end."""

    threshold: Positive = 0.2  # 0.2: a rank takes 20 % longer for its plan than the others do
    steps: Count = 5  # in a row that a rank must be slow in to be named


class JobSpec(Spec):
    """A job file, one to one."""

    model: str  # a model file, hf:FOLDER, or python:package.module:factory
    cluster: str  # a cluster file, or detect: what the ranks find
    data: DataSpec = Field(default_factory=DataSpec)
    train: TrainSpec = Field(default_factory=TrainSpec)
    eval: EvalSpec | None = None  # loss and perplexity on held-out samples while it trains; null: never
    plan: str = "auto"  # auto, another strategy, or a plan file
    constraints: ConstraintsSpec = Field(default_factory=ConstraintsSpec)
    communicator: CommunicatorSpec = Field(default_factory=CommunicatorSpec)
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    log: LogSpec = Field(default_factory=LogSpec)
    rehearsal: EmulationSpec = Field(default_factory=EmulationSpec)
    profile: str | None = None  # a file made by `hethub profile`, which counts instead of estimates
    # Ranks measure themselves before a plan is made: `auto` on devices, once, unless micro-batch or profile are given;
    # `always` each time, CPUs too, but no emulated ones.
    measure: Literal["auto", "always", "never"] = "auto"
    parity: Literal["stop", "report", "never"] = "stop"  # where makers meet: a device of each against fp64 formulas
    drift: StragglerSpec = Field(default_factory=StragglerSpec)
    # A rank slower than planned: reported, or a new plan taken at the next checkpoint. never: ranks are not timed. null:
    # reported, except on CPUs.
    replan: Literal["auto", "report", "never"] | None = None
    lora: None = None  # reserved: there is no LoRA, every weight is trained


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job file with everything it names loaded. `cluster` is None for `detect`: only the ranks know it."""

    spec: JobSpec
    described: ModelSpec | None  # None: the model is Python's own
    cluster: ClusterSpec | None
    path: Path
    source: Source = field(compare=False, repr=False)

    @property
    def model(self) -> ModelSpec:
        """The model's description. Raises BadInput for a model of Python, which only its own code describes."""
        if self.described is None:
            raise BadInput(
                f"{self.source.at(('model',))} {self.spec.model} is Python, which only strategy 'hap' can cut: `hethub plan`, "
                "`predict` and `train` take it with plan: hap. Set that where it is missing; for anything else name a model file."
            )
        return self.described

    @property
    def factory(self) -> str | None:
        """`package.module:factory` of a model given as `python:`."""
        return self.spec.model.removeprefix(PYTHON) if self.spec.model.startswith(PYTHON) else None

    @property
    def base(self) -> Path:
        """The folder that the job's relative paths start from."""
        return self.path.parent

    @property
    def files(self) -> list[Path]:
        """What the job is read from: its file, and those of its model, cluster and profile."""
        named = (self.spec.model, self.spec.cluster, self.spec.profile)
        return [self.path, *(self.base / name for name in named if name is not None)]

    @property
    def plan_path(self) -> Path | None:
        """The plan file the job names, or None where it names a strategy."""
        return None if self.spec.plan in STRATEGIES else self.base / self.spec.plan

    @property
    def hugging_face_folder(self) -> Path | None:
        """The folder to take initial weights from, for a model given as `hf:`."""
        return self.base / self.spec.model[3:] if self.spec.model.startswith("hf:") else None

    def planned_for(self, model: ModelSpec, cluster: ClusterSpec) -> PlannedFor:
        """What the file of a plan that is made under this job says."""
        train, reserve = self.spec.train, self.spec.constraints.reserve
        return PlannedFor(model=model, cluster=cluster, reserve=reserve, compile=train.compile)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job in a YAML file, `overrides` ("train.steps=5") applied first. Raises BadInput."""
    path = Path(path)
    data, source = read_yaml(path, "job file")
    for override in overrides:
        set_key(override, data, source)
    spec = _with_tokenizers(build(JobSpec, data, source, "job file"), path.parent, source)
    model = None if spec.model.startswith(PYTHON) else load_model_of(spec.model, path.parent, source)
    if model is not None and spec.train.seq_len > model.max_seq_len:
        raise BadInput(
            f"{source.at(('train', 'seq_len'))} is {describe(spec.train.seq_len)}, but model '{model.name}' takes at most "
            f"{model.max_seq_len} tokens; shorten train.seq_len or choose a model with a larger max_seq_len."
        )
    if (traced := spec.log.profile_steps) is not None and traced[0] > spec.train.steps:
        raise BadInput(
            f"{source.at(('log', 'profile_steps'))} is {list(traced)}, but train.steps is {spec.train.steps}, so nothing would be "
            "traced; name steps that are trained, or remove it."
        )
    cluster = load_cluster_of(spec.cluster, path.parent, source)
    _check_emulation(spec, cluster, source)
    return Job(spec=spec, described=model, cluster=cluster, path=path, source=source)


def _with_tokenizers(spec: JobSpec, base: Path, source: Source) -> JobSpec:
    """The job with the tokenizers that it leaves out: a Hugging Face folder's own where it has one, and the job's for
    what it evaluates."""
    data, folder = spec.data, spec.model.removeprefix("hf:")
    has_own = spec.model.startswith("hf:") and (base / folder / TOKENIZER).is_file()
    if "tokenizer" not in data.model_fields_set and has_own:
        data = data.replace(tokenizer=f"{folder}/{TOKENIZER}")
    if (evaluation := spec.eval) is not None:
        shared = {key: getattr(data, key) for key in ("tokenizer", "bos", "document_mask")}
        for key, own in shared.items():
            if key in evaluation.data.model_fields_set and (given := getattr(evaluation.data, key)) != own:
                raise BadInput(
                    f"{source.at(('eval', 'data', key))} is {describe(given)}, but the model is trained with "
                    f"data.{key} {describe(own)}, and is evaluated likewise; leave it out."
                )
        evaluation = evaluation.replace(data=evaluation.data.replace(**shared))
    return spec.replace(data=data, eval=evaluation) if (data, evaluation) != (spec.data, spec.eval) else spec


def _check_emulation(spec: JobSpec, cluster: ClusterSpec | None, source: Source) -> None:
    if spec.measure == "always" and cluster is not None and cluster.emulated:
        said = f"{source.at(('measure',))} is always, but accelerators of cluster '{cluster.name}' are emulated"
        raise BadInput(f"{said}, so there is nothing to measure. Remove it, or name a cluster that is not emulated.")
    if cluster is not None and (strangers := [rank for rank in spec.rehearsal.slowdown if rank >= cluster.size]):
        raise BadInput(
            f"{source.at(('rehearsal', 'slowdown'))} names rank {strangers[0]}, but cluster '{cluster.name}' has "
            f"{cluster.size} accelerators; name ranks from 0 to {cluster.size - 1}."
        )
    given = next((key for key, value in spec.rehearsal.to_dict().items() if value), None)
    if given is not None and (cluster is None or not cluster.emulated):
        whose = "that the ranks find (`cluster: detect`)" if cluster is None else f"of cluster '{cluster.name}'"
        raise BadInput(
            f"{source.at(('rehearsal', given))} is for clusters marked `emulated: true`; accelerators {whose} run at their own speed. "
            "Remove it, or name such a cluster."
        )


def load_plan_of(job: Job, path: Path) -> PlanSpec:
    """The plan in a YAML file, for use with `job`. Raises BadInput where it was made for other training settings."""
    if path == job.plan_path:
        check_plan_path(job)
    plan = load_plan(path)
    for key in ("global_batch", "seq_len", "precision"):
        planned, wanted = getattr(plan, key), getattr(job.spec.train, key)
        if planned != wanted:
            raise BadInput(
                f"{path}: the plan was made for {key} {planned}, but {job.source.at(('train', key))} is {wanted}; plan again or change it."
            )
    return plan


def check_plan_path(job: Job) -> None:
    """Raises BadInput where what a job names as its plan is neither a strategy nor a file."""
    if job.plan_path is not None and (job.plan_path.is_dir() or not job.plan_path.exists()):
        raise BadInput(
            f"{job.source.at(('plan',))}: {job.plan_path}: there is no such plan file, and '{job.spec.plan}' is no strategy; "
            + suggest(job.spec.plan, STRATEGIES)
        )
