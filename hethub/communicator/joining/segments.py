"""What Open MPI leaves in shared memory when its processes are killed, and who removes it: the next job."""

import contextlib
import os
import re
import socket
import time
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_SETTLED_SECONDS = 60.0  # a process that has just made a segment may not have mapped it yet


def remove_dead_segments(folder: Path = _SHARED_MEMORY) -> list[str]:
    """Removes this user's segments of this host that no process has mapped any more, and returns their names.

    Open MPI calls them sm_segment.HOST.UID.JOB.RANK. Everything else stays, a stranger's and a living job's above all.
    Our own shared memory has no names: the kernel frees it with the last process.
    """
    name = re.compile(rf"sm_segment\.{re.escape(socket.gethostname())}\.{os.getuid()}\.[0-9a-f]+\.\d+")
    found = [path for path in folder.glob("sm_segment.*") if name.fullmatch(path.name) and _is_settled(path)]
    if not found:
        return []
    in_use = _mapped_files()
    removed = []
    for path in found:
        if str(path) not in in_use:
            with contextlib.suppress(OSError):  # another job's rank was quicker
                path.unlink()
                removed.append(path.name)
    return removed


def _is_settled(path: Path) -> bool:
    try:
        facts = path.stat()
    except OSError:
        return False
    return facts.st_uid == os.getuid() and time.time() - facts.st_mtime > _SETTLED_SECONDS


def _mapped_files() -> set[str]:
    """The files that processes have mapped, as far as this user may look: nobody else may open this user's segments."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            mapped |= {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "sm_segment." in line}
    return mapped
