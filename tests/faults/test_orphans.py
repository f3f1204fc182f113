"""Ranks whose launcher is gone end: nobody else would end them."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from hethub.runtime.acceptance.start import environments
from tests.support.command import (
    AS_ROOT,
    HANG_SECONDS,
    HETHUB,
    Running,
    needs_mpirun,
    parent_of,
    ranks,
    start_mpirun,
    start_torchrun,
)
from tests.support.hosts.slurm import missing, running_slurm, tasks_with
from tests.support.hosts.sockets import free_port
from tests.support.job_files import write_job, write_pair_job


def has_trained(run):
    path = Path(run) / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= 2


def lose_the_launcher(run, rank):
    """Rank 1 gets a parent of its own, which ends when the job trains."""
    if rank == 1 and os.fork() != 0:
        while not has_trained(run):
            time.sleep(0.05)
        os._exit(0)


def test_a_rank_whose_launcher_is_gone_ends_and_says_so(tmp_path):
    job, run = write_pair_job(tmp_path / "job", train={"steps": 5000}), tmp_path / "run"
    survivor, orphan = ranks(
        2, "train", job, "--run-dir", run, cwd=tmp_path, hook=partial(lose_the_launcher, run), timeout_seconds=60
    )
    assert "rank 1 ends because its launcher" in orphan.stderr
    assert survivor.exit_code == 1
    assert "rank 1 is gone" in survivor.stderr


def lose_the_launcher_at_the_start(rank):
    """Rank 1 gets a parent of its own, which ends as soon as the program has begun."""
    from hethub.runtime.loop import train

    launcher = os.getpid()
    if rank != 1:
        return
    if os.fork() != 0:
        signal.pause()
    read = train.read_job

    def read_as_an_orphan(*arguments):
        os.kill(launcher, signal.SIGKILL)
        while os.getppid() == launcher:
            time.sleep(0.05)
        return read(*arguments)

    train.read_job = read_as_an_orphan


def test_a_rank_whose_launcher_was_gone_before_the_ranks_met_ends_too(tmp_path):
    job, run = write_pair_job(tmp_path / "job", train={"steps": 5000}), tmp_path / "run"
    survivor, orphan = ranks(
        2, "train", job, "--run-dir", run, cwd=tmp_path, hook=lose_the_launcher_at_the_start, timeout_seconds=60
    )
    assert "rank 1 ends because its launcher" in orphan.stderr
    assert survivor.exit_code == 1
    assert "rank 1 is gone" in survivor.stderr


# Its parent ends as soon as it imports torch, which takes seconds.
ORPHAN_THAT_IMPORTS = """
import os, runpy, signal, sys, time

class Torch:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.meta_path.remove(self)
            os.kill(launcher, signal.SIGKILL)
            while os.getppid() == launcher:
                time.sleep(0.05)

launcher = os.getpid()
if os.fork() != 0:
    signal.pause()
sys.meta_path.insert(0, Torch())
sys.argv = ["acceptance", "speed"]
runpy.run_module("hethub.runtime.acceptance", run_name="__main__")
"""


def test_what_trains_for_the_acceptance_test_ends_with_the_rank_that_started_it():
    """On a device it trained on for minutes, for nobody."""
    (place,) = environments(0, 1)
    command = [sys.executable, "-P", "-c", ORPHAN_THAT_IMPORTS]
    ended = subprocess.run(command, env=place, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert "rank 0 ends because its launcher" in ended.stderr
    assert ended.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=needs_mpirun)])
def test_no_rank_outlives_its_launcher(launcher, trains, tmp_path):
    # Ranks that have not met yet end at the timeout.
    run = tmp_path / "run"
    job = write_job(tmp_path / "job", train={"steps": 5000}, communicator={"timeout_seconds": 60 if trains else 5})
    start = {"torchrun": start_torchrun, "mpirun": start_mpirun}[launcher]
    running = start(4, "train", job, "--run-dir", run, cwd=tmp_path)
    if trains:
        running.wait_until(lambda: has_trained(run))
    else:
        running.wait_until(lambda: all(running.rank_pids(rank) for rank in range(4)))
        time.sleep(3)
    os.kill(parent_of(running.rank_pid(0)), signal.SIGKILL)
    # Ranks that are still importing, on a loaded machine, have their timeout before them.
    left = running.left_behind(patience_seconds=30 if trains else 120)
    said = running.stderr()
    running.kill()
    assert not left, said


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_a_job_whose_hethub_launch_is_killed_saves_and_ends(launcher, tmp_path):
    """It ran on, with nobody to end it."""
    job, run = write_pair_job(tmp_path / "job", train={"steps": 100_000}), tmp_path / "run"
    command = [HETHUB, "launch", "--with", launcher, job, "--run-dir", run, "--set", "checkpoint.every_steps=null"]
    running = Running(command, tmp_path, AS_ROOT)
    running.wait_until(lambda: has_trained(run))
    running.process.kill()
    left, said = running.left_behind(patience_seconds=60), running.stderr()
    running.kill()
    assert not left, said
    last = len((run / "metrics.jsonl").read_text().splitlines())
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{last}"], said


# A rank that is gone as soon as it has started the helper that asks Open MPI's daemon.
KILLED_WHILE_IT_ASKS = """
import os, subprocess
from hethub.communicator.joining import pmix

