"""What Open MPI's daemons tell the ranks of a job and carry between them, without MPI: PMIx, through ctypes.

MPI_Init waits for every rank and cannot be interrupted. PMIx_Init waits for nobody, and the daemons know each rank's
host before that rank has come. The layouts are those of the PMIx standard, the same since version 2.
"""

import ctypes
import time
from typing import Any

_STRING, _GLOBAL_SCOPE = 3, 3  # PMIX_STRING, PMIX_GLOBAL
_HOST = "pmix.hname"
_PAUSE_SECONDS = 0.05


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_uint16), ("string", ctypes.c_char_p), ("rest", ctypes.c_uint64 * 2))


class Pmix:
    """This process as a client of its node's daemon. Raises OSError where there is none, or MPI brings no PMIx."""

    def __init__(self, mpi: Any) -> None:
        library = ctypes.CDLL(mpi.__file__)
        if not hasattr(library, "PMIx_Init"):
            raise OSError("this MPI library brings no PMIx")
        self._library = library
        self._own = _Process()
        status = library.PMIx_Init(ctypes.byref(self._own), None, ctypes.c_size_t(0))
        if status != 0:
            raise OSError(f"PMIx_Init answers {status}")

    def publish(self, key: str, text: str) -> None:
        """Makes the text known to whoever looks it up."""
        value = _Value(_STRING, text.encode())
        put = self._library.PMIx_Put(ctypes.c_uint8(_GLOBAL_SCOPE), key.encode(), ctypes.byref(value))
        if put != 0 or (status := self._library.PMIx_Commit()) != 0:
            raise OSError(f"PMIx does not publish {key}: {put or status}")

    def look_up(self, rank: int, key: str, seconds: float) -> str | None:
        """What the rank has published, waited for at most so long; None where it has not."""
        deadline = time.monotonic() + seconds
        # A daemon answers in its own time, with a timeout of its own (two seconds in PRRTE 3).
        while (found := self._get(rank, key)) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        return found

    def host(self, rank: int) -> str | None:
        """The host on which the launcher has placed the rank."""
        return self._get(rank, _HOST)

    def finalize(self) -> None:
        self._library.PMIx_Finalize(None, ctypes.c_size_t(0))

    def _get(self, rank: int, key: str) -> str | None:
        process, found = _Process(self._own.namespace, rank), ctypes.POINTER(_Value)()
        status = self._library.PMIx_Get(
            ctypes.byref(process), key.encode(), None, ctypes.c_size_t(0), ctypes.byref(found)
        )
        if status != 0 or found.contents.kind != _STRING or found.contents.string is None:
            return None
        return str(found.contents.string.decode(errors="replace"))
