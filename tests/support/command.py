"""The command line as users start it: alone, under mpirun or torchrun, in real processes that cannot be left behind.

`ranks` is the quick way: forked from the warm server of `tests.support.ranks`, in the environment torchrun gives. The
others start everything anew, as a shell would (seconds per process).
"""

import contextlib
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.hosts.sockets import free_port
from tests.support.ranks import start_ranks

PROJECT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
HETHUB = BIN / "hethub"
MPIRUN = shutil.which("mpirun", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
HANG_SECONDS = 270  # a loaded machine may take minutes to start four ranks; pytest's own timeout is 300

needs_mpirun = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py: pip install 'hethub[train]'",
)

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

MARK = "HETHUB_TEST_MARK"  # in the environment of everything a test started, so that it can be found
_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "TORCHELASTIC_", "HETHUB_")
_SINGLE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def paragraphs(self) -> list[str]:
        """What hethub itself said on stderr; launchers add lines of their own."""
        return [line for line in self.stderr.splitlines() if line.startswith("hethub:")]


def check_refused(results: Sequence[Ended], *words: str, speaker: int = 0) -> str:
    """Checks that all ranks ended with 2 and one of them said why, in one paragraph with `words`; returns it."""
    assert [ended.exit_code for ended in results] == [2] * len(results), [ended.stderr for ended in results]
    assert [len(ended.paragraphs) for ended in results] == [int(rank == speaker) for rank in range(len(results))]
    paragraph = results[speaker].stderr.strip()
    assert "\n" not in paragraph
    assert "Traceback" not in paragraph
    for word in words:
        assert word in paragraph
    assert not any(ended.stdout for ended in results)
    return paragraph


