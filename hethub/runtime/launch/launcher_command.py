"""The command that starts a job on its cluster: mpirun contexts, torchrun on every node, or a Slurm het-job."""

import contextlib
import ctypes
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from hethub.runtime.launch.launcher_environment import first_host
from hethub.spec.cluster import ClusterSpec, NodeSpec, is_host
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.network import TOKEN_VARIABLE, choose_interface

LauncherName = Literal["mpirun", "torchrun", "srun", "sbatch"]
LAUNCHERS: tuple[LauncherName, ...] = ("mpirun", "torchrun", "srun", "sbatch")
MASTER_PORT = 29400
SETTINGS = (
    "NCCL_", "RCCL_", "GLOO_", "UCX_", "HETHUB_", "HSA_", "GPU_MAX_HW_QUEUES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "PYTORCH_", "TORCH",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # to save and exit
_SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"  # where Open MPI's mpirun keeps a folder while it runs
_HANDED_ON = {"mpirun": signal.SIGUSR1, "torchrun": signal.SIGINT}  # to ranks by their launcher; by srun SIGTERM


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to run, and where: None is here, else the host it belongs on."""

    words: tuple[str, ...]
    host: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    script: str | None = None  # what the command reads from its standard input

    def __str__(self) -> str:
        settings = "".join(f"{name}={shlex.quote(value)} " for name, value in self.environment.items())
        text = settings + " ".join("\\\n  :" if word == ":" else shlex.quote(word) for word in self.words)
        if self.script is not None:
            text = f"{text} <<'SCRIPT'\n{self.script}SCRIPT"
        return text if self.host is None else f"# on {self.host}\n{text}"


def launch_commands(
    job: Path, cluster: ClusterSpec, launcher: LauncherName, extra: Sequence[str] = ()
) -> list[Command]:
    """The commands that start `hethub train JOB` with one rank per accelerator, ranks in the order of the cluster file.

    mpirun: one command, a context per node entry, each with its own environment. torchrun: one command per machine.
    srun: one command, a component per node entry. sbatch: the batch script whose components srun then fills. `extra` is
    added to `hethub train`. Raises BadInput where the cluster file lacks the host names that the launcher needs.
    """
    if cluster.emulated:  # whose ranks run here, in this environment
        cluster = cluster.replace(nodes=tuple(node.replace(environment=None) for node in cluster.nodes))
    train = ("train", str(job), *extra)
    if launcher == "mpirun":
        return [Command(words=_mpirun(cluster, train), environment=_as_root())]
    if launcher == "srun":
        return [Command(words=_srun(cluster, train), environment=_srun_environment(cluster))]
    if launcher == "sbatch":
        return [Command(words=("sbatch",), script=_batch_script(job, cluster, extra))]
    return _torchrun(cluster, train)


def _mpirun(cluster: ClusterSpec, train: Sequence[str]) -> tuple[str, ...]:
    """`--continuous` leaves it to hethub to end all ranks with a reason when one dies.

    Open MPI would bind a rank to one core, which autograd, the relays, a checkpoint's writer and compilers share then.
    """
    local = is_local(cluster)
    words = [beside_python("mpirun"), "--continuous", "--bind-to", "none", *(("--oversubscribe",) if local else ())]
    if cluster.network is not None and not local:
        words += ["--prtemca", "prte_if_include", cluster.network]
    words += _daemon(cluster)
    for index, node in enumerate(cluster.nodes):
        where = () if local else ("--host", ",".join(f"{host}:{node.accelerators}" for host in hosts_of(node)))
        carried = () if local else _carried()
        count = str(node.count * node.accelerators)
        words += [*((":",) if index else ()), "-n", count, *where, *carried, *_hethub(node), *train]
    return tuple(words)


def _as_root() -> dict[str, str]:
    """What lets root start mpirun, which refuses it otherwise, as no other launcher does: containers often run as root."""
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") if os.geteuid() == 0 else ()
    return {name: "1" for name in names if name not in os.environ}


def _carried() -> tuple[str, ...]:
    """The user's settings of libraries for every rank: over ssh Open MPI carries its own variables alone."""
    return tuple(word for name in sorted(os.environ) if name.startswith(SETTINGS) for word in ("-x", name))


def _daemon(cluster: ClusterSpec) -> list[str]:
    """Where nodes have other environments than this: Open MPI would start its daemon on all hosts at the path it has
    here; this starts that of the first environment which a host has."""
    environments = list(dict.fromkeys(node.environment or sys.prefix for node in cluster.nodes))
    if environments == [sys.prefix]:
        return []
    listed = " ".join(shlex.quote(f"{environment}/bin/prted") for environment in environments)
    find = f'for each in {listed}; do if [ -x "$each" ]; then exec "$each" "$@"; fi; done; exit 127'
    return ["--prtemca", "prte_launch_agent", f"sh -c {shlex.quote(find)} prted"]


def _srun(cluster: ClusterSpec, train: Sequence[str]) -> tuple[str, ...]:
    """`--kill-on-bad-exit=0` leaves it to hethub to end all ranks with a reason when one dies."""
    words = ["srun", "--kill-on-bad-exit=0", "--cpu-bind=none"]
    if is_local(cluster):
        return (*words, f"--ntasks={cluster.size}", *_hethub(cluster.nodes[0]), *train)
    for index, node in enumerate(cluster.nodes):
        group = (f"--het-group={index}",) if len(cluster.nodes) > 1 else ()
        words += [*((":",) if index else ()), *group, *_tasks(node), *_hethub(node), *train]
    return tuple(words)


def _tasks(node: NodeSpec) -> tuple[str, ...]:
    return (f"--nodes={node.count}", f"--ntasks={node.count * node.accelerators}")


def _srun_environment(cluster: ClusterSpec) -> dict[str, str]:
    """The job's secret; and inside an allocation, on its first node, where rank 0 will serve the store.

    A rank knows the first node by its name only, and that may lead to another network than the job's.
    """
    found = {TOKEN_VARIABLE: secrets.token_hex(16)}
    nodes = os.environ.get("SLURM_JOB_NODELIST_HET_GROUP_0", os.environ.get("SLURM_JOB_NODELIST", ""))
    if nodes and first_host(nodes) == os.environ.get("SLURMD_NODENAME") and "MASTER_ADDR" not in os.environ:
        network = cluster.network_of(0)
        if network is not None:
            found["MASTER_ADDR"] = choose_interface(network, is_multi_node=True).address
    return found


def _batch_script(job: Path, cluster: ClusterSpec, extra: Sequence[str]) -> str:
    """A script of one component per node entry; on the first node of the first it starts srun over all of them."""
    hosts = [host for node in cluster.nodes for host in node.host_names or ()]
    whole = [host for node in cluster.nodes if node.device.vendor != "cpu" for host in node.host_names or ()]
    if twice := [host for host in whole if hosts.count(host) > 1]:
        raise BadInput(
            f"machine '{twice[0]}' is among the hosts of two nodes, and Slurm gives it to one of them whole; name it once, or use "
            "--with mpirun where accelerators of two makers share a machine."
        )
    lines = ["#!/bin/bash", "#SBATCH --job-name=hethub"]
    if is_local(cluster):
        lines.append(f"#SBATCH --nodes=1 --ntasks={cluster.size}")
    for index, node in enumerate(() if is_local(cluster) else cluster.nodes):
        tasks = [*_tasks(node), f"--ntasks-per-node={node.accelerators}"]
        if node.device.vendor != "cpu":
            # Without the whole node Slurm gives a task one core.
            tasks += [f"--gpus-per-node={node.accelerators}", "--exclusive"]
        if node.host_names is not None:
            tasks.append(f"--nodelist={','.join(node.host_names)}")
        lines += [*(("#SBATCH hetjob",) if index else ()), f"#SBATCH {' '.join(tasks)}"]
    lines.append(f"exec {shlex.join([*_hethub(cluster.nodes[0]), 'launch', str(job), '--with', 'srun', *extra])}")
    return "\n".join(lines) + "\n"


def _torchrun(cluster: ClusterSpec, train: Sequence[str]) -> list[Command]:
    token = {TOKEN_VARIABLE: secrets.token_hex(16)}
    if is_local(cluster):
        words = (beside_python("torchrun"), "--standalone", f"--nproc-per-node={cluster.size}", "-m", "hethub", *train)
        return [Command(words=words, environment=token)]
    counts = {node.accelerators for node in cluster.nodes}
    machines = [(host, node) for node in cluster.nodes for host in hosts_of(node)]
    if len(counts) > 1:
        raise BadInput(
            f"torchrun starts equally many ranks on every machine, but cluster '{cluster.name}' has machines with "
            f"{' and '.join(map(str, sorted(counts)))} accelerators; use --with mpirun or --with sbatch."
        )
    commands = []
    for index, (host, node) in enumerate(machines):
        words = (
            f"{_bin(node)}torchrun", f"--nnodes={len(machines)}", f"--node-rank={index}", f"--nproc-per-node={node.accelerators}",
            f"--master-addr={machines[0][0]}", f"--master-port={MASTER_PORT}", "-m", "hethub", *train,
        )  # fmt: skip
        commands.append(Command(words=words, host=host, environment=token))
    return commands


def hosts_of(node: NodeSpec) -> tuple[str, ...]:
    """The host names of a node entry. Raises BadInput where it names none and is several machines, or has no host's name."""
    names = node.host_names
    if names is None and node.count > 1:
        raise BadInput(
            f"node '{node.name}' stands for {node.count} machines, and starting on them needs their host names; give "
            f"`hosts: [{node.name}1, {node.name}2, …]` with one name per machine."
        )
    names = names or (node.name,)
    if not all(map(is_host, names)):
        raise BadInput(f"node '{node.name}' has no name that a host could have; give its machine's as `hosts: [NAME]`.")
    return names


def is_local(cluster: ClusterSpec) -> bool:
    """Whether all nodes are this machine: emulated ones, and CPU nodes with neither hosts nor an environment of their own."""
    return cluster.emulated or all(
        node.hosts is None and node.environment is None and node.device.vendor == "cpu" for node in cluster.nodes
    )


def beside_python(program: str) -> str:
    """The program of this very environment where it has one: an mpirun of another MPI would not fit mpi4py."""
    here = Path(sys.executable).with_name(program)
    return str(here) if here.exists() else program


def _bin(node: NodeSpec) -> str:
    return f"{node.environment}/bin/" if node.environment is not None else ""


def _hethub(node: NodeSpec) -> tuple[str, ...]:
    return (f"{node.environment}/bin/hethub",) if node.environment is not None else (sys.executable, "-m", "hethub")


def run_here(commands: Sequence[Command]) -> tuple[int, bool]:
    """Runs the command; its exit code, and whether it was asked to end. Raises BadInput where there are several, of several
    machines."""
    if len(commands) > 1 or commands[0].host not in (None, socket.gethostname(), "localhost"):
        raise BadInput(
            f"torchrun is started once on every machine ({', '.join(str(c.host) for c in commands)}); run each command there "
            "(--dry-run prints them), or use --with mpirun, which reaches all machines from here."
        )
    (command,) = commands
    program = command.words[0]
    if shutil.which(program) is None:
        raise BadInput(
            f"{program}: there is no such program here; start the job where it is, or with another launcher (--with). "
            "--dry-run prints the command."
        )
    with _own_sessions(Path(program).name) as environment:
        return _run(command, environment, _HANDED_ON.get(Path(program).name, signal.SIGTERM))


@contextlib.contextmanager
def _own_sessions(launcher: str) -> Iterator[dict[str, str]]:
    """The environment that gives mpirun's session a place of the job's own on this host; what the user has set stays.

    Open MPI 5.0 calls the session by the number of mpirun's process, and does not start where one that was killed has left
    its own under that number: in a container that starts again with the same /tmp, numbers come again.
    """
    if launcher != "mpirun" or _SESSIONS in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="hethub-mpirun.", ignore_cleanup_errors=True) as folder:
        yield {_SESSIONS: folder}


