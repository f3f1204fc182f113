"""Who this process is in its job, as its launcher tells it: torchrun, Open MPI, MPICH, Slurm or nobody.

All values come from one launcher: Slurm's variables leak into an mpirun inside an allocation, and a torchrun started
by mpirun leaves both. The innermost launcher counts.
"""

import functools
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

from hethub.spec.errors import BadInput

Launcher = Literal["torchrun", "openmpi", "mpich", "slurm", "alone"]


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """This process's place in the job, as its launcher tells it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: Launcher

    @property
    def is_multi_node(self) -> bool:
        return self.local_size < self.size


def launch_info(environment: Mapping[str, str] = os.environ) -> LaunchInfo:
    """The place of this process. Raises BadInput where the launcher's variables are incomplete or contradict."""
    launcher = _innermost_launcher(environment)
    if launcher == "alone":
        return LaunchInfo(rank=0, size=1, local_rank=0, local_size=1, launcher="alone")
    if launcher == "slurm":
        info = _from_slurm(environment)
    else:
        names = _VARIABLES[launcher]
        rank, size, local_rank, local_size = (_number(environment, name, launcher) for name in names)
        info = LaunchInfo(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher=launcher)
    if not (0 <= info.rank < info.size and 0 <= info.local_rank < info.local_size <= info.size):
        raise BadInput(
            f"{launcher} says rank {info.rank} of {info.size}, local rank {info.local_rank} of {info.local_size}:"
            " these contradict each other. Start the job with one launcher and unset the variables of others."
        )
    return info


@contextmanager
def one_voice_per_node(info: LaunchInfo) -> Iterator[None]:
    """Around checks before the ranks can speak with each other: all ranks of a node find the same fault, and one prints it."""
    try:
        yield
    except BadInput as error:
        error.quiet = info.local_rank != 0
        raise


_VARIABLES: dict[Launcher, tuple[str, str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_RANK: dict[Launcher, str] = {**{launcher: names[0] for launcher, names in _VARIABLES.items()}, "slurm": "SLURM_PROCID"}


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is rank 0 of its launcher, or alone; asks for no more variables than that."""
    launcher = _innermost_launcher(environment)
    return launcher == "alone" or environment.get(_RANK[launcher], "0") == "0"


ASKED_TO_END = "it was asked to (SIGUSR1) before its first step: there is nothing to save, start it again"
_LINGER_SECONDS = 2.0  # as the watch: mpirun kills who is left when half of the ranks have gone
# For the first rank's word, whose handler waits for the C code that it came upon; then mpirun ends who still waits.
_WORD_SECONDS = 20.0


def end_unmet(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of SIGUSR1 until the ranks have met, who then listen to it themselves: ends this rank, the first one
    with a word. It raises nothing: what it came upon, an import above all, might catch that or wrap it in its own. And it
    takes nothing from torch, whose import it may come upon."""
    if is_first_rank():
        with suppress(OSError):  # who read stderr may be gone too
            os.write(2, f"hethub: rank 0 ends because {ASKED_TO_END}.\n".encode())
    if is_under_open_mpi():
        time.sleep(_LINGER_SECONDS if is_first_rank() else _WORD_SECONDS)
    os._exit(1)


# What torchrun and Slurm say to a job that they start again.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def is_restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher has started this rank before; torchrun's agents, one on each node, count by themselves."""
    return any(environment.get(name, "0").strip() not in ("", "0") for name in _RESTARTS)


@functools.cache
def launcher_of(process: int) -> int:
    """What started this process, `process`, as it was when this was first asked: commands ask before they import torch, for
    a launcher may be gone by the time that ranks have. A fork has an answer of its own."""
    return os.getppid()


def is_under_open_mpi(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether Open MPI's mpirun started this process, or what started it."""
    return _RANK["openmpi"] in environment


def _innermost_launcher(environment: Mapping[str, str]) -> Launcher:
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    if is_under_open_mpi(environment):
        return "openmpi"
    if "PMI_RANK" in environment and "MPI_LOCALRANKID" in environment:
        return "mpich"
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= environment.keys():
        return "torchrun"
    # A batch script has SLURM_PROCID too; only what srun has started is in a step.
    if _RANK["slurm"] in environment and "SLURM_STEP_ID" in environment:
        return "slurm"
    return "alone"


def _number(environment: Mapping[str, str], name: str, launcher: Launcher) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise BadInput(
            f"this process was started by {launcher}, but {name} is not set. Start it with {launcher}'s own command,"
            " or unset the other variables of that launcher."
        ) from None
    except ValueError:
        raise BadInput(f"{name}={environment[name]!r} is not a number; {launcher} sets it, do not change it.") from None


def _from_slurm(environment: Mapping[str, str]) -> LaunchInfo:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    rank, size, local_rank = (
        _number(environment, name, "slurm") for name in (_RANK["slurm"], size_name, "SLURM_LOCALID")
    )
    if "SLURM_STEP_TASKS_PER_NODE" in environment and "SLURM_NODEID" in environment:
        tasks = expand_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        local_size = tasks[_number(environment, "SLURM_NODEID", "slurm")]
    else:
        local_size = _number(environment, "SLURM_NTASKS_PER_NODE", "slurm")
    return LaunchInfo(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher="slurm")


def expand_tasks_per_node(text: str) -> list[int]:
    """Slurm's `4(x2),1` as [4, 4, 1]."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise BadInput(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form '4(x2),1'; Slurm sets it.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(node_list: str) -> str:
    """The first host of Slurm's `nv[01-04,07],amd1`: nv01."""
    match = re.match(r"([^,\[]*)(?:\[(\w+))?", node_list)
    assert match is not None
    return match[1] + (match[2] or "")


def place_of(info: LaunchInfo, rank: int, *, host: str | None = None) -> str:
    """What this rank knows of where and as what the launcher has started another: ` (on nv1, as "-n 1 /bin/false")`.

    `host` is what the launcher itself says; without it, ranks of one node share this one's. mpirun shows its command
    to the ranks of its own node, which matters where its contexts start unlike commands.
    """
    where = host if host is not None or info.is_multi_node else socket.gethostname()
    words = _context_of(rank) if info.launcher == "openmpi" else None
    known = [*([f"on {where}"] if where else []), *([f'as "{words}"'] if words else [])]
    return f" ({', '.join(known)})" if known else ""


def _context_of(rank: int) -> str | None:
    """The part of mpirun's command that starts a rank, where it has several parts and this node can see it."""
    counts = [int(word) for word in os.environ.get("OMPI_APP_CTX_NUM_PROCS", "").split()]
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return None
    contexts = [" ".join(part.strip("\0").split("\0")) for part in command.split("\0:\0")]
    if len(counts) < 2 or len(contexts) != len(counts):
        return None
    for count, context in zip(counts, contexts, strict=True):
        if rank < count:
            return context
        rank -= count
    return None
