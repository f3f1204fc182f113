"""Two hosts, each with its own environment at its own path, host name and address, one of CUDA's and one of ROCm's
island: `hethub launch --with mpirun` trains over them, names a cut link, and goes on."""

import json
import os
import re
import time
from pathlib import Path

import pytest
import yaml

from tests.support.command import HANG_SECONDS, MARK, Ended, Running, needs_mpirun, ranks
from tests.support.hosts.namespaces import ADDRESSES, why_no_namespaces
from tests.support.hosts.sockets import local_addresses
from tests.support.hosts.two_hosts import NETWORK, TwoHosts, two_hosts, why_no_hosts
from tests.support.job_files import write_pair_job, write_yaml

pytestmark = [pytest.mark.slow, needs_mpirun, pytest.mark.timeout(900)]
TIMEOUT_SECONDS = 30  # a host that is silent for half of it is lost: a loaded machine may stand still for seconds
LOST = re.compile(r"rank (\d) has stopped: no sign of life from (\S+) for")


def write_job_of(hosts: TwoHosts, folder: Path) -> Path:
    """Rank 0 on the second host, which is not the one that launches."""
    job = write_pair_job(
        folder, train={"steps": 4000}, communicator={"timeout_seconds": TIMEOUT_SECONDS, "relay": "gloo"}
    )
    cluster = yaml.safe_load((folder / "cluster.yaml").read_text())
    for node, side in zip(cluster["nodes"], (1, 0), strict=True):
        node |= {"hosts": [hosts.names[side]], "environment": str(hosts.environments[side])}
    write_yaml(folder / "cluster.yaml", {**cluster, "network": NETWORK})
    return job


def launched(hosts: TwoHosts, *arguments: object) -> Running:
    words = [hosts.environments[0] / "bin" / "hethub", "launch", *arguments]
    return Running(hosts.on_first(" ".join(map(str, words))), Path.cwd(), {})


def rank_processes(running: Running) -> dict[int, int]:
    """The rank of every process that is one, or that one has started."""
    names = {pid: variables.get("OMPI_COMM_WORLD_RANK") for pid, variables in running.pids().items()}
    return {pid: int(rank) for pid, rank in names.items() if rank is not None}


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def wait_until_gone(running: Running, patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    while left := rank_processes(running):
        assert time.monotonic() < deadline, f"ranks outlive the link: {left}\n{running.stderr()}"
        time.sleep(0.2)


def check_addresses(running: Running) -> None:
    """A rank listens on the job's address of its host, and all its connections have it: neither loopback nor the
    interface that does not reach the other host."""
    found = {pid: (rank, *local_addresses(pid)) for pid, rank in rank_processes(running).items()}
    assert {rank for rank, listening, connected in found.values() if listening and connected} == {0, 1}
    own = {0: {ADDRESSES[1]}, 1: {ADDRESSES[0]}}
    assert all(listening | connected <= own[rank] for rank, listening, connected in found.values()), found


def train_until_the_link_is_cut(hosts: TwoHosts, job: Path, run: Path) -> Ended:
    running = launched(hosts, job, "--run-dir", run)
    try:
        running.wait_until(lambda: (run / "checkpoints" / "step-2").exists() and len(losses(run)) > 2)
        check_addresses(running)
        hosts.link.set_link("down")
        wait_until_gone(running, HANG_SECONDS / 2)
        hosts.link.set_link("up")  # Open MPI's daemons hear of it over the same link
        return running.end(patience_seconds=60)
    finally:
        running.kill()


def test_a_job_over_two_hosts_trains_names_a_cut_link_and_goes_on(tmp_path: Path) -> None:
    if (reason := why_no_namespaces() or why_no_hosts()) is not None:
        pytest.skip(f"hosts of their own: {reason}")
    with two_hosts(f"hb{os.getpid()}", tmp_path, MARK) as hosts:
        job, run = write_job_of(hosts, tmp_path / "job"), tmp_path / "run"
        ended = train_until_the_link_is_cut(hosts, job, run)
        assert ended.exit_code in (1, 75), ended.stderr
        assert set(LOST.findall(ended.stderr)) == {("0", hosts.names[1]), ("1", hosts.names[0])}, ended.stderr
        before = losses(run)
        last = max(before) + 4
        resumed = launched(hosts, job, "--resume", run, "--set", f"train.steps={last}", "--accept-changes").end()
        assert resumed.exit_code == 0, resumed.stderr
        assert set(losses(run)) == set(range(1, last + 1))
    alone = write_pair_job(tmp_path / "alone", train={"steps": 4000})
    one_host = ranks(2, "train", alone, "--set", "train.steps=2", "--run-dir", tmp_path / "one", cwd=tmp_path)
    assert [each.exit_code for each in one_host] == [0, 0], one_host[0].stderr
    assert losses(tmp_path / "one") == {step: before[step] for step in (1, 2)}
