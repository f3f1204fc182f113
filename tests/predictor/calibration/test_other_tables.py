"""Tables that are no measured steps of whole runs: layer times, and vTrain's composed steps of one node."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from hethub.cli import run
from hethub.predictor.calibration.validate import validate
from hethub.spec.base import write_yaml
from hethub.spec.errors import BadInput
from hethub.spec.plan import save_plan
from tests.predictor.plans import TINY, cluster, uniform

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
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


def test_a_layer_table_without_a_row_that_counts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="none of its 1 rows"):
        validate(table(tmp_path, {**LAYER, "model": "vit_e"}))


@pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data beside the project")
@pytest.mark.parametrize(
    ("name", "rows", "bound"), [("layer_times", 2341, 8.0), ("single_node_steps_a100", 1440, 10.0)]
)
def test_published_tables_are_predicted(name: str, rows: int, bound: float) -> None:
    result = validate(DATA / f"{name}.csv")
    assert len(result["rows"]) == rows
    assert result["mape"] < bound


def case_folder(folder: Path, **measured: Any) -> Path:
    layout = uniform(TINY, cluster(("CPU-core", 1, 4)), tp=1, pp=2, micro_batch=2, batch=16, seq=128, precision="fp32")
    (folder / "case").mkdir()
    write_yaml(layout.cluster.to_dict(), folder / "case" / "cluster.yaml")
    save_plan(layout.plan, folder / "case" / "plan.yaml")
    (folder / "case" / "measured.json").write_text(json.dumps({"step_seconds": 0.1, **measured}))
    return folder / "case"


def test_a_case_may_leave_its_model_to_the_configs_folder(tmp_path: Path) -> None:
    case = case_folder(tmp_path)
    with pytest.raises(BadInput, match=r"there is no model.yaml, and no configs/models folder"):
        validate(case)
    (tmp_path / "configs" / "models").mkdir(parents=True)
    write_yaml(TINY.to_dict(), tmp_path / "configs" / "models" / "any.yaml")
    assert validate(case)["rows"][0]["predicted_seconds"] > 0


@pytest.mark.parametrize("peak", [0, -1, math.nan, math.inf, "much"])
def test_a_case_with_an_impossible_memory_is_refused(tmp_path: Path, peak: Any) -> None:
    with pytest.raises(BadInput, match=r"peak_memory_bytes is .* give a positive number"):
        validate(case_folder(tmp_path, peak_memory_bytes=peak))


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
        ({"micro_batch": None}, "micro_batch is None"),
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


def test_a_json_file_that_is_no_list_of_plans_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mixed.json").write_text(json.dumps(AMP))
    with pytest.raises(BadInput, match="are a list; this holds dict"):
        validate(tmp_path / "mixed.json")
