"""Predictions beside measurements: how far to trust the predictor, by source, accelerator or any other column."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hethub.predictor.calibration.evaluate import Outcome, evaluate
from hethub.predictor.calibration.sources.cells import columns_of
from hethub.predictor.calibration.sources.mixed_clusters import read_mixed
from hethub.predictor.calibration.sources.single_node import ITERATION_TIME, read_single_node
from hethub.predictor.calibration.sources.training_steps import Case, near_misses, read_table
from hethub.predictor.calibration.validation.case_folders import validate_folders
from hethub.predictor.calibration.validation.errors import contradictory, row, summary, sweeps
from hethub.predictor.calibration.validation.goals import family_out, fit_goals, table_goals
from hethub.predictor.calibration.validation.layers import LAYER_TIME, validate_layers
from hethub.predictor.cost.constants import Constants, packaged
from hethub.spec.errors import BadInput

MUCH_BELOW = 5.0  # per cent of a measured peak: a plan so far below might not run


def validate(path: Path, by: str = "source", constants: Constants | None = None) -> dict[str, Any]:
    """What `hethub validate` prints for a table of steps or of layer times (CSV), measured plans on mixed clusters
    (JSON) or a folder of cases.

    Raises BadInput where there is none of them.

    Errors are percents of the measured time. Rows marked suspect are predicted and listed, but stay out of all means;
    rows whose micro-batch the table leaves open are a group of their own.
    """
    constants = constants or packaged()
    if path.is_dir():
        if by != "source":
            raise BadInput(f"--by {by}: {path} is a folder of cases, which have no columns; leave it out.")
        return validate_folders(path, constants)
    mixed = path.suffix == ".json"
    columns = [] if mixed else columns_of(path)
    if LAYER_TIME in columns:
        return validate_layers(path, by, constants)
    read = read_mixed if mixed else read_single_node if ITERATION_TIME in columns else read_table
    cases, skipped = read(path)
    if by != "source" and cases and by not in cases[0].row:
        raise BadInput(f"--by {by}: the table has no such column; its columns are {', '.join(cases[0].row)}.")
    outcomes: list[tuple[Case, Outcome]] = []
    for case in cases:
        try:
            outcomes.append((case, evaluate(case, constants)))
        except BadInput as error:  # a link speed that the row lacks
            skipped.append({"id": case.id, "why": str(error)})
    if not outcomes:
        if not skipped:
            raise BadInput(f"{path}: the table has no row below the names of its columns.")
        why = skipped[0]["why"].rstrip(".")
        raise BadInput(f"{path}: none of its {len(skipped)} rows can be predicted; the first: {why}.")
    sound = [(case, outcome) for case, outcome in outcomes if not case.suspect]
    rows = [_row(case, outcome) for case, outcome in outcomes]
    errors = [own["error_percent"] for own, (case, _) in zip(rows, outcomes, strict=True) if not case.suspect]
    group = _grouping(by)
    result = {
        "rows": rows,
        "notes": [] if ITERATION_TIME in columns else near_misses(columns),
        **summary(errors, [group(case) for case, _ in sound]),
        "suspects": [case.id for case, _ in outcomes if case.suspect],
        "skipped": skipped,
        "covered_percent": 100.0 * len(outcomes) / (len(outcomes) + len(skipped)),
        "contradictory": [] if mixed else contradictory([case for case, _ in sound]),
        "memory": _memory(sound, group),
        "sweeps": sweeps([(case, outcome.seconds) for case, outcome in sound]),
        "constants": constants.count,
        "fitted_on": constants.provenance,
        "family_out": (unseen := family_out(constants.residuals)) and unseen._asdict(),
    }
    goals = [*table_goals(result, mixed), *([] if mixed else fit_goals(constants.residuals))]
    return {**result, "goals": [goal.to_dict() for goal in goals]}


def _grouping(by: str) -> Callable[[Case], str]:
    def group(case: Case) -> str:
        name = case.source if by == "source" else case.row[by] or "(empty)"
        return f"{name} (micro_batch chosen)" if case.open_choice else name

    return group


def _row(case: Case, outcome: Outcome) -> dict[str, Any]:
    found = row(case.id, case.source, case.measured_seconds, outcome.seconds)
    if case.open_choice:
        found["chosen"] = {"micro_batch": outcome.micro_batch, "virtual_stages": case.software.interleave}
    if case.inferred:
        found["inferred"] = dict(case.inferred)
    if case.measured_memory_bytes is not None:
        found |= {"measured_bytes": case.measured_memory_bytes, "predicted_bytes": outcome.bytes}
    return found


def _memory(cases: Sequence[tuple[Case, Outcome]], group: Callable[[Case], str]) -> dict[str, Any]:
    """Errors of predicted peaks; measured rows that ran and would be refused as too large."""
    measured = [(case, outcome) for case, outcome in cases if case.measured_memory_bytes]
    errors = [100.0 * (outcome.bytes / (case.measured_memory_bytes or 1.0) - 1.0) for case, outcome in measured]
    below = [error < -MUCH_BELOW for error in errors]
    return {
        **summary(errors, [group(case) for case, _ in measured]),
        "below_percent": 100.0 * fmean(below) if below else None,
        "refused": [case.id for case, outcome in cases if not outcome.fits],
        "refused_percent": 100.0 * fmean(not outcome.fits for _, outcome in cases) if cases else None,
    }
