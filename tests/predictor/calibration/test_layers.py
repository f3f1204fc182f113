"""Tables of layer times: what is skipped, and what a model that is not known must say."""

import csv
from pathlib import Path
from typing import Any

import pytest

from hethub.cli import run
from hethub.predictor.calibration.validation.validate import validate
from hethub.spec.errors import BadInput

LAYER = {
    "model": "llama_7b", "hidden": 4096, "params_per_layer": "", "accelerator": "A100-SXM4-80GB", "seq": 1024, "precision": "fp16",
    "micro_batch": 2, "forward_ms": 6.0, "backward_ms": 12.0,
}  # fmt: skip


def table(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "layers.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": "vit_g"}, "vision model"),
        ({"model": "falcon"}, "add columns heads and kv_heads"),
        ({"accelerator": "A100-SXM4-80G"}, "did you mean 'A100-SXM4-80GB'"),
        ({"forward_ms": "nan"}, "no positive times"),
        ({"seq": ""}, "line 3"),
        ({"seq": 0}, "seq is 0; a whole number"),  # tracebacks, this and the next
        ({"heads": "0", "kv_heads": ""}, "heads is 0; a whole number"),
        ({"micro_batch": -2}, "micro_batch is -2; a whole number"),
        (
            {"heads": 7, "kv_heads": 7},
            "line 3: the row: heads: hidden 4096 is not a multiple of heads 7",
        ),  # in pydantic's words
        ({"precision": "int4"}, "precision int4 is unknown"),  # counted as another
        ({"forward_ms": "6 ms"}, "forward_ms is '6 ms'; a number is needed, without its unit"),
        ({"forward_ms": 0.006, "backward_ms": 0.012}, "beyond physics"),  # seconds
        ({"params_per_layer": 5}, "params_per_layer 5 is not more than attention's"),
    ],
)
def test_broken_rows_of_a_layer_table_are_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], why: str
) -> None:
    path = table(tmp_path, LAYER, {**LAYER, **change})
    result = validate(path)
    assert [row["id"] for row in result["rows"]] == ["line 2"]
    assert [row["id"] for row in result["skipped"]] == ["line 3"]
    assert run(["validate", str(path)]) == 0
    assert why in capsys.readouterr().out


def test_a_model_that_is_not_known_names_its_heads(tmp_path: Path) -> None:
    own = {**LAYER, "model": "falcon", "heads": 32, "kv_heads": 8}
    fewer, equal = (
        validate(table(tmp_path, row))["rows"][0]["predicted_seconds"] for row in (own, {**own, "kv_heads": 32})
    )
    assert fewer < equal


def test_a_layer_table_may_leave_the_parameters_out(tmp_path: Path) -> None:
    """It ended in a traceback."""
    row = {**LAYER, "model": "falcon", "heads": 32, "kv_heads": 8}
    del row["params_per_layer"]
    assert len(validate(table(tmp_path, row))["rows"]) == 1


def test_a_layer_table_without_a_row_that_counts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "times.csv").write_text("forward_ms\n1\n")
    with pytest.raises(BadInput, match=r"lacks the column\(s\) model, hidden, accelerator, seq, [^;]*backward_ms; its"):
        validate(tmp_path / "times.csv")
    with pytest.raises(BadInput, match="none of its 1 rows"):
        validate(table(tmp_path, {**LAYER, "model": "vit_e"}))
