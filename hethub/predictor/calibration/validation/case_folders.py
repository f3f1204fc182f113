"""Measured runs of one's own as cases: a folder with cluster.yaml, plan.yaml, measured.json and, unless configs/models
has the model that the plan names, model.yaml."""

from pathlib import Path
from typing import Any

from hethub.predictor.calibration.validation.errors import row, summary
from hethub.predictor.cost.constants import Constants
from hethub.predictor.cost.software import hethub_software
from hethub.predictor.predict import predict
from hethub.spec.base import describe
from hethub.spec.cluster import load_cluster
from hethub.spec.documents import read_json
from hethub.spec.errors import BadInput
from hethub.spec.layout.bind import bind
from hethub.spec.lookup import find_named, load_model
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec, load_plan

CASE_FILES = ("cluster.yaml", "plan.yaml", "measured.json")


def validate_folders(folder: Path, constants: Constants) -> dict[str, Any]:
    """The predictions for a case folder, or for every case folder inside it, as `validate` gives them.

    measured.json holds `step_seconds` and, where known, `peak_memory_bytes` of the fullest rank. Raises BadInput where
    there is no case at all; a case with a fault is skipped with the reason.
    """
    folders = (
        [folder]
        if (folder / "measured.json").exists()
        else sorted(f for f in folder.iterdir() if (f / "measured.json").exists())
    )
    if not folders:
        raise BadInput(
            f"{folder}: no case here; a case is a folder with {', '.join(CASE_FILES)}, or this folder holds such folders."
        )
    rows: list[dict[str, Any]] = []
    skipped = []
    for case in folders:
        try:
            rows.append(_row(case, constants))
        except BadInput as error:
            skipped.append({"id": case.name, "why": str(error)})
    if not rows:
        raise BadInput(f"{folder}: none of its {len(skipped)} cases can be predicted; the first: {skipped[0]['why']}")
    memory = [own for own in rows if "measured_bytes" in own]
    memory_errors = [100.0 * (own["predicted_bytes"] / own["measured_bytes"] - 1.0) for own in memory]
    return {
        "rows": rows,
        **summary([own["error_percent"] for own in rows], [own["source"] for own in rows]),
        "suspects": [],
        "skipped": skipped,
        "covered_percent": 100.0 * len(rows) / (len(rows) + len(skipped)),
        "memory": summary(memory_errors, [own["source"] for own in memory]),
        "sweeps": [],
    }


def _row(case: Path, constants: Constants) -> dict[str, Any]:
    measured = _measured(case / "measured.json")
    plan, cluster = load_plan(case / "plan.yaml"), load_cluster(case / "cluster.yaml")
    software = hethub_software(plan.job.compile if plan.job else None)
    prediction = predict(bind(plan, _model(case, plan), cluster), constants=constants, software=software)
    found = row(case.name, case.parent.name, measured["step_seconds"], prediction.step_seconds)
    if "peak_memory_bytes" in measured:
        found |= {
            "measured_bytes": measured["peak_memory_bytes"],
            "predicted_bytes": max(entry.bytes for entry in prediction.memory),
        }
    return found


def _model(case: Path, plan: PlanSpec) -> ModelSpec:
    """model.yaml of the case, else the model that the plan says it was made for, else that of its name in a configs folder."""
    if (case / "model.yaml").exists():
        return load_model("model.yaml", case)
    if plan.job is not None:
        return plan.job.model
    try:
        return find_named(ModelSpec, "model", plan.model, case / "plan.yaml")
    except BadInput:
        raise BadInput(
            f"{case}: there is no model.yaml, and no configs/models folder above it or here has the plan's model '{plan.model}'; "
            "add model.yaml."
        ) from None


def _measured(path: Path) -> dict[str, float]:
    data = read_json(path, "measurement", unique=True)
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("step_seconds"), (int, float))
        or not 0 < data["step_seconds"] < 1e7
    ):
        raise BadInput(f"{path}: give step_seconds, a positive number of seconds.")
    peak = data.get("peak_memory_bytes", 1)
    if not isinstance(peak, (int, float)) or not 0 < peak < 1e18:
        raise BadInput(
            f"{path}: peak_memory_bytes is {describe(peak)}; give a positive number of bytes, or leave it out."
        )
    return data
