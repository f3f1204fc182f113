"""What `hethub plan` refuses: clusters, batches and constraints that leave no plan, each in a paragraph that names
them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from hethub.cli import run
from tests.support.job_files import program_plan

MODEL = {
    "name": "m",
    "layers": 4,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 4,
    "ffn": 704,
    "vocab": 512,
    "max_seq_len": 256,
}
OWN = {
    "name": "own", "vendor": "nvidia", "memory_gb": 40, "memory_gbytes_per_second": 1000, "fp32_tflops": 20, "bf16_tflops": 100,
    "fp16_tflops": 100, "link_gbytes_per_second": 50,
}  # fmt: skip


def node(name: str = "nv", accelerator: Any = "A100-SXM4-80GB", **changes: Any) -> dict[str, Any]:
    return {"name": name, "accelerator": accelerator, "accelerators": 2, "nics": 1, "gbps_per_nic": 100} | changes


AMD = node("amd", "MI250X-GCD")
WITHOUT_MEMORY = {key: value for key, value in OWN.items() if key != "memory_gb"}
SINGLES = [node("nv", accelerators=1, count=3), node("amd", "MI250X-GCD", accelerators=1, count=2)]

# Each: the nodes, the batch, the constraints, and what the paragraph must say.
REFUSED: dict[str, tuple[list[dict[str, Any]], int, dict[str, Any], str]] = {
    "an empty cluster": ([], 16, {}, "cluster.yaml, line 2: nodes is [], but it needs at least 1 item"),
    "a node without accelerators": ([node(accelerators=0)], 16, {}, "nodes[0].accelerators is 0, but"),
    "zero bandwidth": ([node(gbps_per_nic=0), AMD], 16, {}, "nodes[0].gbps_per_nic is 0"),
    "a link without bandwidth": (
        [node(accelerator=OWN | {"link_gbytes_per_second": 0})],
        16,
        {},
        "link_gbytes_per_second is 0",
    ),
    "no memory figure": (
        [node(accelerator=WITHOUT_MEMORY)],
        16,
        {},
        "nodes[0].accelerator.memory_gb is missing; add it.",
    ),
    "more stages than layers": ([node(count=4), AMD], 16, {"pp": 6}, "pp: 6 contradicts the 4 layers of model 'm'"),
    "chunks of one layer": (
        [node(), AMD],
        16,
        {"schedule": "interleaved", "pp": 4},
        "schedule: interleaved with pp: 4 (two chunks of layers or more in every stage) contradicts the 4 layers of 'm'",
    ),
    "a batch smaller than its replicas": ([node(), AMD], 2, {"dp": 4}, "dp: 4 contradicts global_batch 2"),
    "degrees beyond the cluster": (
        [node(), AMD],
        16,
        {"pp": 3, "dp": 2},
        "pp: 3 with dp: 2 contradicts the 4 accelerators",
    ),
    "a pair of one": (
        [node(), AMD],
        16,
        {"forbid": [["amd", "amd"]]},
        "constraints.forbid: 'amd' is forbidden beside itself",
    ),
    "constraints with their file": (
        [node(), AMD],
        16,
        {"schedule": "zero_bubble", "recompute": "full"},
        "/job.yaml, line 4: constraints.schedule: zero_bubble contradicts recompute: full",
    ),
    "a precision with its file": ([node("t", "T4")], 16, {}, "/job.yaml, line 6: train.precision bf16: accelerator T4"),
    "an unknown constraint": (
        [node(), AMD],
        16,
        {"forbit": []},
        "constraints.forbit is not a known key; did you mean 'forbid'",
    ),
}


def write_job(folder: Path, nodes: list[dict[str, Any]], batch: int, constraints: dict[str, Any]) -> Path:
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    (folder / "cluster.yaml").write_text(yaml.safe_dump({"name": "lab", "nodes": nodes}, sort_keys=False))
    train = {"global_batch": batch, "seq_len": 128, "precision": "bf16"}
    job = {"model": "model.yaml", "cluster": "cluster.yaml", "train": train, "constraints": constraints}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_a_paragraph(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes, batch, constraints, words = REFUSED[name]
    job = write_job(tmp_path, nodes, batch, constraints)
    assert run(["plan", str(job), "--out", str(tmp_path / "plan.yaml")]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert not out
    assert err.count("\n") == 1
    assert not (tmp_path / "plan.yaml").exists()


def test_one_accelerator_has_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(write_job(tmp_path, [node(accelerators=1)], 16, {})), "--json"]) == 0


@pytest.mark.parametrize(
    ("nodes", "batch", "given"),
    [
        (SINGLES, 1, {}),
        ([node(), AMD], 16, {"forbid": [["amd", "nvidia"]], "pp": 1}),
        ([node(accelerators=3), AMD], 16, {"tp": 2}),
    ],
)
def test_what_not_all_accelerators_can_take_leaves_some_unused(
    nodes: list[dict[str, Any]],
    batch: int,
    given: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was refused, though a part of the cluster has a plan."""
    assert run(["plan", str(write_job(tmp_path, nodes, batch, given)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["unused"]


@pytest.mark.parametrize(
    ("nodes", "given"),
    [
        ([node(accelerators=1)], {}),
        ([node()], {"pp": 1}),
        ([node("nv", "A10G", accelerators=1), node("amd", "MI300X", accelerators=1)], {}),
    ],
)
def test_one_stage_may_be_interleaved(
    nodes: list[dict[str, Any]], given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused as needing two stages, and `auto` answered with it unasked."""
    job = write_job(tmp_path, nodes, 4, {"schedule": "interleaved", **given})
    assert run(["plan", str(job), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["plan"]
    assert answer["schedule"] == "interleaved"
    assert all(len(stage["layers"]) > 1 for stage in answer["stages"])


def test_constraints_are_set_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, [node(), AMD], 16, {})
    assert run(["plan", str(job), "--set", "constraints.pp=3", "--set", "constraints.dp=2"]) == 2
    assert "pp: 3 with dp: 2 contradicts" in capsys.readouterr().err


def test_a_plan_that_cannot_be_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """'fits' was all that was said of Gaudis, on which nothing trains."""
    job = write_job(tmp_path, [node("g", "Gaudi2", accelerators=1)], 4, {})
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({**MODEL, "family": "gpt", "kv_heads": None}))
    assert run(["plan", str(job)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "hethub trains on nvidia, amd, cpu alone, not on intel: this plan is a figure and cannot be run" in said
    assert "hethub trains family llama alone, not gpt: this plan" in said
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({**MODEL, "gated": False}))
    assert run(["plan", str(job)]) == 0
    assert "alone, not gated: false: this plan" in " ".join(capsys.readouterr().out.split())
    assert run(["plan", str(write_job(tmp_path, [node()], 4, {})), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_trained"] == []


def test_a_plan_that_leaves_a_maker_unused_that_cannot_be_started_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was said of Gaudis without a layer, but every rank of the cluster file is started."""
    slow = {**OWN, "name": "slow", "vendor": "intel", "fp32_tflops": 0.01, "bf16_tflops": 0.01}
    job = write_job(tmp_path, [node(), node("g", slow, accelerators=1)], 4, {})
    assert run(["plan", str(job), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"]["unused"] == [2]
    assert answer["not_trained"] == [
        "hethub starts unused ranks too, and none on intel (leave these nodes out of the cluster file)"
    ]


@pytest.mark.parametrize("text", ["stages: [", "", "\N{BYTE ORDER MARK}[]"], ids=["broken", "empty", "a list"])
def test_what_may_be_a_plan_is_not_called_a_job_alone(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a damaged plan it was said that the job file is no YAML."""
    (tmp_path / "plan.yaml").write_text(text)
    assert run(["predict", str(tmp_path / "plan.yaml")]) == 2
    assert " job or plan file is " in capsys.readouterr().err


@pytest.mark.parametrize("given", ["plan it", "predict it", "plan job.yaml --profile it", "validate it", "report it"])
def test_what_can_be_read_once_or_never_is_refused(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A FIFO was waited for without end."""
    write_job(tmp_path, [node()], 4, {})
    monkeypatch.chdir(tmp_path)
    os.mkfifo("it")
    assert run(given.split()) == 2
    assert "it: this is a FIFO, and " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("profile", "words"), [("no.json", "no.json: there is no such profile"), (".", "this is a folder")]
)
def test_a_profile_that_a_job_names_is_refused_at_its_line(
    profile: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the profile's own path was told."""
    job = write_job(tmp_path, [node()], 4, {})
    job.write_text(f"profile: {profile}\n{job.read_text()}")
    assert run(["plan", str(job)]) == 2
    told = capsys.readouterr().err
    assert "job.yaml, line 1: profile: " in told
    assert words in told


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ({"predicted_seconds": 0}, "program.predicted_seconds is 0, but"),
        ({"memory_bytes": [1]}, "program.memory_bytes: a list of 1 for 4 ranks"),
        ({"ratios": {"samples": []}}, "program.ratios.samples: a list of 0 for 4 ranks"),
        ({"axes": [{"name": "samples", "shares": [8]}]}, "program.axes[0].shares: a list of 1 for 4 ranks"),
        ({"ratios": {}}, "program.operators[0].axis: 'samples' is no axis that the program has ratios of"),
    ],
)
def test_a_program_that_contradicts_itself_is_refused(
    program: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback."""
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(program_plan(**program)))
    assert run(["predict", str(tmp_path / "plan.yaml")]) == 2
    assert words in capsys.readouterr().err
