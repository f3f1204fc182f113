"""`hethub launch --dry-run` prints what starts a cluster; `hethub doctor` says what a machine has."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from hethub.kernels.device import Device
from hethub.runtime.doctor.machine import examine
from hethub.runtime.launch import device
from hethub.runtime.launch.device import open_device
from hethub.runtime.launch.launcher_command import LAUNCHERS, SETTINGS, Command, LauncherName, launch_commands, run_here
from hethub.runtime.launch.launcher_environment import LaunchInfo
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.network import TOKEN_VARIABLE
from tests.support.command import AS_ROOT, MPIRUN, Running, needs_mpirun

JOB = Path("job.yaml")
TWO_MAKERS = ClusterSpec.model_validate(
    {
        "name": "two makers",
        "nodes": [
            {
                "name": "nv", "count": 2, "accelerator": "A100-SXM4-80GB", "accelerators": 8,
                "environment": "/opt/cuda", "hosts": ["nv1", "nv2"],
            },
            {"name": "amd1", "accelerator": "MI250X-GCD", "accelerators": 8, "environment": "/opt/rocm"},
        ],
    }
)  # fmt: skip
LAPTOP = ClusterSpec.model_validate(
    {
        "name": "laptop",
        "nodes": [{"name": v, "vendor": v, "accelerator": "CPU-core", "accelerators": 2} for v in ("amd", "nvidia")],
    }
)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(SETTINGS)]:
        monkeypatch.delenv(name)


def test_mpirun_carries_the_users_settings_and_binds_no_rank_to_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ssh it carries none, and one core would be all that a rank's threads have."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    monkeypatch.setenv("HSA_FORCE_FINE_GRAIN_PCIE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # this host's own
    (command,) = launch_commands(JOB, TWO_MAKERS, "mpirun")
    assert "--bind-to none" in " ".join(command.words)
    for context in " ".join(command.words).split(" : "):
        assert "-x HSA_FORCE_FINE_GRAIN_PCIE -x NCCL_DEBUG -x UCX_NET_DEVICES /opt/" in context
    assert "CUDA_VISIBLE_DEVICES" not in command.words
    (here,) = launch_commands(JOB, LAPTOP, "mpirun")
    assert "-x" not in here.words  # this machine's own processes have them


@pytest.mark.parametrize(("rank", "local"), [(0, 0), (3, 3), (4, 0), (7, 3), (9, 1)])
def test_on_a_machine_of_two_makers_a_rank_counts_its_own_makers_devices(
    rank: int, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch sees one maker's devices, the launcher counts all ranks of the host."""
    both = {"count": 1, "accelerators": 4, "hosts": ["both"]}
    cluster = ClusterSpec.model_validate(
        {
            "name": "both", "nodes": [
                {"name": "nv", "accelerator": "RTX-4090", **both}, {"name": "amd", "accelerator": "RX-7900-XTX", **both},
                {"name": "other", "accelerator": "RTX-4090", "accelerators": 4},
            ],
        }
    )  # fmt: skip
    place, asked = cluster.places[rank], []
    here = 8 if place.node.name != "other" else 4
    monkeypatch.setattr(device, "choose_device", lambda *given, **kind: asked.append(given[0]) or Device(vendor="cpu"))
    info = LaunchInfo(rank=rank, size=12, local_rank=rank % 8, local_size=here, launcher="mpirun")
    open_device(cluster, info)
    assert asked == [local]


IN_PARTS = ClusterSpec.model_validate(
    {
        "name": "two kinds in one box", "nodes": [
            {"name": name, "accelerator": name, "accelerators": 2, "part_of": "box"} for name in ("RTX-4090", "RTX-3090")
        ],
    }
)  # fmt: skip


def test_the_parts_of_a_machine_are_started_on_it() -> None:
    """By its name where its host is not given; the parts' own names are no hosts'."""
    for host, cluster in {
        "box": IN_PARTS,
        "10.0.0.7": IN_PARTS.replace(nodes=tuple(node.replace(hosts=("10.0.0.7",)) for node in IN_PARTS.nodes)),
    }.items():
        (command,) = launch_commands(JOB, cluster, "mpirun")
        assert " ".join(command.words).count(f"-n 2 --host {host}:2 ") == 2


