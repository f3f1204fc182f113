"""What torchrun and Slurm start again goes on by itself: the steps of one run, each once, with its losses."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from tests.support.command import BIN, HETHUB, PROJECT, one, ranks, start_torchrun
from tests.support.hosts.slurm import missing, running_slurm, tasks_with
from tests.support.job_files import write_pair_job

SECONDS = 400  # to wait for what comes next, on a loaded machine
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * SECONDS)]

STEPS = 150


@pytest.fixture
def job(tmp_path):
    return write_pair_job(tmp_path / "job", train={"steps": STEPS}, checkpoint={"every_steps": 5, "keep": 2})


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


def uninterrupted(job, folder):
    for ended in ranks(2, "train", job, "--run-dir", folder / "whole", cwd=folder):
        assert ended.exit_code == 0, ended.stderr
    return losses(folder / "whole")


def newest_checkpoint(folder):
    # One of `step-N.partial` has its marker a moment before its name.
    found = folder.glob("runs/*/checkpoints/step-*[0-9]/COMPLETE")
    return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)


def test_torchrun_starts_ranks_again_that_go_on(job, tmp_path):
    running = start_torchrun(2, "train", job, cwd=tmp_path, options=["--max-restarts", "1"])
    running.wait_until(lambda: newest_checkpoint(tmp_path) > 0)
    os.kill(running.rank_pid(1), signal.SIGKILL)
    ended = running.end()
    assert ended.exit_code == 0, ended.stderr
    assert re.search(r"resumed behind step [0-9]+", ended.stdout)
    assert losses(one(list((tmp_path / "runs").iterdir()))) == uninterrupted(job, tmp_path)


def asked(slurm, *words):
    return subprocess.run(words, env=slurm, capture_output=True, text=True, timeout=SECONDS, check=True).stdout.strip()


def wait_until(condition, said):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, said.read_text() if said.exists() else "never began"
        time.sleep(0.05)


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_slurm_requeues_a_job_that_goes_on(job, tmp_path):
    """Under the batch script that docs/launching.md has: a rank is killed, then Slurm takes the whole job away."""
    lines = re.search(r"```sh\n(srun .*?)```", (PROJECT / "docs/launching.md").read_text(), re.DOTALL)[1]
    head = "#!/bin/bash\n#SBATCH --requeue --nodes=1 --ntasks=2 --open-mode=append\n"
    batch, said = tmp_path / "batch.sh", tmp_path / "said"
    batch.write_text(head + lines.replace("JOB.yaml", str(job)))
    with running_slurm(tmp_path) as environment:
        slurm = {**environment, "PATH": f"{BIN}{os.pathsep}{environment['PATH']}", "OMP_NUM_THREADS": "1"}
        number = asked(slurm, "sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={said}", str(batch))

        def state(key="JobState"):
            return re.search(rf"{key}=(\w+)", asked(slurm, "scontrol", "show", "job", number))[1]

        wait_until(lambda: newest_checkpoint(tmp_path) > 0, said)
        os.kill(tasks_with(job, HETHUB)[-1], signal.SIGKILL)
        wait_until(lambda: "resumed behind step" in said.read_text(), said)
        asked(slurm, "scontrol", "requeue", number)
        wait_until(lambda: state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), said)
        assert state() == "COMPLETED", said.read_text()
        assert state("Restarts") == "2"
    text = said.read_text()
    assert "task 0: Exited with exit code 75" in text  # the survivor's
    assert "stopped on request at step" in text
    assert text.count("resumed behind step") == 2
    assert losses(one(list((tmp_path / "runs").iterdir()))) == uninterrupted(job, tmp_path)
