"""The planner's answer: the plan, what it was compared with, and what was left out."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hethub.planner.evaluate.outlook import Outlook
from hethub.predictor import Prediction
from hethub.spec.cluster import ClusterSpec
from hethub.spec.plan import PlanSpec


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """A plan that fits but is slower, by its step or in the mean over the scenarios; `within_interval`: no slower than the
    winner's 80 % interval reaches."""

    step_seconds: float
    objective_seconds: float | None  # where it was compared over the scenarios
    slower_percent: float
    within_interval: bool
    plan: PlanSpec

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"plan": plan_dict(self.plan)}


@dataclass(frozen=True, kw_only=True)
class HomogeneousPart:
    """One device type alone: its best plan with its part of the batch and nobody else."""

    accelerator: str
    island: str
    count: int
    global_batch: int
    tokens_per_second: float
    memory_lifted: bool  # the device type alone cannot hold the model, so its memory limit was ignored
    cluster: ClusterSpec  # its nodes
    plan: PlanSpec

    def to_dict(self) -> dict[str, Any]:
        shown = {key: value for key, value in vars(self).items() if key != "cluster"}
        return shown | {"plan": plan_dict(self.plan)}


@dataclass(frozen=True, kw_only=True)
class FamilyRow:
    """What a named system would have chosen; None throughout where it has no plan that fits."""

    strategy: str
    step_seconds: float | None
    slower_percent: float | None
    plan: PlanSpec | None

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"plan": self.plan and plan_dict(self.plan)}


TWICE = "twice the batch"


class Bottleneck(NamedTuple):
    """A constraint and by how much more throughput the best plan has when it is relaxed."""

    constraint: str
    faster_percent: float

    def sentence(self) -> str:
        better = "" if self.constraint == TWICE else " 10 % better"
        gain = round(self.faster_percent, 1)
        return f"{self.constraint}{better} makes the best plan {abs(gain):.1f} % {'slower' if gain < 0 else 'faster'}"


class Unsearched(NamedTuple):
    """What was left out: `key` for programs (`schedule.layered`), `text` for people."""

    key: str
    text: str


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """What `plan` returns. `prediction` carries what the makers reach alone and the ceiling."""

    plan: PlanSpec
    prediction: Prediction
    strategy: str
    search_seconds: float
    candidates: int
    outlook: Outlook  # of the plan, where figures are off
    best_on_point: RunnerUp | None  # the plan with the shortest predicted step, if it is another
    runners_up: tuple[RunnerUp, ...]
    not_searched: tuple[Unsearched, ...]
    homogeneous_parts: tuple[HomogeneousPart, ...]
    families: tuple[FamilyRow, ...]  # where explained
    out_of_time: bool
    space_bound_seconds: float | None  # no plan of a small space is faster: it was searched to its end
    reasons: tuple[Bottleneck, ...]  # where explained

    @property
    def lower_bound_seconds(self) -> float:
        """No plan of the space is faster: the ceiling."""
        return self.plan.global_batch * self.plan.seq_len / self.prediction.ceiling_tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """One JSON object: the prediction's keys beside the planner's."""
        return {
            "strategy": self.strategy,
            **self.prediction.to_dict(),
            **asdict(self.outlook),
            "best_on_point": self.best_on_point and self.best_on_point.to_dict(),
            "plan": plan_dict(self.plan),
            "search_seconds": self.search_seconds,
            "out_of_time": self.out_of_time,
            "candidates": self.candidates,
            "lower_bound_seconds": self.lower_bound_seconds,
            "space_bound_seconds": self.space_bound_seconds,
            "runners_up": [runner.to_dict() for runner in self.runners_up],
            "families": [row.to_dict() for row in self.families],
            "gap_percent": 100.0 * (self.prediction.step_seconds / self.lower_bound_seconds - 1.0),
            "kinds_alone": [part.to_dict() for part in self.homogeneous_parts],
            "not_searched": [entry._asdict() for entry in self.not_searched],
            "reasons": [reason._asdict() | {"sentence": reason.sentence()} for reason in self.reasons],
        }


def plan_dict(plan: PlanSpec) -> dict[str, Any]:
    """The plan as its file holds it."""
    return plan.model_dump(mode="json", exclude_defaults=True) | {"version": plan.version}
