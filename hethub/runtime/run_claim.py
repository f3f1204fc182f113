"""Who writes a run folder: one job at a time, by a lock that ends with its owner however that ends."""

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from hethub.spec.errors import BadInput

OWNER = "owner.json"
UNWRITABLE = "Choose another run folder (--run-dir), or allow it; a run can also go on in a copy (--resume COPY)."

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class RunClaim:
    """The claim of this process on a run folder, once `take` has returned; a context manager that gives it back.

    The owner holds a flock on owner.json, which says who it is. A lock ends with its process, so a dead owner's claim
    is taken over without asking whether it lives. The record goes when the owner ends well and stays when it does not.
    Local file systems, NFS, CephFS, GPFS and Lustre (mounted with `flock`) lock between hosts; where a file system has
    no locks `take` says so, and nobody is kept out.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1
        self.took_over = False  # a job had this folder that did not end well
        self._made: list[Path] = []  # folders that were not there before, the innermost first

    def take(self, folder: Path) -> str | None:
        """Claims the folder, made where it is missing; returns what the user should know of it.

        Raises BadInput where another job has it, naming that, or it cannot be written.
        """
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{folder}: this is a file, and a run's folder is to be written; give another --run-dir.")
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return self._take(folder, made)
        except OSError as error:
            raise BadInput(f"{folder}: this rank cannot write there ({error.strerror}). {UNWRITABLE}") from None

    def take_new(self, folder: Path) -> Path:
        """Claims `folder`, or where that is there already the first of folder-2, folder-3 … that is not; which."""
        number, path = 1, folder
        while True:
            made = [parent for parent in path.parents if not parent.exists()]
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir()
                self._take(path, [path, *made])
                return path
            except FileExistsError:
                number += 1
                path = folder.with_name(f"{folder.name}-{number}")
            except OSError as error:
                raise BadInput(
                    f"{path}: cannot be made ({error.strerror}). Choose another run folder (--run-dir)."
                ) from None

    def _take(self, folder: Path, made: list[Path]) -> str | None:
        note = None
        path = folder / OWNER
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                said = _owner(descriptor)
                os.close(descriptor)
                raise BadInput(
                    f"{folder}: {said} uses this run folder. Wait until it has ended, or give another --run-dir."
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise
                note = f"{folder} is on a file system without locks: another job in it would go unnoticed"
            if _is_same(descriptor, path):
                break
            os.close(descriptor)  # its owner has just given it back
        self._path, self._descriptor, self._made = path, descriptor, made
        self.took_over = os.fstat(descriptor).st_size > 0
        record = {
            "host": socket.gethostname(), "pid": os.getpid(), "started_ticks": started_ticks(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }  # fmt: skip
        # Written over, not emptied first: where this process ends in between, the next one still sees that a job was here.
        os.ftruncate(descriptor, os.pwrite(descriptor, json.dumps(record).encode(), 0))
        return note

    def release(self, *, ended_well: bool = True) -> None:
        """Gives the folder back; one that this claim made and nothing was written to goes, however the job ended."""
        if self._path is None:
            return
        folder = self._path.parent
        nothing_written = bool(self._made) and folder.is_dir() and os.listdir(folder) == [OWNER]
        if ended_well or nothing_written:
            with suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)
        self._path = None
        with suppress(OSError):  # not empty
            for made in self._made:
                made.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Bad input is found before anything is written: the folder is as the job before has left it.
        self.release(ended_well=not self.took_over if isinstance(value, BadInput) else value is None)


def started_ticks(pid: int) -> int | None:
    """When a process of this host began, in clock ticks since the boot; None where there is none, or one that has ended
    and that nobody has waited for, as in a container whose first process waits for none. Numbers of processes are used
    again, a number with its start is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat.rpartition(b")")[2].split()  # behind the second field, the name, which may hold spaces
    return None if state == b"Z" else int(fields[18])  # the 22nd


def _owner(descriptor: int) -> str:
    """Who the record names: a process, its host and since when."""
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {record['pid']} on {record['host']} (since {record['since']})"
    except (ValueError, KeyError, TypeError, RecursionError):  # it has taken the lock and not written yet
        return "another job, which has just begun,"


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether the file that was locked still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
