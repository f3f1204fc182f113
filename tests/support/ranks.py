"""Functions of a test run in real rank processes: `run_ranks` returns every rank's result or raises its failure.

A server process imports torch once and forks the ranks (tens of milliseconds instead of seconds per process). Every
rank has one thread, dies with the server, and is killed at the timeout. The function must stand at the top of a
module; arguments and results are pickled.
"""

import inspect
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.rank_server import wait_for_all

_SERVER = Path(__file__).with_name("rank_server.py")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank ended: exit code (negative: the signal), value or failure, and its stderr."""

    exit_code: int
    timed_out: bool
    value: Any = None
    failed: bool = False
    error: tuple[str, str] | None = None
    traceback: str | None = None
    stderr: str = ""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    islands: Sequence[Sequence[int]] | None = None,
    timeout_seconds: float = 120,
    environment: dict[str, str] | None = None,
    **connect: Any,
) -> list[Any]:
    """`[function(world, *args) on each rank]`, the ranks connected to one world.

    `connect` goes to `hethub.communicator.connect`. Raises AssertionError with the traceback of the rank that failed
    first, or naming the ranks that were still running at the timeout.
    """
    options = {"islands": islands, "timeout_seconds": timeout_seconds, **connect}
    outcomes = start_ranks(
        world_size, function, *args, connect=options, timeout_seconds=timeout_seconds, environment=environment
    )
    return values(outcomes)


def start_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    connect: dict[str, Any] | None = None,
    timeout_seconds: float = 120,
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """How each rank ended, whatever way; without `connect` the function gets (rank, store, *args) and no world."""
    path = inspect.getsourcefile(function)
    assert path is not None
    assert "<locals>" not in function.__qualname__, f"{function.__qualname__} must stand at the top of its module"
    name = function.__module__ if function.__module__ != "__main__" else "__ranks_main__"
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        request = {
            "world_size": world_size,
            "module": (name, str(Path(path).resolve())),
            "function": function.__name__,
            "arguments": pickle.dumps(args),
            "connect": connect,
            "timeout_seconds": timeout_seconds,
            "environment": environment or {},
            "folder": folder,
        }
        return [_outcome(answer) for answer in _SERVERS.ask(request)]


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Every rank's value. Raises AssertionError showing how the first rank failed, if any did."""
    broken = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.failed]
    # A rank that says more than "my peer has gone" is the cause; the others only felt it.
    broken.sort(key=lambda item: (item[1].traceback is None, (item[1].error or ("", ""))[0] == "RunFailed"))
    if broken:
        rank, first = broken[0]
        how = "was still running at the timeout" if first.timed_out else f"ended with exit code {first.exit_code}"
        others = ", ".join(f"rank {r}: {o.error or o.exit_code}" for r, o in broken[1:])
        raise AssertionError(f"rank {rank} {how}\n{first.traceback or ''}\n{first.stderr}\n{others}")
    return [outcome.value for outcome in outcomes]


def meet(world: Any) -> None:
    """Returns when all ranks have come: who fails right behind what connects them would break the others' connecting."""
    wait_for_all(world._context.rendezvous.store, "come", world.rank, world.size)


def wait_for(moment: Path) -> None:
    """Returns when a rank has touched the file: where ranks fail, hethub breaks the store in which they could meet."""
    while not moment.exists():
        time.sleep(0.01)


def _outcome(answer: dict[str, Any]) -> Outcome:
    pickled = answer.pop("value", None)
    value = pickle.loads(pickled) if pickled is not None else None
    return Outcome(value=value, failed=pickled is None or answer["exit_code"] != 0, **answer)


class _Servers:
    """The server process of this test run, started at the first request and again if it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            pickle.dump(request, self._stream)
            self._stream.flush()
            answer: list[dict[str, Any]] = pickle.load(self._stream)
        except BaseException:  # a test's timeout, say: the answer would otherwise reach the next test that asks
            self._stop()
            raise
        return answer

    def _stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SERVER), str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        # The socket closes with this process, whatever way it ends, and that ends the server and its ranks.
        self._stream = ours.makefile("rwb")


_SERVERS = _Servers()
