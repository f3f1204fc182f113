"""One's own measurements correct predictions: tables of steps, and what a run has written."""

import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hethub
from hethub.cli import run
from hethub.predictor import predict
from hethub.predictor.calibration.calibrate import _with_speeds, corrected
from hethub.predictor.calibration.evaluate import evaluate
from hethub.predictor.calibration.fit.least_squares import apply, scales
from hethub.predictor.calibration.sources.training_steps import read_row, read_table
from hethub.predictor.cost.constants import packaged, scales_key
from hethub.predictor.cost.layer import LayerCost
from hethub.predictor.cost.profile import ProfileSpec
from hethub.predictor.cost.profiled_layer import estimated_device
from hethub.predictor.cost.software import hethub_software
from hethub.spec.accelerator import find_accelerator
from hethub.spec.model import ModelSpec
from tests.predictor.calibration.test_validate import ROW, table
from tests.predictor.plans import LLAMA_8B
from tests.support.job_files import write_job

OWN = {"stack": "hethub", "inter_node_gbps": 400}
SHAPE = {"family": "llama", "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 2816, "vocab": 32000, "max_seq_len": 1024}
NODES = [{"name": "n", "accelerator": "A100-SXM4-80GB", "accelerators": 8, "nics": 8, "gbps_per_nic": 200}]


def rows(folder: Path, slower: float, *changes: dict[str, object]) -> Path:
    """A table whose steps took so many times what is predicted."""
    folder.mkdir(exist_ok=True)
    cases, _ = read_table(table(folder, *({**OWN, **change} for change in changes)))
    seconds = [slower * evaluate(case, packaged()).seconds for case in cases]
    measured = ({**OWN, **change, "step_seconds": own} for change, own in zip(changes, seconds, strict=True))
    return table(folder, *measured)


MANY = [{"global_batch": batch, "tp": 1, "dp": 4} for batch in (16, 24, 32, 48, 64, 96)]


def test_many_rows_that_agree_are_believed_and_one_nearly(tmp_path: Path) -> None:
    factors = []
    for name, changes in (("many", MANY), ("one", MANY[-1:])):  # the one with the least beside its compute
        cases, _ = read_table(rows(tmp_path / name, 1.3, *changes))
        constants = corrected(packaged(), cases)
        assert abs(evaluate(cases[0], constants).seconds / cases[0].measured_seconds - 1) < 0.03  # 23 % before
        factors.append(constants.stacks["hethub"])
    many, one = factors
    assert 1.1 < one < many < 1.3


@pytest.mark.parametrize("pp", [4, 8])
def test_steps_of_ones_own_are_priced_as_predict_prices_them(tmp_path: Path, pp: int) -> None:
    """Eight stages with few microbatches were read as interleaved, as Megatron's recipes have it: 12 % too short."""
    own = {**OWN, "layers": 32, "tp": 1, "pp": pp, "dp": 8 // pp}
    (case,), _ = read_table(table(tmp_path, own))
    assert evaluate(case, packaged()).seconds == pytest.approx(predict(case.layouts[0]).step_seconds)
    told = read_row({key: str(value) for key, value in {**ROW, **own, "virtual_stages": 2}.items()})
    assert told.software.interleave == 2


def test_other_accelerators_follow_as_far_as_the_software_is_the_reason(tmp_path: Path) -> None:
    cases, _ = read_table(rows(tmp_path / "own", 1.3, *MANY))
    other, _ = read_table(table(tmp_path, {**OWN, "accelerator": "H100-SXM5-80GB"}))
    before, after = (evaluate(other[0], each).seconds for each in (packaged(), corrected(packaged(), cases)))
    assert 1.1 < after / before < 1.28


@pytest.mark.parametrize("name", ["MI250-GCD", "A800-SXM4-80GB"])
def test_a_chip_under_another_name_measured_as_predicted_stays_as_it_is(name: str) -> None:
    """It lost what was fitted on the chip: a layer on an MI250's half then took 11 % less."""
    device = find_accelerator(name)
    measured = estimated_device(LLAMA_8B, device, 4096, "bf16", 4)
    about = {"date": "", "hethub": hethub.__version__, "software": "test"}
    constants = _with_speeds(packaged(), ProfileSpec(**about, model=LLAMA_8B, devices=(measured,)))
    before, after = (LayerCost(LLAMA_8B, device, 4096, "bf16", constants=own) for own in (packaged(), constants))
    assert after.layer(2).total == pytest.approx(before.layer(2).total, rel=1e-9)
    (slower,) = scales("accelerators", [scales_key(name, "bf16")], 0.1, None)
    priced = LayerCost(LLAMA_8B, device, 4096, "bf16", constants=apply(packaged(), [slower], np.zeros(1)))
    assert priced.layer(2).total == before.layer(2).total


def test_a_run_that_compiled_nothing_measured_as_predicted_changes_no_row() -> None:
    """Its layers were held against compiled ones: rows of an A100 were foretold 52 % longer."""
    device = find_accelerator("A100-SXM4-80GB")
    measured = estimated_device(LLAMA_8B, device, 4096, "bf16", 4, software=hethub_software(False))
    about = {"date": "", "hethub": hethub.__version__, "software": "test"}
    own = ProfileSpec(**about, model=LLAMA_8B, devices=(measured.replace(compiled=False),))
    before, after = (
        LayerCost(LLAMA_8B, device, 4096, "bf16", constants=each)
        for each in (packaged(), _with_speeds(packaged(), own))
    )
    assert after.layer(2).total == pytest.approx(before.layer(2).total, rel=1e-9)


def test_a_chip_measured_in_both_half_precisions_is_as_slow_as_in_each() -> None:
    """They share their scales: two measurements that agree were taken as one on top of the other, 4 times as slow."""
    device = find_accelerator("MI300X")
    measured = tuple(estimated_device(LLAMA_8B, device, 4096, half, 4).slower(2.0) for half in ("bf16", "fp16"))
    about = {"date": "", "hethub": hethub.__version__, "software": "test"}
    constants = _with_speeds(packaged(), ProfileSpec(**about, model=LLAMA_8B, devices=measured))
    before, after = (LayerCost(LLAMA_8B, device, 4096, "fp16", constants=own) for own in (packaged(), constants))
    assert after.layer(2).total == pytest.approx(2 * before.layer(2).total, rel=1e-6)


def test_a_run_in_which_a_rank_was_slow_says_of_rows_what_the_others_do() -> None:
    """Its device type has a name of its own (T4!1), and was refused as not in the catalogue."""
    device = find_accelerator("T4")
    usual = estimated_device(LLAMA_8B, device, 512, "fp16", 2)
    about = {"date": "", "hethub": hethub.__version__, "software": "test"}
    run = ProfileSpec(**about, model=LLAMA_8B, devices=(usual, usual.slower(3.0, "T4!1")))
    constants = _with_speeds(packaged(), run)
    before, after = (LayerCost(LLAMA_8B, device, 512, "fp16", constants=own) for own in (packaged(), constants))
    assert after.layer(1).total == pytest.approx(before.layer(1).total, rel=1e-6)


def predicted(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def job_of(
    folder: Path, train: dict[str, object] | None = None, constraints: dict[str, object] | None = None, **model: object
) -> Path:
    return write_job(
        folder,
        model={"name": "m", "layers": 8, **SHAPE, **model},
        cluster={"name": "eight", "nodes": NODES},
        train={"global_batch": 32, "seq_len": 1024, "precision": "bf16", **(train or {})},
        plan="auto",
        constraints=constraints or {"pp": 1, "tp": 1, "micro_batch": 1},
    )


def test_predict_plan_size_and_validate_take_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, job = rows(tmp_path / "rows", 1.3, *MANY), job_of(tmp_path / "job")
    for command in ("predict", "plan"):
        found = [predicted(capsys, command, job, *more) for more in ((), ("--calibrate", own))]
        plain, calibrated = (each.get("prediction", each)["step_seconds"] for each in found)
        assert calibrated / plain == pytest.approx(1.3, rel=0.06), command
    assert predicted(capsys, "validate", own)["mape"] == pytest.approx(100 * (1 - 1 / 1.3), rel=0.01)
    assert predicted(capsys, "validate", own, "--calibrate", own)["mape"] < 2
    catalogue = tmp_path / "nodes.yaml"
    catalogue.write_text(json.dumps({"nodes": NODES}))
    asked = ("size", job, "--tokens", "1e9", "--catalogue", catalogue)
    plain, calibrated = (predicted(capsys, *asked, *more) for more in ((), ("--calibrate", own)))
    ratio = plain["options"][0]["tokens_per_second"] / calibrated["options"][0]["tokens_per_second"]
    assert ratio == pytest.approx(1.3, rel=0.06)


def test_a_table_of_steps_as_predicted_changes_no_prediction_compiled_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps of a job that compiles nothing were foretold as if it did, 14 % shorter in a layer of 8 B."""
    own = rows(tmp_path / "rows", 1.0, *MANY)
    for compiles in (True, False):
        cut = {"pp": 1, "tp": 2, "micro_batch": 1}  # more than one rank a replica, which "was beyond what was measured"
        job = job_of(tmp_path / f"{compiles}", {"compile": compiles}, constraints=cut)
        plain, calibrated = (predicted(capsys, "predict", job, *more) for more in ((), ("--calibrate", own)))
        assert calibrated["step_seconds"] == pytest.approx(plain["step_seconds"], rel=1e-3), compiles
        assert not calibrated["extrapolated"]


def half_width(capsys: pytest.CaptureFixture[str], job: Path, own: Path) -> float:
    found = predicted(capsys, "predict", job, "--calibrate", own)
    return log(found["step_seconds_interval"][1] / found["step_seconds"])


def test_an_interval_is_as_wide_as_the_rows_lie_apart_and_wider_where_they_say_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, promised = job_of(tmp_path / "job"), packaged().interval
    assert half_width(capsys, job, rows(tmp_path / "rows", 1.3, *MANY)) == pytest.approx(promised["row known"])
    slow, fast = rows(tmp_path / "slow", 2.0, *MANY[::2]), rows(tmp_path / "fast", 1.0, *MANY[1::2])
    scattered = tmp_path / "scattered.csv"
    scattered.write_text(
        slow.read_text() + "".join(fast.read_text().splitlines(keepends=True)[1:]).replace("row", "other")
    )
    assert half_width(capsys, job, scattered) > 0.5 * log(2.0)  # no figure is nearer than that to both
    two = tmp_path / "two.csv"  # each is all that the other says less
    two.write_text("".join((*slow.read_text().splitlines(keepends=True)[:2], scattered.read_text().splitlines()[-1])))
    assert half_width(capsys, job, two) == pytest.approx(log(2.0), rel=0.1)
    others = rows(tmp_path / "others", 1.3, {**MANY[0], "accelerator": "H100-SXM5-80GB"})
    assert half_width(capsys, job, others) == pytest.approx(promised["known"])  # of the software alone
    stack = rows(tmp_path / "stack", 1.3, {**MANY[0], "stack": "megatron"})
    assert half_width(capsys, job, stack) == pytest.approx(promised["unseen stack"])  # of another's


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(list(map(str, arguments))) == 2
    (paragraph,) = capsys.readouterr().err.splitlines()
    return paragraph


def test_what_cannot_calibrate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, job = rows(tmp_path / "rows", 1.3, MANY[0]), job_of(tmp_path / "job")
    for key, mine, theirs in (
        ("hidden", 512, "1024"), ("family", "gpt", "llama"), ("head_size", 256, "128"), ("sliding_window", 64, "None"),
    ):  # fmt: skip
        other = job_of(tmp_path / key, **{{"head_size": "head_dim"}.get(key, key): mine})
        told = refused(capsys, "predict", other, "--calibrate", own)
        assert f"row row0: it measured a model with {key} {theirs}, but model 'm' has {mine}" in told
    assert predicted(capsys, "predict", job_of(tmp_path / "long", sliding_window=1024), "--calibrate", own)
    both = refused(capsys, "predict", job, "--calibrate", own, "--profile", tmp_path / "p.json")
    assert "leave one of them out" in both
    bad = table(tmp_path / "rows", {**ROW, **OWN, "step_seconds": -1})
    assert "row a: step_seconds is -1" in refused(capsys, "plan", job, "--calibrate", bad)
    assert "no row to calibrate by" in refused(capsys, "plan", job, "--calibrate", table(tmp_path / "rows"))
    run_of = {"date": "", "software": "test", "model": {**SHAPE, "name": "m", "layers": 8}, "links": []}
    usual = estimated_device(ModelSpec(**run_of["model"]), find_accelerator("H100-SXM5-80GB"), 1024, "bf16", 32)
    strange = tmp_path / "calibration.json"  # other accelerators' corrected nothing, and nobody was told
    for version, words in ((hethub.__version__, "the profile measured H100-SXM5-80GB in bf16"), ("0", "by hethub 0,")):
        strange.write_text(json.dumps({**run_of, "hethub": version, "devices": [usual.to_dict()]}))
        asked = ("validate", own) if version == "0" else ("predict", job)
        told = refused(capsys, *asked, "--calibrate", strange)
        assert f"{strange}: " in told
        assert words in told
    catalogue = tmp_path / "nodes.yaml"
    catalogue.write_text(json.dumps({"nodes": NODES}))
    size = ("size", job, "--tokens", "1e9", "--catalogue", catalogue)
    assert strange.name in refused(capsys, *size, "--calibrate", strange)
    missing = refused(capsys, "size", job, "--tokens", "1e9", "--calibrate", tmp_path / "none.json")
    assert "none.json" in missing
