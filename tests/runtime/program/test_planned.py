"""A program's plan file beside a job: what it was not made for is refused, or priced anew."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hethub.cli import run
from hethub.runtime.program.planned import plan_program, priced, trace_job
from hethub.runtime.program.subject import open_subject
from hethub.runtime.program.train import _Loop
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import CheckpointSpec, load_job
from hethub.spec.program import is_for_cluster
from tests.runtime.program.test_program_jobs import losses, train, write_program_job
from tests.support.command import check_refused, ranks
from tests.support.job_files import MODEL, write_job, write_yaml


def slower(cluster: Path) -> Path:
    """The cluster with links of a ten-millionth."""
    data = yaml.safe_load(cluster.read_text())
    nodes = [{**node, "gbps_per_nic": node["gbps_per_nic"] / 1e7} for node in data["nodes"]]
    write_yaml(cluster.parent / "slower.yaml", {**data, "nodes": nodes})
    return cluster.parent / "slower.yaml"


def test_a_program_is_priced_on_the_cluster_that_it_runs_on(tmp_path: Path) -> None:
    """train took a plan's seconds as they were, whatever the cluster had become."""
    path = write_program_job(tmp_path / "job", "make", size=2)
    job = load_job(path)
    subject = open_subject(job, with_values=False)
    graph = trace_job(job, subject)
    assert job.cluster is not None
    own = job.cluster.replace(emulated=False)
    slow = ClusterSpec.model_validate(yaml.safe_load(slower(path.parent / "cluster.yaml").read_text()))
    plan = plan_program(job, subject, graph, own).plan
    assert is_for_cluster(plan, own.replace(emulated=True))
    assert not is_for_cluster(plan, slow)
    again, there = priced(plan, graph, own), priced(plan, graph, slow)
    assert again.program.replace(proved_optimal=True) == plan.program
    assert there.program.predicted_seconds > 1.1 * plan.program.predicted_seconds
    assert there.program.memory_bytes == plan.program.memory_bytes
    assert not there.program.proved_optimal
    changed = plan.replace(program=plan.program.replace(moves=plan.program.moves[1:]))
    with pytest.raises(BadInput, match="does not fit together"):
        priced(changed, graph, slow)


def test_a_program_is_not_predicted_for_another_batch_precision_or_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was, with the figures of those that it was planned for."""
    job, plan = write_program_job(tmp_path / "job", "make", size=2), tmp_path / "plan.yaml"
    assert run(["plan", str(job), "--out", str(plan)]) == 0
    assert run(["predict", str(job), "--plan", str(plan)]) == 0
    slower(job.parent / "cluster.yaml")
    for change, word in (
        ("train.global_batch=16", "is for global_batch 8, "),
        ("train.precision=fp32", "is for precision fp64, "),
        ("cluster=slower.yaml", "its times are those of cluster"),
        ("model=model.yaml", "is for model own_job.net:make, "),
    ):
        capsys.readouterr()
        assert run(["predict", str(job), "--plan", str(plan), "--set", change]) == 2
        assert word in capsys.readouterr().err
    assert run(["predict", str(job), "--plan", str(tmp_path / "no.yaml")]) == 2  # it was said to lack plan: hap
    assert "no.yaml: there is no such plan file" in capsys.readouterr().err
    assert run(["plan", str(job), "--strategy", "uniform"]) == 2
    assert capsys.readouterr().err.count(str(job)) == 1  # it was named twice
    given = ("train", job, "--plan", plan, "--run-dir", tmp_path / "run")
    check_refused(ranks(2, *given, "--set", "train.precision=fp32", cwd=tmp_path), "precision or code has changed")
    text = plan.read_text()
    assert "shares: [4, 4]" in text
    plan.write_text(text.replace("shares: [4, 4]", "shares: [4, 3]"))  # a sample too few
    check_refused(ranks(2, *given, cwd=tmp_path), str(job), "does not fit together")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("constraints.tp=2", "constraints.tp is for plans of layers"),
        ("drift.steps=3", "drift is for plans of layers"),
        ("parity=report", "parity is for plans of layers"),
        ("replan=report", "replan is for plans of layers"),
        ("profile=profile.json", "profile is for plans of layers"),
        ("train.precision=bf16", "'hap' compute in fp32 or fp64"),
    ],
)
def test_what_programs_do_not_take_is_refused_by_plan_and_doctor(
    change: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`drift`, `parity` and `replan: report` were ignored, and doctor called such jobs ok."""
    job = write_program_job(tmp_path / "job", "make", size=2)
    for command in ("plan", "doctor"):
        assert run([command, str(job), "--set", change]) == 2
        assert words in capsys.readouterr().err


def test_a_laptops_defaults_on_devices_are_warned_of_under_programs_too(tmp_path: Path) -> None:
    said: list[str] = []
    loop: Any = _Loop.__new__(_Loop)
    job = load_job(write_program_job(tmp_path / "job", "make", size=2))
    loop.job, loop.data, loop._losses = job, SimpleNamespace(warnings=[]), []
    object.__setattr__(job, "spec", job.spec.replace(checkpoint=CheckpointSpec()))
    loop._planned = SimpleNamespace(notes=[])
    loop._agreed = SimpleNamespace(warnings=[], facts=[SimpleNamespace(vendor="nvidia")])
    loop._train = lambda warnings, told: said.extend(told) or (0, False)
    loop.run()
    assert [text.split()[:2] for text in said] == [["warning:", "checkpoint.every_steps"]]


