"""Where Open MPI's processes share memory, and who removes what killed ones have left there: the next job."""

import contextlib
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BACKING_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
_SETTLED_SECONDS = 60.0  # a process that has just made a segment may not have mapped it yet
_SEGMENT_BYTES = 16 << 20  # what Open MPI 5 asks for, for a rank; without it MPI_Init aborts
_FOLDER = f"hethub-mpi.{os.getuid()}."  # and the name of the job

_log = logging.getLogger(__name__)


def place_segments(*, local_rank: int, local_size: int, job: str | None) -> None:
    """Has Open MPI share memory in a folder of the job's own, one on each host; in the temporary folder where /dev/shm is too
    small, which would end the process. What the user has set stays. Without the name of a `job`, in no folder of its own.

    Open MPI 5.0 names a segment by 16 bits, which it makes of the host's name and the number of mpirun's process. Two jobs
    with one name (by chance one pair in 65,536, and containers that share their host's name and memory) write over each
    other's memory, and may end by SIGSEGV. Our own relay shares memory that has no place in a file system.
    """
    if BACKING_VARIABLE in os.environ or not SHARED_MEMORY.is_dir():
        return
    needed, folder = local_size * _SEGMENT_BYTES, SHARED_MEMORY
    if shutil.disk_usage(SHARED_MEMORY).free < needed:
        folder = Path(tempfile.gettempdir())
        if local_rank == 0:
            _log.warning(
                "%s has less than the %d MiB that Open MPI shares here, so it takes %s instead; a larger %s "
                "(--shm-size of a container) is faster.",
                SHARED_MEMORY,
                needed >> 20,
                folder,
                SHARED_MEMORY,
            )
    if job is not None:
        folder = folder / f"{_FOLDER}{job}"
        folder.mkdir(mode=0o700, exist_ok=True)
    os.environ[BACKING_VARIABLE] = str(folder)


def leave_segments() -> None:
    """Removes the job's folder of this host, when all ranks are about to end: what they share they have opened."""
    folder = Path(os.environ.get(BACKING_VARIABLE, ""))
    if folder.name.startswith(_FOLDER):
        shutil.rmtree(folder, ignore_errors=True)  # another rank removes it as well


def remove_dead_segments(places: Sequence[Path] | None = None) -> list[str]:
    """Removes this user's segments of this host that no process has mapped any more, and returns their names.

    Without `places`, wherever a job puts them, with the folders that jobs have left.

    Open MPI calls them sm_segment.HOST.UID.JOB.RANK. Everything else stays, a stranger's and a living job's above all.
    Our own shared memory has no names: the kernel frees it with the last process.
    """
    name = re.compile(rf"sm_segment\.{re.escape(socket.gethostname())}\.{os.getuid()}\.[0-9a-f]+\.\d+")
    temporary = Path(tempfile.gettempdir())
    if places is None:
        places = list({SHARED_MEMORY, temporary, Path(os.environ.get(BACKING_VARIABLE, temporary))})
    folders = [folder for place in places for folder in place.glob(f"{_FOLDER}*")]
    left = [folder for folder in folders if _is_settled(folder)]
    paths = [path for place in (*places, *folders) for path in place.glob("sm_segment.*")]
    found = [path for path in paths if name.fullmatch(path.name) and _is_settled(path)]
    in_use = _mapped_files() if found else set()
    removed = []
    for path in found:
        if str(path) not in in_use:
            with contextlib.suppress(OSError):  # another job's rank was quicker
                path.unlink()
                removed.append(path.name)
    for folder in left:
        with contextlib.suppress(OSError):  # something is in it
            folder.rmdir()
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
