"""What Open MPI leaves in shared memory when its processes are killed, and who removes it: the next job."""

import contextlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BACKING_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
_SETTLED_SECONDS = 60.0  # a process that has just made a segment may not have mapped it yet


def backing_folder() -> Path:
    """Where Open MPI's segments go instead of /dev/shm: as the user has set it, or where jobs go that find it too small."""
    return Path(os.environ.get(BACKING_VARIABLE) or tempfile.gettempdir())


def remove_dead_segments(folders: Sequence[Path] | None = None) -> list[str]:
    """Removes this user's segments of this host that no process has mapped any more, and returns their names.

    Without `folders`, wherever a job of ours puts them.

    Open MPI calls them sm_segment.HOST.UID.JOB.RANK. Everything else stays, a stranger's and a living job's above all.
    Our own shared memory has no names: the kernel frees it with the last process.
    """
    name = re.compile(rf"sm_segment\.{re.escape(socket.gethostname())}\.{os.getuid()}\.[0-9a-f]+\.\d+")
    places = [path for folder in folders or (SHARED_MEMORY, backing_folder()) for path in folder.glob("sm_segment.*")]
    found = [path for path in places if name.fullmatch(path.name) and _is_settled(path)]
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
