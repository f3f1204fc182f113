"""The main job as users start it: under mpirun and alone (torchrun: test_resume.py), and every file it leaves."""

import json
import os
import pty
import re
import sys

import pytest

from hethub.spec.cluster import load_cluster
from hethub.spec.layout.bind import bind
from hethub.spec.layout.execution import actions
from hethub.spec.lookup import load_model
from hethub.spec.plan import load_plan
from tests.support.command import (
    HETHUB,
    PROJECT,
    Running,
    files_below,
    hethub,
    mpirun,
    needs_mpirun,
    one,
    ranks,
)
from tests.support.job_files import write_job

CONFIGS = PROJECT / "configs"
STEPS, TRACED = 8, 3
METRICS = [
    "step", "loss", "tokens", "step_seconds", "predicted_step_seconds", "tokens_per_second", "grad_norm", "lr", "memory_bytes",
]  # fmt: skip


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    """The README's command, fewer steps."""
    folder = tmp_path_factory.mktemp("main")
    run = folder / "run"
    job = CONFIGS / "jobs" / "laptop-mixed.yaml"
    ended = mpirun(
        4,
        "train",
        job,
        "--run-dir",
        run,
        "--set",
        f"train.steps={STEPS}",
        "--set",
        "checkpoint.every_steps=3",
        cwd=folder,
    )
    assert ended.exit_code == 0, ended.stderr
    return ended, run


@needs_mpirun
def test_the_run_folder_holds_what_the_interface_names(main_job):
    _, run = main_job
    names = {path.name for path in run.iterdir()}
    assert {
        "job.yaml",
        "plan.yaml",
        "prediction.json",
        "metrics.jsonl",
        "trace.json",
        "log.txt",
        "checkpoints",
    } <= names
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-6", "step-8"]  # keep: 2
    log = (run / "log.txt").read_text()
    assert "predicted" in log
    assert "checkpoint of step 8" in log


@needs_mpirun
def test_every_step_has_its_line_of_metrics(main_job):
    _, run = main_job
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(set(METRICS) <= set(row) for row in rows)
    prediction = json.loads((run / "prediction.json").read_text())
    for row in rows:
        assert row["tokens"] == 16 * 128
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["step_seconds"])
        assert row["predicted_step_seconds"] == prediction["step_seconds"]
        assert row["memory_bytes"] > 3e6 * 4 / 4  # at least a fourth of the model's fp32 weights
    assert [row["lr"] for row in rows[:2]] == pytest.approx([3e-4, 6e-4])  # warm-up of 10 steps to 3e-3


@needs_mpirun
def test_the_loss_falls_from_that_of_guessing(main_job):
    _, run = main_job
    losses = [row["loss"] for row in metrics(run)]
    assert 5.2 < losses[0] < 6.2  # ln 272 = 5.6
    assert losses[-1] < losses[0] - 1


@needs_mpirun
def test_predicted_and_measured_stand_side_by_side(main_job):
    ended, run = main_job
    lines = ended.stdout.splitlines()
    (header,) = [
        line for line in lines if "predicted" in line and "measured" in line and "measured / predicted" in line
    ]
    assert header.index("predicted") < header.index("measured")
    assert any("step time" in line and line.count(" s ") == 2 for line in lines)
    # CPU-core~1 is a slower sort, as a busy machine has.
    measured = re.compile(r"rank \d \(CPU-core(~\d)?\).* ms a layer and sample")
    assert sum(bool(measured.match(line)) for line in lines) == 4  # nothing rests on the catalogue's guess
    assert "is assumed, not measured" not in ended.stdout
    assert str(run) in lines[-1]


@needs_mpirun
def test_only_rank_0_speaks_and_in_plain_lines(main_job):
    ended, _ = main_job
    assert "\x1b" not in ended.stdout + ended.stderr
    assert ended.paragraphs == []
    steps = [line.split()[1] for line in ended.stdout.splitlines() if re.match(r"step \d", line)]
    assert steps == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    assert ended.stdout.count("run folder") == 2  # at the start and at the end


@needs_mpirun
def test_the_trace_shows_the_schedule_that_was_planned(main_job):
    _, run = main_job
    layout = bind(
        load_plan(run / "plan.yaml"),
        load_model("models/llama-tiny.yaml", CONFIGS),
        load_cluster(CONFIGS / "clusters" / "laptop-mixed.yaml"),
    )
    events = [event for event in json.loads((run / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    for assignment in layout.assignments:
        own = sorted((event for event in events if event["pid"] == assignment.rank), key=lambda event: event["ts"])
        planned = [action.name for action in actions(layout, assignment.stage, assignment.replica)]
        assert [event["name"] for event in own] == planned * TRACED


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process on what it finds, started at a pseudo-terminal as from a user's shell; what that shows."""
    folder = tmp_path_factory.mktemp("alone")
    job = write_job(folder / "job", plan="auto", cluster_name="detect")
    master, slave = pty.openpty()
    command = [HETHUB, "train", job, "--set", "train.steps=2"]
    running = Running(command, folder, {"TERM": "xterm"}, stdout=slave)
    os.close(slave)
    shown = b""
    while block := read_terminal(master):
        shown += block
    ended = running.end()
    assert ended.exit_code == 0, ended.stderr
    return folder, shown.decode()


def read_terminal(master):
    """What the other end of a pseudo-terminal has written; nothing once it is closed."""
    try:
        return os.read(master, 4096)
    except OSError:
        return b""


def test_alone_everything_lies_in_the_default_run_folder(alone):
    folder, _ = alone
    assert {path.parts[0] for path in files_below(folder)} == {"job", "runs"}
    (run,) = (folder / "runs").iterdir()
    assert re.fullmatch(r"job-\d{8}-\d{6}", run.name)
    assert [row["step"] for row in metrics(run)] == [1, 2]
    assert load_plan(run / "plan.yaml").ranks == (0,)


def test_a_terminal_gets_a_progress_bar(alone):
    _, shown = alone
    assert "\x1b[" in shown
    assert "2/2" in shown


def test_the_run_folders_job_file_can_be_used_again(alone, tmp_path):
    (run,) = (alone[0] / "runs").iterdir()
    ended = one(ranks(1, "train", run / "job.yaml", "--run-dir", tmp_path / "again", cwd=tmp_path))
    assert ended.exit_code == 0, ended.stderr
    assert metrics(tmp_path / "again")[1]["loss"] == metrics(run)[1]["loss"]


def test_python_m_hethub_is_the_same_program(tmp_path):
    ended = Running([sys.executable, "-m", "hethub", "--version"], tmp_path, {}).end()
    assert (ended.exit_code, ended.stdout) == (0, hethub("--version", cwd=tmp_path).stdout)
