"""Predicted beside measured layer times: a table of microbenchmarks instead of whole steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hethub.predictor.calibration.sources.cells import read_lines
from hethub.predictor.calibration.sources.layer_times import LayerRow, LayerTable, read_layer_row
from hethub.predictor.calibration.validation.errors import row, summary
from hethub.predictor.calibration.validation.goals import fit_goals
from hethub.predictor.cost.constants import Constants
from hethub.spec.errors import BadInput

LAYER_TIME = "forward_ms"  # the column by which a table of layer times is known
COLUMNS = ("model", "hidden", "accelerator", "seq", "precision", "micro_batch", LAYER_TIME, "backward_ms")


def validate_layers(path: Path, by: str, constants: Constants) -> dict[str, Any]:
    """Forward + backward of every row, errors grouped by a column (by accelerator unless another is named).

    Vision models are skipped: their column `seq` is not the number of their tokens. Raises BadInput where no row is
    left.
    """
    by = "accelerator" if by == "source" else by
    found: list[tuple[str, Mapping[str, str], LayerRow]] = []
    skipped = []
    for name, line in read_lines(path, tuple(dict.fromkeys((*COLUMNS, by)))):
        try:
            layer = read_layer_row(line)
            if not layer.is_transformer:
                raise ValueError("a vision model, whose tokens the table does not give")
            found.append((name, line, layer))
        except ValueError as error:
            skipped.append({"id": name, "why": " ".join(str(error).split())})
    if not found:
        raise BadInput(
            f"{path}: none of its {len(skipped)} rows can be predicted; {skipped[0]['why'] if skipped else 'it is empty'}."
        )
    seconds = LayerTable.of([layer for _, _, layer in found]).predict(constants).sum(axis=0)
    rows = [
        row(name, layer.group, sum(layer.seconds), float(value))
        for (name, _, layer), value in zip(found, seconds, strict=True)
    ]
    return {
        "rows": rows,
        **summary([own["error_percent"] for own in rows], [line[by] or "(empty)" for _, line, _ in found]),
        "suspects": [],
        "skipped": skipped,
        "covered_percent": 100.0 * len(rows) / (len(rows) + len(skipped)),
        "constants": constants.count,
        "fitted_on": constants.provenance,
        "goals": [goal.to_dict() for goal in fit_goals(constants.residuals) if goal.what.startswith("layer times")],
    }
