"""Ctrl-C on a terminal: one message, a checkpoint, how to go on; before there is anything to save, one message."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hethub.runtime.run_folder import RunFolder
from tests.support.command import AS_ROOT, HETHUB, MPIRUN, Running, needs_mpirun, ranks
from tests.support.job_files import write_pair_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), needs_mpirun]

CTRL_C = b"\x03"
# Runs a command on a terminal of its own, as what comes here were typed there.
ON_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
ANSWER = "hethub: stopping behind this step, with a checkpoint; Ctrl-C again ends at once, without one"


@pytest.fixture
def launched(tmp_path):
    """A function that starts a job of two ranks on a terminal: what runs, the job and the run folder."""
    started = []

    def start(*before, every_steps=None, settings=()):
        job, run = write_pair_job(tmp_path / "job", train={"steps": 100_000}), tmp_path / "run"
        words = [*before, job, "--run-dir", run]
        for setting in (f"checkpoint.every_steps={every_steps or 'null'}", *settings):
            words += ["--set", setting]
        command = [sys.executable, "-c", ON_A_TERMINAL, *words]
        started.append(Running(command, tmp_path, {**AS_ROOT, "COLUMNS": "200"}, stdin=subprocess.PIPE))
        return started[-1], job, run

    yield start
    for running in started:
        running.kill()
        running.process.stdin.close()


def press_ctrl_c(running):
    running.process.stdin.write(CTRL_C)
    running.process.stdin.flush()


def paragraphs(text):
    """What hethub itself said; a terminal shows the key as ^C."""
    return [line.removeprefix("^C") for line in text.splitlines() if line.removeprefix("^C").startswith("hethub:")]


def trains(running, steps):
    return len(re.findall(r"^step [0-9]+/", running.stdout(), re.MULTILINE)) >= steps


def hears_sigusr1(pid):
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


@pytest.mark.parametrize(("launcher", "code"), [("mpirun", 3), ("torchrun", 1)])  # torchrun's own
def test_ctrl_c_on_launch_saves_and_says_how_to_go_on(launched, launcher, code):
    running, job, run = launched(HETHUB, "launch", "--with", launcher)
    running.wait_until(lambda: len(RunFolder(run).rows()) >= 3)
    press_ctrl_c(running)
    ended = running.end()
    assert ended.exit_code == code, ended.stdout
    assert (ended.stdout.count("hethub: "), ended.stdout.count(ANSWER)) == (1, 1), ended.stdout
    last = len((run / "metrics.jsonl").read_text().splitlines())
    assert f"stopped on request at step {last}; continue with --resume" in ended.stdout
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{last}"]
    again = ranks(2, "train", job, "--resume", run, "--set", f"train.steps={last + 1}", cwd=run.parent)
    assert [each.exit_code for each in again] == [0, 0], [each.stderr for each in again]
    assert f"resumed behind step {last}" in again[0].stdout


def test_a_second_ctrl_c_ends_at_once(launched):
    # mpirun wakes a stopped rank before it ends it: a step must take longer than that moment.
    running, _, run = launched(HETHUB, "launch", settings=("plan=auto", "train.global_batch=10000"))
    running.wait_until(lambda: trains(running, 1))
    os.kill(running.rank_pid(1), signal.SIGSTOP)  # its step will not end
    press_ctrl_c(running)
    running.wait_until(lambda: ANSWER in running.stdout())
    press_ctrl_c(running)
    ended = running.end()
    assert ended.exit_code == 1, ended.stdout
    first, *_, last = paragraphs(ended.stdout)  # a rank may have the time to say that the stopped one is lost
    assert first == ANSWER
    assert "ended at once, as asked" in last
    assert list((run / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("moment", ["its ranks begin", "its ranks hear signals"])
def test_ctrl_c_while_a_launched_job_starts_is_one_message(launched, moment):
    running, _, run = launched(HETHUB, "launch")

    def has_come():
        pids = [pid for rank in range(2) for pid in running.rank_pids(rank)]
        return len(pids) == 2 and (moment == "its ranks begin" or all(map(hears_sigusr1, pids)))

    running.wait_until(has_come)
    press_ctrl_c(running)
    ended = running.end()
    assert ended.exit_code == 1, ended.stdout
    said = paragraphs(ended.stdout)
    assert 1 <= len(said) <= 2, ended.stdout  # where news takes longer than a second, each of two ranks says it
    assert any("before its" in paragraph for paragraph in said), ended.stdout
    assert "Traceback" not in ended.stdout
    assert not run.exists()


def test_ctrl_c_on_mpirun_itself_leaves_nothing_partial(launched):
    """Open MPI kills the ranks half a second later, whatever they do: the checkpoints before stay."""
    running, job, run = launched(MPIRUN, "--oversubscribe", "--continuous", "-n", "2", HETHUB, "train", every_steps=1)
    running.wait_until(lambda: len(list((run / "checkpoints").glob("step-*[0-9]/COMPLETE"))) >= 2)
    press_ctrl_c(running)
    assert running.end().exit_code != 0
    again = ranks(2, "train", job, "--resume", run, "--set", "train.steps=100", cwd=run.parent)
    assert [each.exit_code for each in again] == [0, 0], [each.stderr for each in again]
    assert re.search(r"resumed behind step [0-9]+", again[0].stdout)
    assert not list((run / "checkpoints").glob("*.partial"))
