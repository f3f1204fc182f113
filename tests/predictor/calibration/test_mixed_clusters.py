"""Measured plans on clusters of unlike accelerators: what is predicted, and what is skipped or refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hethub.predictor.calibration.validation.validate import validate
from hethub.spec.errors import BadInput

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
AMP: dict[str, Any] = {
    "source": "AMP", "tp": 1, "pp": 2, "dp": 2, "micro_batch": 1, "global_batch": 8, "cut_points_of_30_modules": [0, 15, 30],
    "step_seconds": 1.5, "cluster": {"nodes": [["V100-SXM2-16GB", 2], ["T4", 2]], "intra_gbps": [170, 50], "inter_gbps": [10, 10]},
    "model": {"family": "gpt", "layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 52256, "seq": 1024},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dp": 3}, "the stages hold 6 accelerators, the cluster 4"),
        ({"cut_points_of_30_modules": [0, 15, 20]}, "the stages hold"),
        ({"step_seconds": -1}, "no positive time"),
        ({"step_seconds": math.nan}, "no positive time"),
        ({"global_batch": 1}, "without a sample"),
        ({"micro_batch": None}, "micro_batch is nothing"),
        ({"cluster": 3}, "theirs: a value in it is not of the form that theirs has"),
        ({"cluster": {**AMP["cluster"], "nodes": [["V100", 2], ["T4", 2]]}}, "did you mean 'V100-"),
        ({"model": {}}, "'family'"),
    ],
)
def test_broken_plans_on_mixed_clusters_are_named_and_skipped(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps([AMP, {**AMP, **change, "case": "broken"}, 7]))
    result = validate(path)
    assert [row["id"] for row in result["rows"]] == ["case 0"]
    assert [row["id"] for row in result["skipped"]] == ["broken", "case 2"]
    assert why in result["skipped"][0]["why"]
    assert result["skipped"][1]["why"] == "a measured plan is a mapping; this is a number"


@pytest.mark.parametrize(
    ("data", "form"),
    [(AMP, "a mapping"), ("x", "text"), (3, "a number"), (1.5, "a number"), (True, "true or false"), (None, "nothing")],
)
def test_a_json_file_that_is_no_list_of_plans_is_refused(tmp_path: Path, data: Any, form: str) -> None:
    (tmp_path / "mixed.json").write_text(json.dumps(data))
    with pytest.raises(BadInput, match=rf"are a list; this holds {form}\. Name such a file, a table"):
        validate(tmp_path / "mixed.json")


def test_a_table_of_mixed_plans_that_is_none_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('[{"tp": 1}]')
    with pytest.raises(BadInput, match=r"the first: no measured plan as AMP .*: it has no 'cluster'\.$"):
        validate(tmp_path / "t.json")


@pytest.mark.skipif(not DATA.exists(), reason="needs the measured tables in ../shared/data")
def test_plans_on_mixed_clusters_are_predicted() -> None:
    result = validate(DATA / "mixed_cases.json")
    assert result["covered_percent"] == 100
    errors = {goal["what"]: goal["value"] for goal in result["goals"] if goal["what"].startswith("mean error")}
    (of_amp,) = (error for name, error in errors.items() if "AMP" in name)
    assert of_amp < 20  # Sailor's machines' link is not published, and none is chosen on its cases
    assert not result["contradictory"]
