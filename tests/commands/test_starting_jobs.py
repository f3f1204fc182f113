"""The jobs in configs/jobs to start from: every one loads and has a plan that fits; a laptop's defaults on devices are
warned of."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from hethub.cli import run
from hethub.planner import plan
from hethub.runtime.launch.preflight import Facts
from hethub.runtime.loop.plan import left_at_defaults
from hethub.spec import documents
from hethub.spec.job import load_job
from tests.support.command import check_refused, one, ranks
from tests.support.job_files import ALONE, write_job
from tests.support.job_files import plan as plan_file

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TO_START_FROM = ("two-racks", "continue-hf", "consumer-cards", "capacity-1t")
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "hidden_act": "silu",
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("name", TO_START_FROM)
def test_a_job_to_start_from_has_a_plan_that_fits(name: str, tmp_path: Path) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    (tmp_path / "my-llama").mkdir()
    (tmp_path / "my-llama" / "config.json").write_text(json.dumps(LLAMA))
    job = load_job(tmp_path / "configs" / "jobs" / f"{name}.yaml")
    assert job.cluster is not None
    constraints = job.spec.constraints.replace(time_limit_seconds=2)
    found = plan(job.model, job.cluster, job.spec.train.batch, constraints, with_bounds=False)
    assert found.prediction.fits
    assert set(found.plan.ranks) == set(range(job.cluster.size))


def test_a_laptops_defaults_on_devices_are_warned_of(tmp_path: Path) -> None:
    gpu = Facts(
        rank=0, host="nv0", local_rank=0, vendor="nvidia", device="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 2**30,
        hethub="0.1.0", python="3.11.4", torch="2.13.0+cu130", byte_order="little", job="a1", tokens="b1",
    )  # fmt: skip
    cpu = Facts(**{**vars(gpu), "vendor": "cpu", "device": "CPU"})
    job = load_job(write_job(tmp_path))
    bare = job.spec.replace(train=type(job.spec.train)(), checkpoint=type(job.spec.checkpoint)())
    left = load_job(job.path)
    object.__setattr__(left, "spec", bare)
    told = left_at_defaults(left, [gpu, cpu])
    assert [text.split()[1] for text in told] == ["train.precision", "train.steps", "checkpoint.every_steps"]
    assert left_at_defaults(left, [cpu, cpu]) == []
    assert left_at_defaults(job, [gpu, gpu]) == []  # whose own these are


def test_no_run_begins_in_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One did, and went with the checkpoint when the run around it kept newer ones."""
    assert run(["launch", str(write_job(tmp_path)), "--dry-run", "--run-dir", "a run/checkpoints/step-2"]) == 2
    said = capsys.readouterr().err
    assert "names a checkpoint" in said
    assert "--resume 'a run/checkpoints/step-2'" in said


def test_tracebacks_that_launch_is_asked_for_are_its_ranks_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`launch --debug` showed those of its own alone, which has hardly any."""
    for given in ([], ["--debug"], ["--accept-changes"]):
        assert run(["launch", str(write_job(tmp_path)), "--dry-run", *given]) == 0
        told = capsys.readouterr().out
        assert [word for word in ("--debug", "--accept-changes") if word in told] == given


@pytest.mark.parametrize("command", [["plan", "job.yaml"], ["init", "laptop"], ["tokenise", "text.txt"]])
def test_a_link_in_a_circle_is_refused_as_what_to_write(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback."""
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("out").symlink_to("out")
    more = ["--tokenizer", "bytes"] if command[0] == "tokenise" else []
    assert run([*command, *more, "--out", "out"]) == 2
    assert "out: this link leads in a circle; remove it or name another." in capsys.readouterr().err
    assert Path("out").is_symlink()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_start_that_the_disk_ends_leaves_nothing(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder was left, and such of its files as found room."""
    out, write = tmp_path / "new" / "job", documents.write_text
    if is_there:
        out.mkdir(parents=True)

    def full(text: str, path: Path) -> None:
        if path.name == "cluster.yaml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(text, path)

    monkeypatch.setattr(documents, "write_text", full)
    assert run(["init", "laptop", "--out", str(out)]) != 0
    assert "cluster.yaml: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == ([out.parent, out] if is_there else [])


@pytest.mark.parametrize("place", ["job", "link"])
@pytest.mark.parametrize("gone", ["", "job.yaml"])
def test_no_run_takes_the_place_of_what_its_job_is_read_from(tmp_path: Path, place: str, gone: str) -> None:
    """`--run-dir .` beside a job wrote over its job.yaml, model.yaml, cluster.yaml and plan.yaml."""
    nodes = [{"name": "here", "accelerator": "CPU-core", "accelerators": 1}]
    job = write_job(tmp_path / "job", cluster={"nodes": nodes}, plan_file=plan_file(ALONE), train={"steps": 1})
    (tmp_path / "link").symlink_to("job")
    if gone:  # the job has another name, and the others are in danger still
        job = job.rename(job.with_name("mine.yaml"))
    before = {path: path.read_bytes() for path in job.parent.iterdir()}
    named = "model.yaml and" if gone else "job.yaml and"
    check_refused(ranks(1, "train", job, "--run-dir", place, cwd=tmp_path), named, "plan.yaml: the job is read from")
    nothing = ranks(1, "train", job, "--resume", place, cwd=tmp_path)  # a folder `checkpoints` was made
    check_refused(nothing, "no complete checkpoint to resume from", "without --resume")
    assert {path: path.read_bytes() for path in job.parent.iterdir()} == before
    ended = one(ranks(1, "train", job, "--run-dir", "job/run", cwd=tmp_path))
    assert ended.exit_code == 0, ended.stderr
    again = ["--resume", "job/run", "--set", "train.steps=2"]
    ended = one(ranks(1, "train", "job/run/job.yaml", *again, cwd=tmp_path))  # a run's own job goes on in its folder
    assert ended.exit_code == 0, ended.stderr
