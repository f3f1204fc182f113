"""A plan of HAP as a file: which rule every operator of a traced model follows, in which ratios, and what that costs."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hethub.spec.accelerator import Precision
from hethub.spec.base import Spec, load
from hethub.spec.cluster import ClusterSpec, NonNegative
from hethub.spec.documents import dump_yaml, read_yaml, write_whole
from hethub.spec.errors import BadInput, BrokenRule
from hethub.spec.model import Count

Natural = Annotated[int, Field(ge=0)]
Items = Literal["tokens", "samples"]


class AxisSpec(Spec):
    """Dimensions that are cut alike, and how many of its atoms (samples, heads, …) each rank gets."""

    name: str
    shares: tuple[Natural, ...]


class OperatorSpec(Spec):
    """One operator: its rule by number and in words, and what its outputs are moved by."""

    operator: str
    module: str
    direction: Literal["forward", "backward"] = Field(alias="pass")
    number: Natural  # of its rule
    rule: str
    axis: str | None = None  # None: computed whole on every rank
    seconds: NonNegative
    collectives: tuple[str, ...] = ()
    collective_seconds: NonNegative = 0.0
    bytes: Natural = 0


class ProgramSpec(Spec):
    """A program as `Program.to_yaml()` writes it."""

    ranks: Count
    predicted_seconds: Annotated[float, Field(ge=1e-12)]
    optimizer_seconds: NonNegative = 0.0  # contained in them
    memory_bytes: tuple[int, ...]
    proved_optimal: bool
    rounds: int
    fingerprint: str  # of the traced model: a program fits no other
    ratios: dict[str, tuple[float, ...]]  # of the axes that it cuts
    axes: tuple[AxisSpec, ...]
    parameters: dict[str, str]  # the state in which each is kept
    moves: tuple[tuple[int, str, str, str | None], ...]  # tensor, from, to, collective
    computed_whole_without_a_rule: dict[str, str] = {}  # noqa: RUF012
    operators: tuple[OperatorSpec, ...]

    @model_validator(mode="after")
    def _is_of_its_ranks_and_axes(self) -> "ProgramSpec":
        shares = ((("axes", place, "shares"), axis.shares) for place, axis in enumerate(self.axes))
        ratios = ((("ratios", name), parts) for name, parts in self.ratios.items())
        for key, each in ((("memory_bytes",), self.memory_bytes), *ratios, *shares):
            if len(each) != self.ranks:
                raise BrokenRule(f"a list of {len(each)} for {self.ranks} ranks; give a figure for each rank.", *key)
        for place, operator in enumerate(self.operators):
            if operator.axis is not None and operator.axis not in self.ratios:
                raise BrokenRule(
                    f"'{operator.axis}' is no axis that the program has ratios of; known: {', '.join(self.ratios) or 'none'}.",
                    *("operators", place, "axis"),
                )
        return self


class ProgramFor(Spec):
    """What a program was made for, so that its file stands alone. The model is not in it: a model of Python is
    described by its code alone, and the program has every operator."""

    cluster: ClusterSpec
    reserve: Annotated[float, Field(ge=0, lt=1)] = 0.06  # of an accelerator's memory
    items: Items = "samples"  # what a rate counts


class ProgramPlanSpec(Spec):
    """A plan file of strategy `hap`: a program and what it was made for."""

    strategy: Literal["hap"]
    model: str
    cluster: str
    global_batch: Count
    seq_len: Count
    precision: Precision
    program: ProgramSpec
    job: ProgramFor | None = None  # a job given beside the plan counts instead

    @model_validator(mode="after")
    def _is_for_what_it_names(self) -> "ProgramPlanSpec":
        cluster = None if self.job is None else self.job.cluster
        if cluster is not None and (cluster.name, cluster.size) != (self.cluster, self.program.ranks):
            raise ValueError(
                f"the program is for {self.program.ranks} ranks of cluster '{self.cluster}', but job.cluster describes "
                f"'{cluster.name}' with {cluster.size}; correct one, or take `job` out."
            )
        return self


def is_program_plan(path: Path) -> bool:
    """Whether the file at `path` is a plan of HAP's; False where there is none that can be read."""
    try:
        data, _ = read_yaml(path, "plan file")
    except BadInput:
        return False
    return isinstance(data, dict) and data.get("strategy") == "hap"


def is_for_cluster(plan: ProgramPlanSpec, cluster: ClusterSpec) -> bool:
    """Whether a plan's times are those of `cluster`, as far as it says for which it was made; programs are not emulated."""
    return plan.job is None or plan.job.cluster.replace(emulated=cluster.emulated) == cluster


def load_program_plan(path: Path) -> ProgramPlanSpec:
    """The plan in a YAML file. Raises BadInput."""
    return load(ProgramPlanSpec, path, "plan file of strategy hap")


def program_plan_text(plan: ProgramPlanSpec) -> str:
    """The plan as `load_program_plan` reads it."""
    own = plan.model_dump(mode="json", by_alias=True, exclude={"job"})
    job = {} if plan.job is None else {"job": plan.job.model_dump(mode="json", exclude_unset=True, exclude_none=True)}
    return dump_yaml({**own, **job})


def save_program_plan(plan: ProgramPlanSpec, path: Path) -> None:
    write_whole(path, program_plan_text(plan))
