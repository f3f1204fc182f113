"""A real Slurm launches the demo as a het-job: two components, a node each, both on this host."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support.hosts.slurm import missing, running_slurm

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
    pytest.mark.timeout(240),
]

ROOT = Path(__file__).resolve().parents[3]
HETHUB = [sys.executable, "-P", "-m", "hethub"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with running_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield {**environment, "OMP_NUM_THREADS": "1"}


def demo(folder, steps):
    """The demo job, on a cluster of two Slurm nodes that both listen on loopback."""
    job = yaml.safe_load((ROOT / "configs/jobs/laptop-mixed.yaml").read_text())
    cluster = yaml.safe_load((ROOT / "configs/clusters/laptop-mixed.yaml").read_text())
    cluster["network"] = "127.0.0.0/8"
    for node, host in zip(cluster["nodes"], ("first", "second"), strict=True):
        node |= {"hosts": [host], "environment": sys.prefix}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    job |= {"cluster": "cluster.yaml", "model": str(ROOT / "configs/models/llama-tiny.yaml")}
    job["train"]["steps"] = steps
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def ended_as(slurm, job):
    """The job's last state; `sbatch --wait` would ask only every half minute."""
    while True:
        shown = subprocess.run(
            ["scontrol", "show", "job", job], env=slurm, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        state = re.search(r"JobState=(\w+)", shown)[1]
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            return state
        time.sleep(0.5)


def test_a_het_job_runs_the_demo(slurm, tmp_path):
    job = demo(tmp_path, steps=3)
    run = tmp_path / "run"
    printed = subprocess.run(
        [*HETHUB, "launch", str(job), "--with", "sbatch", "--dry-run", "--run-dir", str(run)],
        env=slurm, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    head, script = printed.split("\n", 1)
    assert head == "sbatch <<'SCRIPT'"
    assert script.count("#SBATCH") == 4
    batch = tmp_path / "batch.sh"
    batch.write_text(script.removesuffix("SCRIPT\n"))
    said = tmp_path / "said.txt"
    sent = subprocess.run(
        ["sbatch", "--parsable", f"--output={said}", str(batch)],
        env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert ended_as(slurm, sent.stdout.strip()) == "COMPLETED", said.read_text() if said.exists() else "never started"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
