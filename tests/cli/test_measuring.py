"""`hethub profile` and `hethub bench comm` on real ranks, and a prediction from the profile."""

import json
import os
from pathlib import Path

import pytest

from hethub.cli import run
from tests.support.command import HETHUB, Running, check_refused, one, ranks
from tests.support.hosts.sockets import free_port
from tests.support.job_files import ALONE, plan, write_job, write_pair_job


def two_islands(rank: int) -> None:
    os.environ["HETHUB_ISLANDS"] = "0|1"


def test_a_profile_of_a_job_predicts_its_plan(tmp_path: Path) -> None:
    job = write_job(tmp_path, cluster_name="detect", plan_file=plan(ALONE, cluster="detected"))
    (ended,) = ranks(1, "profile", job, "--out", tmp_path / "profile.json", cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert profile["model"]["name"] == "tiny"
    assert {layer["micro_batch"] for layer in profile["devices"][0]["layers"]} == {1, 2, 4, 8}
    nodes = [{"name": "here", "accelerator": "CPU-core", "accelerators": 1}]
    described = write_job(
        tmp_path, cluster={"name": "detected", "nodes": nodes}, plan_file=plan(ALONE, cluster="detected")
    )
    asked = ("predict", described, "--plan", "plan.yaml", "--profile", tmp_path / "profile.json", "--json")
    ended = one(ranks(1, *asked, cwd=tmp_path))
    assert ended.exit_code == 0, ended.stderr
    assert json.loads(ended.stdout)["step_seconds"] > 0


def test_bench_times_bridge_and_flat_side_by_side(tmp_path: Path) -> None:
    first, second = ranks(2, "bench", "comm", "--sizes", "4096,300000", "--json", cwd=tmp_path, hook=two_islands)
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    answer = json.loads(first.stdout)
    rows = answer["rows"]
    assert answer["relays"] == {"near": [[0, "shm"]], "far": [[0, "gloo"]], "hosts": [[0, 1]]}
    assert {(row["path"], row["bytes"]) for row in rows} >= {("world", 4096), ("flat", 300000)}
    large = next(r for r in rows if r["operation"] == "all_reduce" and r["path"] == "world" and r["bytes"] == 300000)
    assert 0.99 <= large["bridge_bytes_over_bound"] <= 1.01
    assert {"wire", "add"} <= set(large["legs"])


def test_bench_takes_the_jobs_relay_and_wire(tmp_path: Path) -> None:
    job = write_job(tmp_path, cluster_name="detect", communicator={"relay": "gloo", "wire": "bf16"})
    command = ("bench", "comm", job, "--lanes", "2", "--sizes", "3000000", "--json")
    first, second = ranks(2, *command, cwd=tmp_path, hook=two_islands)
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    answer = json.loads(first.stdout)
    assert answer["relays"]["near"] == [[0, "gloo"]]
    large = next(row for row in answer["rows"] if row["operation"] == "all_reduce" and row["path"] == "world")
    assert 0.99 <= large["bridge_bytes_over_bound"] <= 1.01
    assert 2.9e6 <= large["bridge_bytes"] <= 3.1e6  # of two islands, each half as wide as fp32
    assert large["bound_seconds"] > 0


@pytest.mark.parametrize("command", [["profile"], ["doctor"], ["bench", "comm"]], ids=" ".join)
def test_ranks_wait_for_each_other_as_long_as_the_job_says(command: list[str], tmp_path: Path) -> None:
    """Two minutes, whatever the job said: `train` alone had asked it."""
    job = write_pair_job(tmp_path)
    first = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    words = [HETHUB, *command, job, "--set", "communicator.timeout_seconds=2"]
    ended = Running(words, tmp_path, {**first, "MASTER_PORT": str(free_port())}).end()
    assert ended.exit_code == 1
    assert "has not come: it did not join within 2 s of rank 0" in ended.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("doctor nosuch.yaml", "nosuch.yaml"),
        ("doctor --out a.json", "add --acceptance"),
        ("doctor --acceptance --out /nonexistent/a.json", "/nonexistent"),
        ("profile nosuch.yaml", "nosuch.yaml"),
        ("profile --set cluster=detect", "add JOB.yaml"),
        ("bench comm --sizes abc", "--sizes abc"),
        ("bench comm --lanes 0", "--lanes 0"),
        ("bench comm --nosuch 1", "--nosuch"),
    ],
)
def test_what_every_rank_finds_wrong_is_said_once(command: str, said: str, tmp_path: Path) -> None:
    check_refused(ranks(2, *command.split(), cwd=tmp_path), said)


@pytest.mark.parametrize("command", ["profile", "doctor", "doctor --acceptance"])
def test_the_layers_of_a_model_that_hethub_does_not_train_are_not_measured(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were those of a Llama of its shape, under the model's name; `doctor` called the job ok."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, model={"family": "gpt"}, cluster_name="detect")
    assert run([*command.split(), "job.yaml", "--set", "plan=auto"]) == 2
    told = capsys.readouterr()
    assert "model 'tiny' is of family gpt; hethub plans and predicts it, but trains only llama" in told.err
    assert told.out == ""
    assert not (tmp_path / "profile.json").exists()


def test_sizes_that_are_none_are_refused(tmp_path: Path) -> None:
    ended = one(ranks(1, "bench", "comm", "--sizes", "4096,big", cwd=tmp_path))
    assert ended.exit_code == 2
    assert "4096,big" in ended.stderr


def test_a_profile_of_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    for ended in ranks(2, "profile", job, cwd=tmp_path):
        assert ended.exit_code == 2, ended.stderr
    said = ranks(2, "profile", job, cwd=tmp_path)[0].stderr
    assert "4 accelerators" in said
    assert "mpirun -n 4 before the same command" in said
    assert not (tmp_path / "profile.json").exists()


def test_one_node_of_a_jobs_cluster_is_profiled_by_itself(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    (ended,) = ranks(1, "profile", job, "--set", "cluster=detect", "--out", tmp_path / "profile.json", cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    (device,) = json.loads((tmp_path / "profile.json").read_text())["devices"]
    assert device["accelerator"] == "CPU-core"