@pytest.mark.parametrize("counted", [range(4), (0, 1, 0, 1)], ids=["by host", "by entry"])
def test_the_parts_of_a_machine_share_its_devices(counted: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm counts the ranks of each entry alone."""
    asked: list[int] = []
    monkeypatch.setattr(device, "choose_device", lambda *given, **kind: asked.append(given[0]) or Device(vendor="cpu"))
    for rank, local in enumerate(counted):
        open_device(IN_PARTS, LaunchInfo(rank=rank, size=4, local_rank=local, local_size=4, launcher="slurm"))
    assert asked == [0, 1, 2, 3]


def test_mpirun_starts_every_node_in_its_own_environment() -> None:
    (command,) = launch_commands(JOB, TWO_MAKERS, "mpirun", ["--set", "train.steps=5"])
    first, second = " ".join(command.words).split(" : ")
    assert "-n 16 --host nv1:8,nv2:8 /opt/cuda/bin/hethub train job.yaml --set train.steps=5" in first
    assert second == "-n 8 --host amd1:8 /opt/rocm/bin/hethub train job.yaml --set train.steps=5"


def test_a_shell_reads_what_is_printed_as_what_would_run() -> None:
    (command,) = launch_commands(Path("a : b/job.yaml"), TWO_MAKERS, "mpirun")
    words = [f"for word in {command}", "do printf '%s\\n' \"$word\"", "done"]
    shown = subprocess.run(["/bin/sh", "-c", "; ".join(words)], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-len(command.words) :] == list(command.words)


def test_root_may_start_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (command,) = launch_commands(JOB, TWO_MAKERS, "mpirun")
    assert command.environment == dict.fromkeys(names, "1")
    assert str(command).startswith(f"{names[0]}=1 {names[1]}=1 ")  # --dry-run says so
    monkeypatch.setenv(names[0], "0")
    assert launch_commands(JOB, TWO_MAKERS, "mpirun")[0].environment == {names[1]: "1"}
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert launch_commands(JOB, TWO_MAKERS, "mpirun")[0].environment == {}


def test_slurm_is_asked_for_no_machine_twice() -> None:
    """The job would have waited for ever. Two makers in one machine are started by mpirun."""
    nvidia, amd = TWO_MAKERS.nodes
    shared = TWO_MAKERS.replace(nodes=(nvidia, amd.replace(hosts=("nv2",))))
    with pytest.raises(BadInput, match="machine 'nv2' is among the hosts of two nodes"):
        launch_commands(JOB, shared, "sbatch")
    assert "--host nv2:8" in " ".join(launch_commands(JOB, shared, "mpirun")[0].words)


def test_open_mpi_starts_the_daemon_of_the_environment_that_a_host_has(tmp_path: Path) -> None:
    """It knows one path for all hosts, and would not find its daemon where environments lie elsewhere."""
    environments = [tmp_path / "of this host's maker", tmp_path / "rocm"]
    nodes = [
        {**node.to_dict(), "environment": str(environment)}
        for node, environment in zip(TWO_MAKERS.nodes, environments, strict=True)
    ]
    (command,) = launch_commands(JOB, TWO_MAKERS.replace(nodes=tuple(nodes)), "mpirun")
    agent = command.words[command.words.index("prte_launch_agent") + 1]
    daemon = environments[1] / "bin" / "prted"
    daemon.parent.mkdir(parents=True)
    daemon.write_text('#!/bin/sh\necho "$0" "$@"\n')
    daemon.chmod(0o755)
    said = subprocess.run(["sh", "-c", f"{agent} --prtemca a 'b c'"], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(daemon), "--prtemca", "a", "b", "c"]
    first, other = TWO_MAKERS.nodes
    mixed = TWO_MAKERS.replace(nodes=(first, other.replace(environment=None)))  # its ranks run in this environment
    (command,) = launch_commands(JOB, mixed, "mpirun")
    assert f"{sys.prefix}/bin/prted" in command.words[command.words.index("prte_launch_agent") + 1]
    at_home = [{**node.to_dict(), "environment": sys.prefix} for node in TWO_MAKERS.nodes]
    (command,) = launch_commands(JOB, TWO_MAKERS.replace(nodes=tuple(at_home)), "mpirun")
    assert "prte_launch_agent" not in command.words


def test_torchrun_is_one_command_per_machine() -> None:
    commands = launch_commands(JOB, TWO_MAKERS, "torchrun")
    assert [command.host for command in commands] == ["nv1", "nv2", "amd1"]
    for index, command in enumerate(commands):
        assert {"--nnodes=3", f"--node-rank={index}", "--nproc-per-node=8", "--master-addr=nv1"} <= set(command.words)
    assert commands[2].words[0] == "/opt/rocm/bin/torchrun"
    with pytest.raises(BadInput, match="nv1, nv2, amd1"):
        run_here(commands)


def test_every_machine_of_torchrun_gets_the_same_secret() -> None:
    commands = launch_commands(JOB, TWO_MAKERS, "torchrun")
    assert len({command.environment[TOKEN_VARIABLE] for command in commands}) == 1
    assert launch_commands(JOB, TWO_MAKERS, "torchrun")[0].environment != commands[0].environment
    assert str(commands[1]).startswith(
        f"# on nv2\n{TOKEN_VARIABLE}={commands[0].environment[TOKEN_VARIABLE]} /opt/cuda"
    )


def test_the_network_of_the_job_is_mpiruns_too() -> None:
    (command,) = launch_commands(JOB, TWO_MAKERS.model_copy(update={"network": "10.0.0.0/16"}), "mpirun")
    assert "--prtemca prte_if_include 10.0.0.0/16" in " ".join(command.words)


def test_slurm_gets_a_component_per_node_entry() -> None:
    (command,) = launch_commands(JOB, TWO_MAKERS, "srun")
    first, second = " ".join(command.words).split(" : ")
    assert first.startswith(
        "srun --kill-on-bad-exit=0 --cpu-bind=none --het-group=0 --nodes=2 --ntasks=16 /opt/cuda/bin/hethub"
    )
    assert second.startswith("--het-group=1 --nodes=1 --ntasks=8 /opt/rocm/bin/hethub")
    assert set(command.environment) == {TOKEN_VARIABLE}


def test_in_a_batch_script_slurms_ranks_are_told_rank_0s_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """They know the first node by a name, which may lead to another network than the job's."""
    loopback = TWO_MAKERS.model_copy(update={"network": "127.0.0.0/8"})
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "nv[1-2]")
    monkeypatch.setenv("SLURMD_NODENAME", "nv1")
    assert launch_commands(JOB, loopback, "srun")[0].environment["MASTER_ADDR"] == "127.0.0.1"
    monkeypatch.setenv("SLURMD_NODENAME", "nv2")
    assert "MASTER_ADDR" not in launch_commands(JOB, loopback, "srun")[0].environment