def test_runners_up_are_not_asked_of_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(write_program_job(tmp_path / "job", "make", size=2)), "--top", "0"]) == 2
    assert "--top, --profile and --calibrate are for plans of layers" in capsys.readouterr().err


def test_memory_that_the_reserve_leaves_too_small_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told of a smaller model and larger accelerators alone, and of no file."""
    job = write_program_job(tmp_path / "job", "make", size=2)
    assert run(["plan", str(job), "--set", "constraints.reserve=0.99999999"]) == 2
    said = capsys.readouterr().err
    assert f"{job}: no program" in said
    assert "Or lower constraints.reserve (now 0.99999999), which keeps that part of it free." in said


@pytest.mark.parametrize(
    ("was", "now"), [("nn.GELU()", "nn.Tanh()"), ("SyncBatchNorm(24)", "SyncBatchNorm(24, eps=0.5)")]
)
def test_a_run_whose_code_has_changed_goes_on_where_that_is_accepted(was: str, now: str, tmp_path: Path) -> None:
    """Another number in its code was taken without a word."""
    job = write_program_job(tmp_path / "job", "make", size=2)
    train(2, job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    whole = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    (code,) = job.parent.glob("own_*/net.py")
    code.write_text(code.read_text().replace(was, now))
    given = ("train", job, "--resume", tmp_path / "run")
    asks = ("--set", "constraints.reserve=0.2")  # for another program, which is no consent to other code
    check_refused(ranks(2, *given, *asks, cwd=tmp_path), "its code has changed", "--accept-changes")
    train(2, *given[1:], "--accept-changes", cwd=tmp_path)
    assert losses(tmp_path / "run")[:2] == whole[:2]
    assert losses(tmp_path / "run")[2] != whole[2]


def test_a_run_cut_off_before_its_first_checkpoint_begins_again_with_the_code_of_now(tmp_path: Path) -> None:
    job = write_program_job(tmp_path / "job", "make", size=2)
    train(2, job, "--run-dir", tmp_path / "run", cwd=tmp_path)
    whole = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "owner.json").write_text("{}")  # as it is left where all ranks are killed
    (code,) = job.parent.glob("own_*/net.py")
    code.write_text(code.read_text().replace("nn.GELU()", "nn.Tanh()"))
    train(2, job, "--resume", tmp_path / "run", cwd=tmp_path)
    assert len(losses(tmp_path / "run")) == len(whole)
    assert losses(tmp_path / "run")[0] != whole[0]


def test_a_run_goes_on_with_its_own_llama_alone_whatever_that_is_called_by_now(tmp_path: Path) -> None:
    """Another rope_theta was left aside without a word, another norm_eps taken, and another name refused."""
    cluster = {"nodes": [{"name": "alone", "accelerator": "CPU-core", "accelerators": 1}]}
    job, run = write_job(tmp_path, plan="hap", cluster=cluster, train={"steps": 2}), tmp_path / "run"
    train(1, job, "--run-dir", run, cwd=tmp_path)
    given = ("train", job, "--resume", run, "--set", "train.steps=3")
    for change in ("rope_theta", "norm_eps"):
        write_yaml(tmp_path / "model.yaml", {**MODEL, change: 0.5})
        check_refused(ranks(1, *given, cwd=tmp_path), "model.yaml was saved from model", f"{change} ", "0.5 here")
    (run / "model.yaml").unlink()
    check_refused(
        ranks(1, *given, cwd=tmp_path), "step-2 was saved from model", "norm_eps "
    )  # the checkpoint has it too
    write_yaml(tmp_path / "model.yaml", {**MODEL, "name": "renamed"})
    train(1, *given[1:], cwd=tmp_path)
    assert len(losses(run)) == 3
    (ended,) = ranks(1, *given, "--set", "train.steps=4", "--set", "constraints.reserve=0.2", cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    assert "another plan: constraints.reserve was 0.06, is 0.2" in ended.stdout


def test_a_run_begun_again_under_hap_is_of_its_own_model(tmp_path: Path) -> None:
    """The model.yaml of the run before, under a plan of layers, stayed, and the run could not go on."""
    cluster = {"nodes": [{"name": "alone", "accelerator": "CPU-core", "accelerators": 1}]}
    job, run = write_job(tmp_path, plan="auto", cluster=cluster, train={"steps": 1}), tmp_path / "run"
    train(1, job, "--run-dir", run, cwd=tmp_path)
    shutil.rmtree(run / "checkpoints")
    (run / "owner.json").write_text("{}")  # as it is left where all ranks are killed
    write_job(tmp_path, model={"ffn": 128}, plan="hap", cluster=cluster, train={"steps": 1})
    for steps in (1, 2):
        train(1, job, "--resume", run, "--set", f"train.steps={steps}", cwd=tmp_path)
    assert len(losses(run)) == 2
