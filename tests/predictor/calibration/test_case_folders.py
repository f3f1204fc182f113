"""Case folders: measured runs of one's own."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hethub.predictor import predict
from hethub.predictor.calibration.validation.validate import validate
from hethub.predictor.cost.software import hethub_software
from hethub.spec.documents import write_yaml
from hethub.spec.errors import BadInput
from hethub.spec.plan import PlannedFor, save_plan
from tests.predictor.plans import TINY, cluster, uniform


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


def test_a_case_is_of_the_model_that_its_plan_says_it_was_made_for(tmp_path: Path) -> None:
    """A file of that name in configs/models was taken, whatever it held; without one the case was refused."""
    case, found = case_folder(tmp_path), tmp_path / "configs" / "models"
    layout = uniform(TINY, cluster(("CPU-core", 1, 4)), tp=1, pp=2, micro_batch=2, batch=16, seq=128, precision="fp32")
    save_plan(layout.plan, case / "plan.yaml", PlannedFor(model=TINY, cluster=layout.cluster))
    alone = validate(case)["rows"][0]["predicted_seconds"]
    found.mkdir(parents=True)
    write_yaml({**TINY.to_dict(), "ffn": 8 * TINY.ffn}, found / "any.yaml")
    assert validate(case)["rows"][0]["predicted_seconds"] == alone == predict(layout).step_seconds


def test_cases_are_not_grouped_by_columns_that_they_do_not_have(tmp_path: Path) -> None:
    """They were shown by source, and nobody was told."""
    with pytest.raises(BadInput, match=r"--by accelerator: .* is a folder of cases, which have no columns"):
        validate(case_folder(tmp_path), "accelerator")


@pytest.mark.parametrize(
    ("peak", "told"),
    [(0, "0"), (-1, "-1"), (math.nan, "nan"), (math.inf, "inf"), ("much", "'much'"), (None, "nothing")],
)
def test_a_case_with_an_impossible_memory_is_refused(tmp_path: Path, peak: Any, told: str) -> None:
    with pytest.raises(BadInput, match=rf"peak_memory_bytes is {told}; give a positive number"):
        validate(case_folder(tmp_path, peak_memory_bytes=peak))


def test_a_case_is_predicted_as_its_job_ran_it(tmp_path: Path) -> None:
    """What microbatches ran was compiled or not as the plan file's job says: `hethub predict` of it said something else."""
    on = cluster(("A100-SXM4-80GB", 1, 4))
    layout = uniform(TINY, on, tp=1, pp=2, micro_batch=2, batch=16, seq=128)
    case, found = case_folder(tmp_path), {}
    write_yaml(on.to_dict(), case / "cluster.yaml")
    write_yaml(TINY.to_dict(), case / "model.yaml")
    for compiles in (True, False):
        save_plan(layout.plan, case / "plan.yaml", PlannedFor(model=TINY, cluster=on, compile=compiles))
        found[compiles] = validate(case)["rows"][0]["predicted_seconds"]
        assert found[compiles] == predict(layout, software=hethub_software(compiles)).step_seconds
    assert found[True] < found[False]


def test_case_folder(tmp_path: Path) -> None:
    layout = uniform(TINY, cluster(("CPU-core", 1, 4)), tp=1, pp=2, micro_batch=2, batch=16, seq=128, precision="fp32")
    case = tmp_path / "mine"
    case.mkdir()
    write_yaml(layout.model.to_dict(), case / "model.yaml")
    write_yaml(layout.cluster.to_dict(), case / "cluster.yaml")
    save_plan(layout.plan, case / "plan.yaml")
    (case / "measured.json").write_text(json.dumps({"step_seconds": 0.1, "peak_memory_bytes": 1e7}))
    result = validate(tmp_path)
    assert result["rows"][0]["id"] == "mine"
    assert result["memory"]["mape"] > 0
    (case / "measured.json").write_text('{"step_seconds": 0.1}', encoding="utf-8-sig")  # as some editors write
    assert validate(tmp_path)["rows"][0]["id"] == "mine"
    (case / "measured.json").write_text("{}")
    with pytest.raises(BadInput, match="step_seconds"):
        validate(tmp_path)
