"""Tables and case folders: what is read, what is skipped with its reason, and that published rows are predicted
well."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from hethub.predictor.calibration.sources.training_steps import read_row, read_table, without_ends
from hethub.predictor.calibration.validation.errors import spearman, summary
from hethub.predictor.calibration.validation.goals import Goal
from hethub.predictor.calibration.validation.validate import validate
from hethub.predictor.cost.constants import packaged
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


def test_a_column_called_nearly_as_one_that_is_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures were left aside without a word; whatever else a table has is its owner's."""
    path = table(tmp_path, {})
    text = path.read_text().replace("peak_memory_gib", "peak_memory_gb").replace("micro_batch", "microbatch")
    path.write_text(text.replace("stack", "colour"))
    result = validate(path)
    assert result["notes"] == [
        "column microbatch is not read; did you mean micro_batch?",
        "column peak_memory_gb is not read; did you mean peak_memory_gib?",
    ]
    print_validation(result)
    assert "did you mean micro_batch?" in capsys.readouterr().out
    assert validate(table(tmp_path, {}))["notes"] == []


def test_the_printed_mean_is_of_as_many_rows_as_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Suspects were counted beside it; where all rows are, there is no mean to print."""
    print_validation(validate(table(tmp_path, {}, {"suspect": 1, "step_seconds": 1e4})))
    told = capsys.readouterr().out
    assert "1 rows: MAPE" in told
    assert "0 skipped, 1 suspect" in told
    print_validation(validate(table(tmp_path, {"suspect": 1}, {"suspect": 1})))
    assert "no row counts: 0 skipped, 2 suspect" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"accelerator": "A100-SXM4-80G"}, "did you mean 'A100-SXM4-80GB'"),
        ({"tp": 3}, "is not n_accelerators 8"),
        ({"micro_batch": 9}, "more than the 8 samples"),
        ({"step_seconds": -1}, "step_seconds is -1; a positive number"),
        ({"layers": 2.5}, "whole number"),
        ({"layers": 1}, "pp 2 leaves a stage without any of the 1 layers"),  # a traceback for the whole table
        ({"n_accelerators": 16, "dp": 4, "accelerator": "Gaudi2"}, "gbps_per_nic"),
        ({"precision": "int8"}, "precision int8 is unknown"),
        ({"family": "lama"}, "the row: family is 'lama', but input should be 'llama', 'gpt'"),  # in pydantic's words
        ({"heads": 7, "kv_heads": 7}, "the row: heads: hidden 1024 is not a multiple of heads 7"),
        ({"recompute": "Full"}, "recompute is 'Full'; it is none, selective or full"),  # counted as another
        ({"flash_attention": "yes"}, "flash_attention is 'yes'; it is 0 or 1"),  # these counted as 0
        ({"gated": "1.0"}, "gated is '1.0'; it is 0 or 1"),
        ({"optimizer_included": "false"}, "optimizer_included is 'false'; it is 0 or 1"),
        ({"suspect": "true"}, "suspect is 'true'; it is 0 or 1"),
        ({"zero": 5}, "zero is 5; it is 0, 1, 2 or 3"),
        ({"step_seconds": "nan"}, "step_seconds is nan; a positive number"),
        ({"step_seconds": "abc"}, "step_seconds is 'abc'; a number is needed"),
        ({"layers": "inf"}, "whole number"),
        ({"step_seconds": "200 ms"}, "step_seconds is '200 ms'; a number is needed, without its unit"),
        ({"step_seconds": 2e-4}, "step_seconds 0.0002 is beyond physics: the products alone take"),
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


def test_rows_that_contradict_each_other_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = validate(table(tmp_path, {}, {"step_seconds": 0.4}, {"micro_batch": 2, "step_seconds": 0.4}))
    assert result["contradictory"] == [["row0", "row1"]]
    print_validation(result)
    assert "rows row0, row1 contradict each other" in " ".join(capsys.readouterr().out.split())


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


def test_no_source_is_treated_unlike_others(tmp_path: Path) -> None:
    """What is scored says itself in which precision it ran."""
    named, other = validate(table(tmp_path, {"precision": "fp16"}, {"precision": "fp16", "source": "Sailor, X"}))[
        "rows"
    ]
    assert named["predicted_seconds"] == other["predicted_seconds"]


def test_what_a_row_leaves_open_is_inferred_as_its_makers_set_it_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_nodes = {"n_accelerators": 16, "dp": 4}
    given = {**two_nodes, "inter_node_gbps": 1600}
    result = validate(table(tmp_path, two_nodes, given, {**two_nodes, "accelerator": "GB200", "per_node": 4}))
    open_row, given_row, domain = result["rows"]
    assert open_row["inferred"]["inter_node_gbps"] == "1600"  # eight cards of 200 Gbit/s each, as an A100 server has
    assert "inter_node_gbps" not in given_row["inferred"]
    assert open_row["predicted_seconds"] == given_row["predicted_seconds"]
    assert domain["inferred"]["fast_domain"] == "16 accelerators"  # four trays of a rack's 72
    print_validation(result)
    assert "inter_node_gbps 1600 (2 rows)" in " ".join(capsys.readouterr().out.split())


def test_gradients_of_a_pipeline_under_zero_2_are_summed_once_a_step(tmp_path: Path) -> None:
    """In Megatron; without a pipeline the level stays."""
    shape = {"stack": "megatron", "zero": 2}
    once, as_one, flat = validate(table(tmp_path, shape, {**shape, "zero": 1}, {**shape, "tp": 4, "pp": 1}))["rows"]
    assert once["predicted_seconds"] == as_one["predicted_seconds"]
    assert "once a step" in once["inferred"]["zero"]
    assert "zero" not in flat["inferred"]


def test_a_long_pipeline_with_few_microbatches_is_interleaved_where_the_row_does_not_say(tmp_path: Path) -> None:
    """In chunks of two layers, as published recipes are."""
    long = {"layers": 32, "tp": 1, "pp": 8, "dp": 1, "global_batch": 16}
    read = [
        next(iter(read_table(table(tmp_path, {**long, **change}))[0])).software.interleave
        for change in ({}, {"global_batch": 64}, {"pp": 4, "dp": 2})
    ]
    assert read == [2, 1, 1]


def test_one_stage_has_nothing_to_interleave(tmp_path: Path) -> None:
    """It ended with a traceback."""
    row = {**ROW, "pp": 1, "dp": 4, "virtual_stages": 7}
    case = read_row({key: str(value) for key, value in row.items()})
    assert case.software.interleave == 1
    assert case.inferred["virtual_stages"] == "7, which in one stage follow each other, as 1 does"


def test_no_table_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="lacks the column"):
        validate(tmp_path / "t.csv")
    with pytest.raises(BadInput, match="there is no such table"):
        validate(tmp_path / "none.csv")
    with pytest.raises(BadInput, match="no case here"):
        validate(tmp_path)
    with pytest.raises(BadInput, match=r"table.csv: the table has no row below the names of its columns\.$"):
        validate(table(tmp_path))
    with pytest.raises(BadInput, match=r"'H100' is not in the catalogue; .*link_gbytes_per_second\.$"):
        validate(table(tmp_path, {"accelerator": "H100"}))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("kv_heads,", "heads,", "has the column(s) heads twice"),  # the last of them counted
        (",mine,", ",mine, of May,", "line 2: it has 32 cells, and the first line names 31 columns"),  # they moved
        (",mine,", ',"mine,', "cannot be read: unexpected end of data"),  # the rest was one cell
        (",", ";", "lacks the column(s) id, source"),
    ],
)
def test_a_table_whose_cells_are_not_its_columns_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    path = table(tmp_path, {})
    text = path.read_text().replace(old, new) if old == "," else path.read_text().replace(old, new, 1)
    path.write_text(text)
    with pytest.raises(BadInput, match=re.escape(why)):
        validate(path)


def test_a_table_that_a_spreadsheet_wrote_is_read(tmp_path: Path) -> None:
    """With a mark of its encoding in front, carriage returns, empty columns behind, and spaces in the first line."""
    plain = table(tmp_path, {})
    before = validate(plain)["rows"]
    lines = plain.read_text().splitlines()
    text = "".join(line + ",,\r\n" for line in [lines[0].replace(",", ", "), *lines[1:]])
    plain.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert validate(plain)["rows"] == before


def test_means_over_groups_count_every_group_once() -> None:
    result = summary([10.0, -10.0, 40.0], ["a", "a", "b"])
    assert (result["mape"], result["macro_mape"], result["max_error"]) == (20.0, 25.0, 40.0)


def test_spearman() -> None:
    assert spearman([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert spearman([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)


def test_a_tables_figures_stand_beside_what_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = validate(table(tmp_path, {"peak_memory_gib": 1.0}, {"tp": 3}))
    goals = {goal["what"]: goal for goal in result["goals"]}
    covered = goals["rows covered"]
    assert (covered["value"], covered["bound"], covered["met"]) == (50.0, [95], False)
    assert goals["peak memory"]["value"] == result["memory"]["mape"]
    assert goals["layer times, forward + backward"]["basis"].startswith("the last fit, rows it had")
    print_validation(result)
    told = capsys.readouterr().out
    assert "rows covered" in told
    assert "layer times" not in told  # ten figures of the last fit stood below every table, under the same heading


def test_rows_that_ran_and_would_be_refused_are_counted(tmp_path: Path) -> None:
    """A layer of 16,384 samples' activations is no A100's; a peak of 60 GiB is more than is predicted of the other."""
    rows = {"peak_memory_gib": 60.0}, {"micro_batch": 16384, "global_batch": 32768, "step_seconds": 1000}
    result = validate(table(tmp_path, *rows))
    goals = {goal["what"]: goal for goal in result["goals"]}
    assert result["memory"]["refused"] == ["row1"]
    assert goals["rows that ran, refused as too large"]["value"] == 50.0
    assert goals["peak memory, rows more than 5 % above it"]["value"] == 100.0


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
def test_published_steps_and_peak_memories_are_predicted() -> None:
    result = validate(DATA / "measured_steps.csv")
    assert result["covered_percent"] >= 95
    assert result["macro_mape"] <= packaged().residuals["source out"]  # the fit has seen these rows
    assert result["memory"]["mape"] <= 12


@pytest.mark.skipif(not DATA.exists(), reason="needs the measured tables in ../shared/data")
@pytest.mark.parametrize(
    ("name", "rows", "bound"), [("layer_times", 2341, 8.0), ("single_node_steps_a100", 1440, 10.0)]
)
def test_published_tables_are_predicted(name: str, rows: int, bound: float) -> None:
    result = validate(DATA / f"{name}.csv")
    assert len(result["rows"]) == rows
    assert result["mape"] < bound
