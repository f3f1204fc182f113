"""Predictions beside measurements: how far to trust the predictor, by source, accelerator or any other column."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hethub.predictor.calibration.evaluate import Outcome, evaluate
from hethub.predictor.calibration.goals import fit_goals, table_goals
from hethub.predictor.calibration.sources.other_tables import SINGLE_NODE_TIME, read_mixed, read_single_node
from hethub.predictor.calibration.sources.tables import Case, columns_of, read_table
from hethub.predictor.cost.constants import Constants, packaged
from hethub.spec.errors import BadInput

SWEEP_COLUMNS = ("source", "model", "accelerator", "n_accelerators", "global_batch", "seq", "precision")
LAYER_TIME = "forward_ms"  # the column by which a table of layer times is known
ENOUGH_PLANS = 5  # in a sweep, for its ranking to mean something


def validate(path: Path, by: str = "source", constants: Constants | None = None) -> dict[str, Any]:
    """What `hethub validate` prints for a table of steps or of layer times (CSV), measured plans on mixed clusters
    (JSON) or a folder of cases.

    Raises BadInput where there is none of them.

    Errors are percents of the measured time. Rows marked suspect are predicted and listed, but stay out of all means;
    rows whose micro-batch the table leaves open are a group of their own.
    """
    if path.is_dir():
        from hethub.predictor.calibration.sources.case_folders import validate_folders

        return validate_folders(path)
    constants = constants or packaged()
    mixed = path.suffix == ".json"
    if not mixed and LAYER_TIME in columns_of(path):
        from hethub.predictor.calibration.validate_layers import validate_layers

        return validate_layers(path, by, constants)
    cases, skipped = _read(path)
    if by != "source" and cases and by not in cases[0].row:
        raise BadInput(f"--by {by}: the table has no such column; its columns are {', '.join(cases[0].row)}.")
    outcomes: list[tuple[Case, Outcome]] = []
    for case in cases:
        try:
            outcomes.append((case, evaluate(case, constants)))
        except BadInput as error:  # a link speed that the row lacks
            skipped.append({"id": case.id, "why": str(error)})
    if not outcomes:
        why = skipped[0]["why"] if skipped else "the table is empty"
        raise BadInput(f"{path}: none of its {len(skipped)} rows can be predicted; the first: {why}.")
    sound = [(case, outcome) for case, outcome in outcomes if not case.suspect]
    rows = [_row(case, outcome) for case, outcome in outcomes]
    group = _grouping(by)
    result = {
        "rows": rows,
        **summary([_error(case, outcome) for case, outcome in sound], [group(case) for case, _ in sound]),
        "suspects": [case.id for case, _ in outcomes if case.suspect],
        "skipped": skipped,
        "covered_percent": 100.0 * len(outcomes) / (len(outcomes) + len(skipped)),
        "memory": _memory(sound, group),
        "sweeps": sweeps([(case, outcome.seconds) for case, outcome in sound]),
        "constants": constants.count,
        "fitted_on": constants.provenance,
    }
    goals = [*table_goals(result, mixed), *([] if mixed else fit_goals(constants.residuals))]
    return {**result, "goals": [goal.to_dict() for goal in goals]}


def _read(path: Path) -> tuple[list[Case], list[dict[str, str]]]:
    if path.suffix == ".json":
        return read_mixed(path)
    return read_single_node(path) if SINGLE_NODE_TIME in columns_of(path) else read_table(path)


def _grouping(by: str) -> Callable[[Case], str]:
    def group(case: Case) -> str:
        name = case.source if by == "source" else case.row[by] or "(empty)"
        return f"{name} (micro_batch chosen)" if case.open_choice else name

    return group


def _error(case: Case, outcome: Outcome) -> float:
    return 100.0 * (outcome.seconds / case.measured_seconds - 1.0)


def _row(case: Case, outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": case.id,
        "source": case.source,
        "measured_seconds": case.measured_seconds,
        "predicted_seconds": outcome.seconds,
        "error_percent": _error(case, outcome),
    }
    if case.open_choice:
        row["chosen"] = {"micro_batch": outcome.micro_batch, "virtual_stages": case.software.interleave}
    if (ran_in := case.software.math) and ran_in != case.row["precision"]:
        row["computed_in"] = ran_in
    if case.measured_memory_bytes is not None:
        row |= {"measured_bytes": case.measured_memory_bytes, "predicted_bytes": outcome.bytes}
    return row


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


def _memory(cases: Sequence[tuple[Case, Outcome]], group: Callable[[Case], str]) -> dict[str, Any]:
    measured = [(case, outcome) for case, outcome in cases if case.measured_memory_bytes]
    errors = [100.0 * (outcome.bytes / (case.measured_memory_bytes or 1.0) - 1.0) for case, outcome in measured]
    return summary(errors, [group(case) for case, _ in measured])


def sweeps(cases: Sequence[tuple[Case, float]]) -> list[dict[str, Any]]:
    """Plans for the same job on the same accelerators, with predicted seconds: how well they are ranked, and what
    choosing by prediction costs."""
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for case, seconds in cases:
        key = tuple(case.row.get(column, "") for column in SWEEP_COLUMNS)
        found.setdefault(key, []).append((seconds, case.measured_seconds))
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