def _run(command: Command, more: Mapping[str, str], handed_on: signal.Signals) -> tuple[int, bool]:
    """The exit code of a launcher, whose ranks are asked to save and exit when this process is told to end; and whether it
    was.

    At a Ctrl-C of its own mpirun (Open MPI 5.0) kills its ranks half a second later, so launchers run where the
    terminal's does not reach them, and get what they hand on to their ranks; where this process is killed, Linux sends
    them that. The second Ctrl-C ends the ranks at once.
    Raises RunFailed where it does, and without a word where the ranks were asked and have said why they failed.
    """
    stdin = subprocess.DEVNULL if command.script is None else subprocess.PIPE
    environment = {**os.environ, **command.environment, **more}
    process: subprocess.Popen[str] | None = None
    asked = ended = False
    own, prctl = os.getpid(), getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it

    def end_with_its_parent() -> None:
        """Run by what becomes the launcher; to the kernel its parent is the thread that starts it, here the main one."""
        signal.signal(handed_on, signal.SIG_DFL)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, handed_on)
        if os.getppid() != own:  # it was killed before
            os.kill(os.getpid(), handed_on)

    def hand_on() -> None:
        if process is not None:
            process.send_signal(signal.SIGINT if ended else handed_on)

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked, ended
        ended = asked and number != signal.SIGUSR1
        asked = True
        hand_on()

    # Before the launcher starts: what ended this process behind that would leave the job to itself.
    before = {number: signal.signal(number, ask) for number in _ASKING}
    try:
        process = subprocess.Popen(
            command.words, env=environment, stdin=stdin, text=True, start_new_session=True, preexec_fn=end_with_its_parent
        )  # fmt: skip
        if asked:
            hand_on()
        process.communicate(command.script)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if ended or (asked and process.returncode == 1):
        error = RunFailed("ended at once, as asked; go on from the last checkpoint that was whole with --resume DIR.")
        error.quiet = not ended
        raise error
    return process.returncode, asked
