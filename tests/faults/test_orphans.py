"""Ranks whose launcher is gone end: nobody else would end them."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.command import needs_mpirun, ranks, start_mpirun, start_torchrun
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
        running.wait_until(lambda: len(running.pids()) > 4)
        time.sleep(3)
    rank = running.rank_pid(0)
    parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    # Ranks that are still importing, on a loaded machine, have their timeout before them.
    running.end(patience_seconds=15 if trains else 90)
