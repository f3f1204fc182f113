"""Sharded and offloaded state as users train it: resumed without sharding, and refused where it cannot be held."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import check_refused, ranks
from tests.support.job_files import CLUSTER, plan, write_job, write_yaml

ALL = ["parameters", "optimizer", "activations"]
SHARDED = [
    {"layers": [[0, 2]], "replicas": [{"ranks": [0], "micro_batch": 2, "samples": 5}, {"ranks": [1], "micro_batch": 1, "samples": 3}],
     "zero": 3, "state_shares": {1: 0.1}, "offload": ALL},
    {"layers": [[2, 4]], "replicas": [{"ranks": [2], "micro_batch": 4, "samples": 4}, {"ranks": [3], "micro_batch": 1, "samples": 4}],
     "zero": 2},
]  # fmt: skip


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(job: Path, *arguments: Any) -> None:
    for ended in ranks(4, "train", job, *arguments, cwd=job.parent):
        assert ended.exit_code == 0, ended.stderr


def test_a_sharded_offloaded_run_goes_on_without_either(tmp_path: Path) -> None:
    straight = write_job(tmp_path / "straight")
    train(straight, "--run-dir", tmp_path / "straight/run")
    job = write_job(
        tmp_path / "sharded", plan_file=plan(SHARDED, schedule="layered"), train={"steps": 2, "decay_steps": 2}
    )
    run = tmp_path / "sharded/run"
    train(job, "--run-dir", run)
    assert losses(run) == pytest.approx(losses(tmp_path / "straight/run")[:2], rel=1e-5)
    other = write_yaml(tmp_path / "sharded/other.yaml", plan())
    train(job, "--resume", run, "--plan", other, "--set", "train.steps=4")
    assert losses(run) == pytest.approx(losses(tmp_path / "straight/run"), rel=1e-5)


LITTLE = {"nodes": [{**node, "host_memory_gb": 1e-5} for node in CLUSTER["nodes"]]}  # type: ignore[dict-item]
TENSOR_PARALLEL = [
    {"layers": [[0, 4]], "replicas": [{"ranks": [0, 1], "micro_batch": 2, "samples": 4}, {"ranks": [2, 3], "micro_batch": 2, "samples": 4}],
     "zero": 3, "state_shares": {0: 0.9}}
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"plan_file": plan(SHARDED, schedule="layered"), "cluster": LITTLE}, "ranks would hold"),
        ({"plan_file": plan(TENSOR_PARALLEL)}, "it can own at most 0."),
    ],
    ids=["offload without host memory", "a share that nobody can hold"],
)
def test_state_that_cannot_be_held_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    job = write_job(tmp_path / "job", **changes)
    check_refused(ranks(4, "train", job, "--run-dir", tmp_path / "run", cwd=tmp_path), expected)
    assert not (tmp_path / "run").exists()
