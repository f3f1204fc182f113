"""What differs between two plans, and what it costs."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from hethub.predictor import Prediction, predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.layout.bind import bind
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, StageSpec


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One key of the plans with both values, `stages[1].recompute` for example; None where a plan has no such stage."""

    key: str
    first: str | None
    second: str | None


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """Differences of two plans and their predictions; `slower_percent` is the second's step over the first's."""

    differences: tuple[Difference, ...]
    first: Prediction
    second: Prediction

    @property
    def slower_percent(self) -> float:
        return 100.0 * (self.second.step_seconds / self.first.step_seconds - 1.0)

    def parts(self) -> dict[str, float]:
        """Seconds that each part of the step takes longer in the second plan."""
        return {part: self.second.breakdown[part] - seconds for part, seconds in self.first.breakdown.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "differences": [vars(difference) for difference in self.differences],
            "step_seconds": [self.first.step_seconds, self.second.step_seconds],
            "slower_percent": self.slower_percent,
            "parts": self.parts(),
            "memory_bytes": [max(entry.bytes for entry in p.memory) for p in (self.first, self.second)],
        }


def diff(first: PlanSpec, second: PlanSpec, model: ModelSpec, cluster: ClusterSpec) -> PlanDiff:
    """What differs between two plans of one model and cluster. Raises BadInput where either does not belong to them."""
    return PlanDiff(
        differences=tuple(_differences(first, second)),
        first=predict(bind(first, model, cluster)),
        second=predict(bind(second, model, cluster)),
    )


def _differences(first: PlanSpec, second: PlanSpec) -> list[Difference]:
    found = []
    for key in ("global_batch", "seq_len", "precision", "schedule"):
        one, two = str(getattr(first, key)), str(getattr(second, key))
        if one != two:
            found.append(Difference(key=key, first=one, second=two))
    for index, (a, b) in enumerate(zip_longest(first.stages, second.stages)):
        one_stage, two_stage = describe_stage(a), describe_stage(b)
        for key in {**one_stage, **two_stage}:
            if one_stage.get(key) != two_stage.get(key):
                found.append(
                    Difference(key=f"stages[{index}].{key}", first=one_stage.get(key), second=two_stage.get(key))
                )
    return found


def describe_stage(stage: StageSpec | None) -> dict[str, str]:
    """A stage's keys as short text."""
    if stage is None:
        return {}
    return {
        "layers": ", ".join(f"[{start}, {stop})" for start, stop in stage.layers),
        "replicas": describe_replicas(stage),
        "zero": str(stage.zero),
        "recompute": stage.recompute,
        "state_shares": ", ".join(f"{rank}: {share:.4g}" for rank, share in stage.state_shares.items()) or "equal",
    }


def describe_replicas(stage: StageSpec) -> str:
    """Replicas with equal ones together: `8 x TP 2 (ranks 0-15), 4 x 64 samples`."""
    runs: list[list[Any]] = []
    for replica in stage.replicas:
        sort = (replica.tp, replica.micro_batch, replica.samples, replica.in_flight)
        if runs and runs[-1][0] == sort:
            runs[-1][1].extend(replica.ranks)
        else:
            runs.append([sort, list(replica.ranks)])
    return "; ".join(_run(*run) for run in runs)


def _run(sort: tuple[int, int, int, int | None], ranks: list[int]) -> str:
    tp, micro_batch, samples, in_flight = sort
    low, high = min(ranks), max(ranks)
    held = "" if in_flight is None else f", {in_flight} in flight"
    span = f"rank {low}" if low == high else f"ranks {low}-{high}"
    return f"{len(ranks) // tp} x TP {tp} ({span}) with {samples} samples in micro-batches of {micro_batch}{held}"
