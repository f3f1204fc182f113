"""A real Slurm of two nodes, both this host over loopback, in a folder of its own, for as long as a test needs it.

Components of a het-job never share a node, so one host must pass for two.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.hosts.sockets import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo")
_SEARCHED = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
NODES = ("first", "second")
NUM_CPUS = 8  # claimed, whatever the machine has: the test's ranks share its cores

_CONFIGURATION = """
ClusterName=hethub-test
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CredType=cred/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=first NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs={cpus} State=UNKNOWN
NodeName=second NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes=first,second Default=YES MaxTime=10 State=UP
"""


def missing() -> str | None:
    """Why no Slurm can be started here; None where one can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_SEARCHED) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "starting slurmctld and slurmd in a folder of their own needs root"


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and srun talk to a Slurm whose every file lies in `folder`."""
    host = socket.gethostname().partition(".")[0]
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    ports = {f"{name}_port": free_port() for name in ("controller", *NODES)}
    # The store's port follows from the job's number: Slurms of tests beside this one shall number theirs otherwise.
    first_job = 1 + secrets.randbelow(60_000)
    text = _CONFIGURATION.format(host=host, folder=folder, cpus=NUM_CPUS, first_job=first_job, **ports)
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _SEARCHED}
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    munged += [f"--{kind}-file={folder}/munged.{kind}" for kind in ("log", "pid", "seed")]
    with contextlib.ExitStack() as daemons:
        for command in (munged, ["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-c", "-N", node] for node in NODES)):
            daemons.enter_context(_daemon(command, environment, folder))
            if command is munged:
                _wait_until((folder / "munge.socket").exists, folder)
        _wait_until(lambda: _nodes_are_idle(environment), folder)
        try:
            yield environment
        finally:  # the tasks of a job outlive the daemons
            _asked(["scancel", "--user=root"], environment)
            _wait_until(lambda: not _asked(["squeue", "--noheader"], environment), folder)


@contextlib.contextmanager
def _daemon(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / f"{command[0]}.out").open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=folder)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _nodes_are_idle(environment: dict[str, str]) -> bool:
    return _asked(["sinfo", "--noheader", "--Node", "--format=%T"], environment).split() == ["idle"] * len(NODES)


def _asked(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=30, check=False
    ).stdout.strip()  # fmt: skip


def tasks_with(*words: str | Path) -> list[int]:
    """The living Python processes of Slurm's tasks with these words in their command, in the order of their start."""
    wanted = {os.fsencode(word) for word in words}
    found = []
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            own = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted <= set(own) and b"python" in os.path.basename(own[0]):
            found.append(int(entry.name))
    return found


def _wait_until(is_so: Callable[[], bool], folder: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            said = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(folder.glob("*.log")))
            raise AssertionError(f"Slurm has not got there within {seconds:g} s\n{said}")
        time.sleep(0.1)
