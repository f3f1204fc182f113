"""How far predictions are off: means over rows and groups, and how well plans for one job are ranked."""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from hethub.predictor.calibration.sources.training_steps import Case

SWEEP_COLUMNS = ("source", "model", "accelerator", "n_accelerators", "global_batch", "seq", "precision")
MEASURED = ("id", "step_seconds", "peak_memory_gib", "note")  # columns that do not say what was run
MOST_SPREAD = 1.5  # between the times of rows that are alike otherwise
ENOUGH_PLANS = 5  # in a sweep, for its ranking to mean something


def row(name: str, source: str, measured_seconds: float, predicted_seconds: float) -> dict[str, Any]:
    """One measured step or layer beside its prediction."""
    return {
        "id": name,
        "source": source,
        "measured_seconds": measured_seconds,
        "predicted_seconds": predicted_seconds,
        "error_percent": 100.0 * (predicted_seconds / measured_seconds - 1.0),
    }


def summary(errors: Sequence[float], groups: Sequence[str]) -> dict[str, Any]:
    """Means of |error| in per cent: over rows, over groups, the median, the largest, and each group's own."""
    of: dict[str, list[float]] = {}
    for error, group in zip(errors, groups, strict=True):
        of.setdefault(group, []).append(abs(error))
    by = {group: {"rows": len(own), "mape": fmean(own), "max_error": max(own)} for group, own in sorted(of.items())}
    if not errors:
        return {"mape": None, "macro_mape": None, "median_error": None, "max_error": None, "by": {}}
    return {
        "mape": fmean(map(abs, errors)),
        "macro_mape": fmean(entry["mape"] for entry in by.values()),
        "median_error": median(map(abs, errors)),
        "max_error": max(map(abs, errors)),
        "by": by,
    }


def sweep_of(case: Case) -> tuple[str, ...]:
    """The job and the accelerators of a row: plans that share them are compared."""
    return tuple(case.row.get(column, "") for column in SWEEP_COLUMNS)


def run_of(case: Case) -> tuple[tuple[str, str], ...]:
    """All that a row says of what was run, and nothing that was measured of it."""
    return tuple((column, value) for column, value in case.row.items() if column not in MEASURED)


def sweeps(cases: Sequence[tuple[Case, float]]) -> list[dict[str, Any]]:
    """Plans for the same job on the same accelerators, with predicted seconds: how well they are ranked, and what
    choosing by prediction costs."""
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for case, seconds in cases:
        found.setdefault(sweep_of(case), []).append((seconds, case.measured_seconds))
    result = []
    for key, pairs in found.items():
        if len(pairs) >= ENOUGH_PLANS:
            chosen = min(pairs)[1]
            best = min(measured for _, measured in pairs)
            job = dict(zip(SWEEP_COLUMNS, key, strict=True))
            result.append(
                {
                    **job,
                    "plans": len(pairs),
                    "spearman": spearman(pairs),
                    "regret_percent": 100.0 * (chosen / best - 1.0),
                }
            )
    return result


def contradictory(cases: Sequence[Case]) -> list[list[str]]:
    """The names of rows that say the same of their step, but for a time that differs by more than a half."""
    alike: dict[tuple[tuple[str, str], ...], list[Case]] = {}
    for case in cases:
        alike.setdefault(run_of(case), []).append(case)
    found = []
    for own in alike.values():
        seconds = [case.measured_seconds for case in own]
        if max(seconds) > MOST_SPREAD * min(seconds):
            found.append([case.id for case in own])
    return found


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """The rank correlation of two columns; equal values share their mean rank."""
    a, b = (_ranks([pair[column] for pair in pairs]) for column in (0, 1))
    mean_a, mean_b = fmean(a), fmean(b)
    covariance = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    spread = (sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)) ** 0.5
    return covariance / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
