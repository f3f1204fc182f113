"""The figures that the predictor is held to: each with its bound, from the last fit and from the table at hand."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

# Sources by how their tables name them; the groups are means over sources.
LARGE_CLUSTERS = ("Narayanan", "Korthikanti", "vTrain, multi-node", "llm-foundry", "torchtitan", "fms-fsdp")
OTHERS = ("AMP", "Sailor", "NeuSight", "frontier-torchtitan")


class Goal(NamedTuple):
    """One figure beside what is asked of it; `basis` says on what rows it was taken."""

    what: str
    value: float
    sense: Literal["at most", "at least", "within"]
    bound: tuple[float, ...]
    unit: str
    basis: str

    @property
    def met(self) -> bool:
        if self.sense == "within":
            return self.bound[0] <= self.value <= self.bound[1]
        return self.value <= self.bound[0] if self.sense == "at most" else self.value >= self.bound[0]

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "bound": list(self.bound), "met": self.met}


_FITTED: tuple[tuple[str, str, Literal["at most", "at least", "within"], tuple[float, ...], str], ...] = (
    ("large clusters", "mean error over SC21, Korthikanti, vTrain, llm-foundry, torchtitan, fms-fsdp", "at most", (8,), "%"),
    ("others", "mean error over AMP, Sailor, NeuSight, frontier-torchtitan", "at most", (15,), "%"),
    ("layer times", "layer times, forward + backward", "at most", (8,), "%"),
    ("layer times, accelerator left out", "layer times, all rows of the accelerator left out", "at most", (20,), "%"),
    ("source left out", "a source left out, its stack factor set on three rows: mean", "at most", (15,), "%"),
    ("source left out, worst", "a source left out, its stack factor set on three rows: worst", "at most", (25,), "%"),
    ("coverage", "rows inside their 80 % interval", "within", (75, 85), "%"),
    ("spearman, mean", "sweeps: rank correlation, mean", "at least", (0.95,), ""),
    ("spearman, worst", "sweeps: rank correlation, worst", "at least", (0.90,), ""),
    ("regret, worst", "sweeps: regret of the predicted best, worst", "at most", (3,), "%"),
)  # fmt: skip


def fit_goals(figures: Mapping[str, float]) -> list[Goal]:
    """What the last fit reached on rows that it had not seen."""
    return [
        Goal(what, figures[key], sense, bound, unit, "the last fit, rows it had not seen")
        for key, what, sense, bound, unit in _FITTED
        if key in figures
    ]


def table_goals(result: Mapping[str, Any], mixed: bool) -> list[Goal]:
    """What the packaged constants reach on the table at hand, whether the fit saw its rows or not."""
    goals = [Goal("rows covered", result["covered_percent"], "at least", (95,), "%", "this table")]
    if (memory := result["memory"]["mape"]) is not None:
        goals.append(Goal("peak memory", memory, "at most", (10,), "%", "this table"))
    if mixed:
        goals += [
            Goal(f"mean error, {name}", group["mape"], "at most", (15,), "%", "this table")
            for name, group in result["by"].items()
        ]
    elif sweeps := result["sweeps"]:
        correlations = [sweep["spearman"] for sweep in sweeps]
        goals += [
            Goal("sweeps: rank correlation, mean", fmean(correlations), "at least", (0.95,), "", "this table"),
            Goal("sweeps: rank correlation, worst", min(correlations), "at least", (0.90,), "", "this table"),
            Goal("sweeps: regret of the predicted best, worst", max(sweep["regret_percent"] for sweep in sweeps),
                 "at most", (3,), "%", "this table"),
        ]  # fmt: skip
    return goals


def group_means(by_source: Mapping[str, float]) -> dict[str, float]:
    """The two means over sources, of those that are there."""
    found: dict[str, float] = {}
    for name, prefixes in (("large clusters", LARGE_CLUSTERS), ("others", OTHERS)):
        own = [value for source, value in by_source.items() if _is_of(source, prefixes)]
        if own:
            found[name] = fmean(own)
    return found


def _is_of(source: str, prefixes: Sequence[str]) -> bool:
    return any(source.startswith(prefix) for prefix in prefixes)
