"""What Open MPI's daemons tell the ranks of a job and carry between them, without MPI: PMIx, through ctypes.

MPI_Init waits for every rank and cannot be interrupted. PMIx_Init waits for nobody, and the daemons know each rank's
host before that rank has come. A process that has used PMIx itself cannot start Open MPI 5.0 any more (it would take
its own name from a PMIx_Init that it then leaves out), so a helper asks: this file, run as a script without torch. The
layouts are those of the PMIx standard, the same since version 2.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

_STRING, _GLOBAL_SCOPE = 3, 3  # PMIX_STRING, PMIX_GLOBAL
_HOST = "pmix.hname"
_PAUSE_SECONDS = 0.05
_START_SECONDS = 60.0  # for the helper itself, on a busy machine
_NO_PMIX = 3
_PR_SET_PDEATHSIG = 1


class Answer(NamedTuple):
    """A text that some rank has published, None where it has not; and the host of each rank, where it is known."""

    text: str | None
    hosts: list[str | None]


def publish(key: str, text: str, size: int) -> Answer | None:
    """Makes the text known to all ranks; None where this MPI brings no PMIx."""
    return _ask("publish", key, text, size, seconds=0.0)


def look_up(key: str, size: int, seconds: float) -> Answer | None:
    """What rank 0 has published, waited for at most so long; None where this MPI brings no PMIx."""
    return _ask("look up", key, "", size, seconds=seconds)


def _ask(what: str, key: str, text: str, size: int, *, seconds: float) -> Answer | None:
    # The text may be a secret, which does not belong on a command line that other users can see.
    request = json.dumps([os.getpid(), what, key, text, size, seconds])
    environment = {name: value for name, value in os.environ.items() if name != "OMPI_COMM_WORLD_RANK"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__], input=request, stdout=subprocess.PIPE, text=True, env=environment,
            timeout=seconds + _START_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(None, [None] * size)
    return Answer(*json.loads(done.stdout)) if done.returncode == 0 else None


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_uint16), ("string", ctypes.c_char_p), ("rest", ctypes.c_uint64 * 2))


class _Client:
    """This process as a client of its node's daemon. Raises OSError where there is none, or MPI brings no PMIx."""

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI

        self._library: Any = ctypes.CDLL(MPI.__file__)
        if not hasattr(self._library, "PMIx_Init"):
            raise OSError("this MPI library brings no PMIx")
        self._own = _Process()
        status = self._library.PMIx_Init(ctypes.byref(self._own), None, ctypes.c_size_t(0))
        if status != 0:
            raise OSError(f"PMIx_Init answers {status}")

    def publish(self, key: str, text: str) -> None:
        value = _Value(_STRING, text.encode())
        put = self._library.PMIx_Put(ctypes.c_uint8(_GLOBAL_SCOPE), key.encode(), ctypes.byref(value))
        if put != 0 or (status := self._library.PMIx_Commit()) != 0:
            raise OSError(f"PMIx does not publish {key}: {put or status}")

    def look_up(self, key: str, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        # A daemon answers in its own time, with a timeout of its own (two seconds in PRRTE 3).
        while (found := self.get(0, key)) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        return found

    def get(self, rank: int, key: str) -> str | None:
        process, found = _Process(self._own.namespace, rank), ctypes.POINTER(_Value)()
        status = self._library.PMIx_Get(
            ctypes.byref(process), key.encode(), None, ctypes.c_size_t(0), ctypes.byref(found)
        )
        if status != 0 or found.contents.kind != _STRING or found.contents.string is None:
            return None
        return str(found.contents.string.decode(errors="replace"))

    def finalize(self) -> None:
        self._library.PMIx_Finalize(None, ctypes.c_size_t(0))


def _main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank that dies takes its helper with it
    rank, what, key, text, size, seconds = json.load(sys.stdin)
    if os.getppid() != rank:  # it has died before that was asked for, and mpirun would wait for this process
        return _NO_PMIX
    try:
        client = _Client()
    except OSError:
        return _NO_PMIX
    if what == "publish":
        client.publish(key, text)
    else:
        text = client.look_up(key, seconds)
    print(json.dumps([text, [client.get(rank, _HOST) for rank in range(size)]]), flush=True)
    client.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(_main())