def run(words, *, input, env, **more):
    helper = subprocess.Popen(words, stdin=subprocess.PIPE, env=env, text=True)
    helper.stdin.write(input)
    helper.stdin.close()
    os._exit(0)

subprocess.run = run
pmix.look_up("nobody.says.it", 1, 600.0)
"""


@needs_mpirun
def test_mpirun_does_not_wait_for_the_helper_of_a_rank_that_is_gone(tmp_path):
    running = start_mpirun(1, cwd=tmp_path, program=(sys.executable, "-P", "-c", KILLED_WHILE_IT_ASKS))
    ended = running.end(patience_seconds=10, hang_seconds=90)
    assert (ended.exit_code, ended.stderr) == (0, "")


# What slurmstepd does as far as ranks can see: it starts them as its children, in the environment of a step.
STEP = """
import os, subprocess, sys
for rank in range(2):
    names = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0,
             "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": sys.argv[1]}
    environment = {name: str(value) for name, value in names.items()}
    subprocess.Popen(sys.argv[2:], env={**os.environ, **environment})
os.wait()
"""


@pytest.mark.slow
def test_ranks_of_a_slurm_step_end_with_it(tmp_path):
    job, run = write_pair_job(tmp_path / "job", train={"steps": 5000}), tmp_path / "run"
    step = [sys.executable, "-c", STEP, free_port(), HETHUB, "train", job, "--run-dir", run]
    running = Running(step, tmp_path, {})
    running.wait_until(lambda: has_trained(run))
    running.process.kill()
    ended = running.end()
    assert "its launcher" in ended.stderr
    assert len(ended.paragraphs) == 2, ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.parametrize("killed", ["slurmstepd", "srun", "rank"])
def test_ranks_under_a_real_slurm_end_together(tmp_path, killed):
    job, run = write_pair_job(tmp_path / "job", train={"steps": 5000}), tmp_path / "run"
    said = tmp_path / "said"
    with running_slurm(tmp_path) as environment, said.open("wb") as output:
        command = ["srun", "--ntasks=2", "--nodes=1", "--nodelist=first", HETHUB, "train", job, "--run-dir", run]
        step = subprocess.Popen(
            list(map(str, command)), env={**environment, "OMP_NUM_THREADS": "1"}, cwd=tmp_path, stdout=output,
            stderr=output,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 240
            while not has_trained(run):
                assert step.poll() is None, said.read_text()
                assert time.monotonic() < deadline, said.read_text()
                time.sleep(0.1)
            started = tasks_with(run, HETHUB)
            assert len(started) == 2
            os.kill({"slurmstepd": parent_of(started[0]), "srun": step.pid, "rank": started[1]}[killed], signal.SIGKILL)
            deadline = time.monotonic() + 60
            while (left := tasks_with(run, HETHUB)) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not left, said.read_text()
        finally:
            step.kill()
            step.wait()
            for pid in tasks_with(run, HETHUB):
                os.kill(pid, signal.SIGKILL)
    if killed == "rank":
        assert "rank 1 is gone" in said.read_text()