def test_a_batch_script_has_a_component_per_node_entry() -> None:
    (command,) = launch_commands(JOB, TWO_MAKERS, "sbatch", ["--run-dir", "out"])
    assert command.words == ("sbatch",)
    assert command.script is not None
    assert command.script.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=hethub",
        "#SBATCH --nodes=2 --ntasks=16 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --nodelist=nv1,nv2",
        "#SBATCH hetjob",
        "#SBATCH --nodes=1 --ntasks=8 --ntasks-per-node=8 --gpus-per-node=8 --exclusive",
        "exec /opt/cuda/bin/hethub launch job.yaml --with srun --run-dir out",
    ]
    (laptop,) = launch_commands(JOB, LAPTOP, "sbatch")
    assert laptop.script is not None
    assert [line for line in laptop.script.splitlines() if "SBATCH -" in line][1:] == ["#SBATCH --nodes=1 --ntasks=4"]


@pytest.mark.parametrize(("launcher", "count"), [("torchrun", "--nproc-per-node=4"), ("srun", "--ntasks=4")])
def test_emulated_vendors_on_this_machine_are_one_start(launcher: str, count: str) -> None:
    (command,) = launch_commands(JOB, LAPTOP, launcher)  # type: ignore[arg-type]
    assert count in command.words
    assert command.host is None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_ranks_of_an_emulated_cluster_are_started_here(launcher: LauncherName) -> None:
    """It is one that is not there: neither its machines, nor what is installed on them, nor their network."""
    emulated = TWO_MAKERS.replace(emulated=True, network="10.0.0.0/16")
    (command,) = launch_commands(JOB, emulated, launcher)
    text = str(command)
    assert command.host is None
    assert " -m hethub train " in text or f"{sys.executable} -m hethub launch" in text
    assert not [word for word in ("nv1", "amd1", "/opt/", "10.0.0.0", "--gpus-per-node", "MASTER_ADDR") if word in text]


