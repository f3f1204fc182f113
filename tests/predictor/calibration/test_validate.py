"""Tables and case folders: what is read, what is skipped with its reason, and that published rows are predicted
well."""

import csv
from pathlib import Path
from typing import Any

import pytest

from hethub.predictor.calibration.sources.training_steps import without_ends
from hethub.predictor.calibration.validation.errors import spearman, summary
from hethub.predictor.calibration.validation.goals import Goal
from hethub.predictor.calibration.validation.validate import validate
from hethub.report.tables import print_validation
from hethub.spec.errors import BadInput

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
ROW = {
    "id": "a", "source": "mine", "family": "llama", "model": "m", "layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 2816,
    "gated": 1, "vocab": 32000, "seq": 1024, "accelerator": "A100-SXM4-80GB", "n_accelerators": 8, "per_node": 8, "tp": 2,
    "pp": 2,
    "cp": 1, "dp": 2, "zero": 0, "micro_batch": 1,
    "global_batch": 16, "precision": "bf16", "recompute": "none", "stack": "mine", "flash_attention": 1,
    "optimizer_included": 1, "suspect": 0, "step_seconds": 0.2, "inter_node_gbps": "",
    "peak_memory_gib": "",
}  # fmt: skip


def table(folder: Path, *changes: dict[str, object]) -> Path:
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerows({**ROW, "id": f"row{index}", **change} for index, change in enumerate(changes))
    return path


def test_suspects_are_listed_but_in_no_mean(tmp_path: Path) -> None:
    result = validate(table(tmp_path, {}, {"suspect": 1, "step_seconds": 1e4}))
    assert result["suspects"] == ["row1"]
    assert len(result["rows"]) == 2
    assert result["mape"] == pytest.approx(abs(result["rows"][0]["error_percent"]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"accelerator": "A100-SXM4-80G"}, "did you mean 'A100-SXM4-80GB'"),
        ({"tp": 3}, "is not n_accelerators 8"),
        ({"micro_batch": 9}, "more than the 8 samples"),
        ({"step_seconds": -1}, "step_seconds is -1; a positive number"),
        ({"layers": 2.5}, "whole number"),
        ({"n_accelerators": 16, "dp": 4}, "gbps_per_nic"),
        ({"precision": "int8"}, "precision int8 is unknown"),
        ({"step_seconds": "nan"}, "step_seconds is nan; a positive number"),
        ({"step_seconds": "abc"}, "step_seconds is 'abc'; a number is needed"),
        ({"layers": "inf"}, "whole number"),
        ({"heads": -8}, "whole number"),
        ({"vocab": 1e12}, "up to 10,000,000"),
        ({"peak_memory_gib": "nan"}, "peak_memory_gib is nan"),
        ({"peak_memory_gib": -3}, "positive number"),
        ({"inter_node_gbps": "inf", "n_accelerators": 16, "dp": 4}, "inter_node_gbps is inf"),
        ({"inter_node_gbps": 0, "n_accelerators": 16, "dp": 4}, "inter_node_gbps is 0"),
    ],
)
def test_a_bad_row_is_skipped_by_name(tmp_path: Path, change: dict[str, object], why: str) -> None:
    result = validate(table(tmp_path, {}, change))
    assert [entry["id"] for entry in result["skipped"]] == ["row1"]
    assert why in result["skipped"][0]["why"]
    assert result["covered_percent"] == 50.0


def test_uneven_rows_are_predicted_as_they_are(tmp_path: Path) -> None:
    """A batch that replicas cannot share equally, micro-batches that do not divide it, a last node not full."""
    uneven = {"micro_batch": 3, "global_batch": 17, "n_accelerators": 12, "dp": 3, "inter_node_gbps": 800}
    result = validate(table(tmp_path, uneven))
    assert not result["skipped"]
    assert 0 < result["rows"][0]["predicted_seconds"] < 10


def test_an_empty_micro_batch_is_chosen_and_named(tmp_path: Path) -> None:
    result = validate(table(tmp_path, {"micro_batch": ""}))
    assert result["rows"][0]["chosen"]["micro_batch"] in (1, 2, 4, 8)
    assert list(result["by"]) == ["mine (micro_batch chosen)"]


def test_a_source_known_to_have_run_another_precision_is_predicted_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {"precision": "fp16", "hidden": 4096, "ffn": 11264}
    result = validate(table(tmp_path, wide, {**wide, "source": "Sailor validation, X"}))
    as_named, as_run = result["rows"]
    assert "computed_in" not in as_named
    assert as_run["computed_in"] == "tf32"
    assert as_run["predicted_seconds"] > 1.2 * as_named["predicted_seconds"]
    print_validation(result)
    assert "1 rows predicted in tf32" in capsys.readouterr().out


def test_no_table_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="lacks the column"):
        validate(tmp_path / "t.csv")
    with pytest.raises(BadInput, match="cannot be read"):
        validate(tmp_path / "none.csv")
    with pytest.raises(BadInput, match="no case here"):
        validate(tmp_path)


def test_means_over_groups_count_every_group_once() -> None:
    result = summary([10.0, -10.0, 40.0], ["a", "a", "b"])
    assert (result["mape"], result["macro_mape"], result["max_error"]) == (20.0, 25.0, 40.0)


def test_spearman() -> None:
    assert spearman([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert spearman([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)


def test_a_tables_figures_stand_beside_what_is_asked(tmp_path: Path) -> None:
    result = validate(table(tmp_path, {"peak_memory_gib": 1.0}, {"tp": 3}))
    goals = {goal["what"]: goal for goal in result["goals"]}
    covered = goals["rows covered"]
    assert (covered["value"], covered["bound"], covered["met"]) == (50.0, [95], False)
    assert goals["peak memory"]["value"] == result["memory"]["mape"]
    assert goals["layer times, forward + backward"]["basis"] == "the last fit, rows it had not seen"


@pytest.mark.parametrize(
    ("sense", "bound", "value", "met"),
    [("at most", (8,), 8.0, True), ("at least", (0.9,), 0.8, False), ("within", (75, 85), 86.0, False)],
)
def test_a_goal_is_met_at_its_bound(sense: Any, bound: tuple[float, ...], value: float, met: bool) -> None:
    assert Goal("x", value, sense, bound, "%", "y").met is met


def test_modules_that_are_no_layers_leave_the_ends() -> None:
    assert without_ends([14, 16], 6) == [12, 12]  # DeepSpeed's GPT-2: 2 + 24 + 4
    assert without_ends([12, 14], 2) == [11, 13]  # embedding and head
    assert without_ends([12, 12], 0) == [12, 12]


@pytest.mark.skipif(not DATA.exists(), reason="needs the measured tables in ../shared/data")
def test_published_steps_are_predicted_within_ten_percent_of_their_means() -> None:
    result = validate(DATA / "measured_steps.csv")
    assert result["covered_percent"] >= 95
    assert result["macro_mape"] <= 8
    assert result["memory"]["mape"] <= 12


@pytest.mark.skipif(not DATA.exists(), reason="needs the measured tables in ../shared/data")
@pytest.mark.parametrize(
    ("name", "rows", "bound"), [("layer_times", 2341, 8.0), ("single_node_steps_a100", 1440, 10.0)]
)
def test_published_tables_are_predicted(name: str, rows: int, bound: float) -> None:
    result = validate(DATA / f"{name}.csv")
    assert len(result["rows"]) == rows
    assert result["mape"] < bound
