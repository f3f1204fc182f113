"""The figures that the predictor is held to: each with its bound, from the last fit and from the table at hand."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any, Literal, NamedTuple

OF_FAMILY = "family out: "  # how the figures of single families begin

THIS_TABLE = "this table"


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
    ("family out", "a family of sources left out, families alike", "at most", (16,), "%"),
    ("family out, ratio", "the same over one utilisation per accelerator and precision", "at most", (0.65,), ""),
    ("source out", "a source left out, sources alike", "at most", (10,), "%"),
    ("anchored by 1", "a source left out, one of its rows known", "at most", (12,), "%"),
    ("anchored by 3", "a source left out, three of its rows known", "at most", (8,), "%"),
    ("pairs in order", "sweeps, their family left out: pairs of plans in order", "at least", (95,), "%"),
    ("regret, worst", "sweeps, their family left out: regret of the predicted best, worst", "at most", (3,), "%"),
    ("coverage", "rows inside their 80 % interval, their family left out", "within", (73, 87), "%"),
    ("interval half width", "half width of that interval, median", "at most", (25,), "%"),
    ("layer times, in the fit", "layer times, forward + backward", "at most", (8,), "%"),
)  # fmt: skip


def fit_goals(figures: Mapping[str, float]) -> list[Goal]:
    """What the last fit reached: on families and sources that it had not seen, and on the layers that it had."""
    return [
        Goal(
            what,
            figures[key],
            sense,
            bound,
            unit,
            f"the last fit, rows it had {'' if 'in the fit' in key else 'not '}seen",
        )
        for key, what, sense, bound, unit in _FITTED
        if key in figures
    ]


class FamilyOut(NamedTuple):
    """The last fit's errors in per cent with a family of sources left out, beside one utilisation per accelerator and
    precision on the same folds."""

    mape: float
    baseline_mape: float
    worst_family: str
    worst_mape: float

    def sentence(self) -> str:
        return (
            f"The last fit is {self.mape:.1f} % off where a family of sources is left out; one utilisation per accelerator "
            f"and precision is {self.baseline_mape:.1f} % off. Worst: {self.worst_family}, {self.worst_mape:.1f} %."
        )


def family_out(figures: Mapping[str, float]) -> FamilyOut | None:
    """What the last fit says of families that it had not seen; None for constants without such figures."""
    each = {key.removeprefix(OF_FAMILY): value for key, value in figures.items() if key.startswith(OF_FAMILY)}
    if not each:
        return None
    worst = max(each, key=lambda name: each[name])
    return FamilyOut(figures["family out"], figures["family out, baseline"], worst, each[worst])


def table_goals(result: Mapping[str, Any], mixed: bool) -> list[Goal]:
    """What the packaged constants reach on the table at hand, whether the fit saw its rows or not."""
    goals = [Goal("rows covered", result["covered_percent"], "at least", (95,), "%", THIS_TABLE)]
    if (memory := result["memory"]["mape"]) is not None:
        goals.append(Goal("peak memory", memory, "at most", (10,), "%", THIS_TABLE))
        below = result["memory"]["below_percent"]
        goals.append(Goal("peak memory, rows more than 5 % above it", below, "at most", (5,), "%", THIS_TABLE))
    if (refused := result["memory"]["refused_percent"]) is not None:
        goals.append(Goal("rows that ran, refused as too large", refused, "at most", (1,), "%", THIS_TABLE))
    if mixed:
        goals += [
            Goal(f"mean error, {name}", group["mape"], "at most", (15,), "%", THIS_TABLE)
            for name, group in result["by"].items()
        ]
    elif sweeps := result["sweeps"]:
        correlations = [sweep["spearman"] for sweep in sweeps]
        goals += [
            Goal("sweeps: rank correlation, mean", fmean(correlations), "at least", (0.95,), "", THIS_TABLE),
            Goal("sweeps: rank correlation, worst", min(correlations), "at least", (0.90,), "", THIS_TABLE),
            Goal("sweeps: regret of the predicted best, worst", max(sweep["regret_percent"] for sweep in sweeps),
                 "at most", (3,), "%", THIS_TABLE),
        ]  # fmt: skip
    return goals