def test_machines_without_names_are_refused_with_an_example() -> None:
    node = TWO_MAKERS.nodes[0].model_copy(update={"hosts": None})
    with pytest.raises(BadInput, match="hosts: "):
        launch_commands(JOB, TWO_MAKERS.model_copy(update={"nodes": (node,)}), "mpirun")


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
@pytest.mark.parametrize("name", ["H100 node", "nv1,nv2", "nv1:8"])
def test_a_node_whose_name_no_host_has_needs_its_hosts_name(name: str, launcher: LauncherName) -> None:
    node = TWO_MAKERS.nodes[1].replace(name=name)
    with pytest.raises(BadInput, match=rf"node '{name}' has no name .*`hosts: \[NAME\]`"):
        launch_commands(JOB, TWO_MAKERS.replace(nodes=(node,)), launcher)
    (command,) = launch_commands(JOB, TWO_MAKERS.replace(nodes=(node.replace(hosts=("amd1",)),)), launcher)
    assert "amd1" in str(command)


@pytest.mark.parametrize(
    "hosts", [["nv1", "nv1"], ["nv1", ""], ["nv 1", "nv2"], ["nv1,nv2", "nv3"], ["nv1:8", "nv2:8"]]
)
def test_a_host_that_no_launcher_can_take_is_refused(hosts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"hosts are .*; give each machine its own name"):
        ClusterSpec.model_validate({"name": "two", "nodes": [{**TWO_MAKERS.nodes[0].model_dump(), "hosts": hosts}]})


def test_unequal_machines_are_refused_for_torchrun() -> None:
    small = TWO_MAKERS.nodes[1].model_copy(update={"accelerators": 4})
    with pytest.raises(BadInput, match="4 and 8 accelerators"):
        launch_commands(JOB, TWO_MAKERS.model_copy(update={"nodes": (TWO_MAKERS.nodes[0], small)}), "torchrun")


def test_doctor_says_what_is_there_and_what_to_do() -> None:
    findings = {finding.what: finding for finding in examine()}
    assert {
        "hethub",
        "torch",
        "mpirun",
        "mpi4py",
        "CuPy",
        "interfaces",
        "host name",
        "shared memory",
    } <= findings.keys()
    assert "lo 127.0.0.1" in findings["interfaces"].found
    assert all(finding.remedy for finding in findings.values() if finding.state == "missing")
    json.dumps([finding.to_dict() for finding in findings.values()], allow_nan=False)


@needs_mpirun
def test_mpirun_starts_where_a_killed_one_of_its_number_has_left_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in a container that starts again with the same /tmp. Open MPI by itself does not start (5.0.11)."""
    number = f"$TMPDIR/ompi.$$/pmix.{socket.gethostname()}.tool.$$"
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\nmkdir -p $TMPDIR/ompi.$$\necho old > {number}\nexec {MPIRUN} "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    for name, value in {**AS_ROOT, "TMPDIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)
    words = ("mpirun", "--oversubscribe", "--bind-to", "none", "-n", "1", "echo", "started")
    assert subprocess.run(words, check=False).returncode != 0
    assert "listener" in capfd.readouterr().err
    assert run_here([Command(words=words)]) == (0, False)
    assert capfd.readouterr().out == "started\n"
    assert not list(tmp_path.glob("hethub-mpirun.*"))


# What runs it is told to end as soon as there is a launcher, which can be told from the outside only by luck.
TOLD_AT_ONCE = """
import os, signal, subprocess
from hethub.runtime.launch.launcher_command import Command, run_here

class ToldAtOnce(subprocess.Popen):
    def __init__(self, *words, **how):
        super().__init__(*words, **how)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = ToldAtOnce
print(run_here([Command(words=("sleep", "600"))]))
"""


def test_a_launcher_is_not_left_behind_by_who_is_told_to_end_right_then(tmp_path):
    ended = Running([sys.executable, "-P", "-c", TOLD_AT_ONCE], tmp_path, {}).end(patience_seconds=5)
    assert (ended.exit_code, ended.stdout) == (0, f"({-signal.SIGTERM}, True)\n"), ended.stderr