class Running:
    """A started command, its processes found by a mark in their environment."""

    def __init__(
        self,
        command: Sequence[str | Path],
        cwd: Path,
        more: dict[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        environment = {**_clean_environment(), "OMP_NUM_THREADS": "1", MARK: self._mark, **more}
        # Read while the command runs; they go with this object.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            list(map(str, command)),
            cwd=cwd,
            env=environment,
            stdin=stdin,
            stdout=self._out if stdout is None else stdout,
            stderr=self._err,
        )

    def pids(self) -> dict[int, dict[str, str]]:
        """The environment of every living process that this command started, by its id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (variables := _environment_of(entry)).get(MARK) == self._mark:
                found[int(entry.name)] = variables
        return found

    def rank_pids(self, rank: int) -> list[int]:
        """The process of a rank, started by mpirun or torchrun; none where it has not started or has ended."""
        names = ("RANK", "OMPI_COMM_WORLD_RANK")
        own = [pid for pid, env in self.pids().items() if any(env.get(name) == str(rank) for name in names)]
        # But for helpers that it has started itself, of which one may have ended since they were listed.
        return [pid for pid in own if parent_of(pid) not in (None, *own)]

    def rank_pid(self, rank: int) -> int:
        """The process of a rank that runs."""
        own = self.rank_pids(rank)
        assert len(own) == 1, f"{len(own)} processes are rank {rank}"
        return own[0]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; fails the test if the command ends first or hangs."""
        deadline = time.monotonic() + HANG_SECONDS
        while not condition():
            assert self.process.poll() is None, f"the command ended first\n{self.stderr()}"
            assert time.monotonic() < deadline, "the command hangs"
            time.sleep(0.05)

    def end(self, patience_seconds: float = 60, hang_seconds: float = HANG_SECONDS) -> Ended:
        """Waits for the command; fails the test if it hangs, or a process is still there so long after its end."""
        try:
            code = self.process.wait(hang_seconds)
            left = self.left_behind(patience_seconds)
        finally:
            self.kill()
        ended = Ended(exit_code=code, stdout=self.stdout(), stderr=self.stderr())
        assert not left, f"left behind: {left}\n{ended.stderr}"
        return ended

    def left_behind(self, patience_seconds: float) -> list[int]:
        """What still lives of the command's processes, waited for at most so long."""
        deadline = time.monotonic() + patience_seconds
        while (left := list(self.pids())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def stdout(self) -> str:
        """All that was written to it so far."""
        return _text(self._out)

    def stderr(self) -> str:
        """All that was written to it so far."""
        return _text(self._err)

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _text(file: IO[bytes]) -> str:
    """All that was written to a captured stream so far."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _environment_of(entry: Path) -> dict[str, str]:
    """A process's environment at its start; empty for a zombie, or where it is not ours to read."""
    try:
        text = (entry / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def parent_of(pid: int) -> int | None:
    """The process that started this one, or has inherited it; None where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _clean_environment() -> dict[str, str]:
    """This environment without any launcher's variables."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS) and k not in _SINGLE}


def hethub(
    *arguments: Any, cwd: Path, environment: dict[str, str] | None = None, hang_seconds: float = HANG_SECONDS
) -> Ended:
    """`hethub …` alone."""
    return Running([HETHUB, *map(str, arguments)], cwd, environment or {}).end(hang_seconds=hang_seconds)


def start_mpirun(
    size: int,
    *arguments: Any,
    cwd: Path,
    program: Sequence[Any] = (HETHUB,),
    environment: dict[str, str] | None = None,
    behind: Sequence[str] = (),
) -> Running:
    """`mpirun -n SIZE hethub …`; `program` may put another in the place of hethub, `behind` a command before all."""
    assert MPIRUN is not None
    command = [
        *behind,
        MPIRUN,
        "--oversubscribe",
        "--bind-to",
        "none",
        "--continuous",
        "-n",
        str(size),
        *program,
        *arguments,
    ]
    # One that was killed leaves its session, with which no other mpirun whose process has the same number starts.
    sessions = {"PRTE_MCA_prte_local_tmpdir_base": str(cwd / f"mpirun-{uuid.uuid4().hex}")}
    return Running(list(map(str, command)), cwd, {**AS_ROOT, **sessions, **(environment or {})})


def mpirun(size: int, *arguments: Any, cwd: Path, **more: Any) -> Ended:
    return start_mpirun(size, *arguments, cwd=cwd, **more).end()


def start_torchrun(size: int, *arguments: Any, cwd: Path, options: Sequence[str] = ()) -> Running:
    """`torchrun --nproc-per-node SIZE -m hethub …`, with more options of torchrun."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        *options,
    ]
    return Running([*launch, "--nproc-per-node", str(size), "-m", "hethub", *map(str, arguments)], cwd, {})


def ranks(
    size: int, *arguments: Any, cwd: Path, hook: Callable[..., Any] | None = None, timeout_seconds: float = HANG_SECONDS
) -> list[Ended]:
    """`hethub …` in forked ranks, one result each; `hook(rank)` runs in every rank before it.

    Processes still running at the timeout are killed, and the test fails.
    """
    master = str(free_port())
    outcomes = start_ranks(
        size, _forked, size, master, str(cwd), list(map(str, arguments)), hook, timeout_seconds=timeout_seconds
    )
    for rank, outcome in enumerate(outcomes):
        assert not outcome.timed_out, f"rank {rank} hangs\n{outcome.stderr}"
    # A traceback that nobody caught is what Python would have printed before it exits with 1.
    return [
        Ended(exit_code=outcome.value[0], stdout=outcome.value[1], stderr=outcome.stderr)
        if outcome.value is not None
        else Ended(exit_code=outcome.exit_code, stdout="", stderr=f"{outcome.stderr}{outcome.traceback or ''}")
        for outcome in outcomes
    ]


def _forked(
    rank: int, store: Any, size: int, port: str, cwd: str, arguments: list[str], hook: Callable[..., Any] | None
) -> tuple[int, str]:
    from hethub.cli import run

    if size > 1:
        names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    os.chdir(cwd)
    if hook is not None:
        hook(rank)
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        code = run(arguments)
    return code, stdout.getvalue()


def one(ended: list[Ended]) -> Ended:
    """The only rank's end."""
    (only,) = ended
    return only


def files_below(folder: Path) -> Iterator[Path]:
    """Every file of a folder, relative to it."""
    return (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
