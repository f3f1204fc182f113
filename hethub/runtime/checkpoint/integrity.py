"""Whether a checkpoint is whole: its marker, the checksums in it, and the search for the newest one that is.

A checkpoint is written as `step-N.partial`, renamed to `step-N`, and complete once it holds the marker.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hethub.spec.errors import BadInput

_log = logging.getLogger(__name__)

MARKER = "COMPLETE"
_NAME = re.compile(r"step-(\d+)(\.partial)?")

Faults = Callable[[Path], list[str]]


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def partial_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def candidates(root: Path) -> list[Path]:
    """Every checkpoint under `root`, whole or not, newest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def checksums(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Size in bytes and blake2b digest of each file."""
    return {name: ((folder / name).stat().st_size, _digest(folder / name)) for name in names}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def complete(partial: Path, files: dict[str, tuple[int, str]]) -> Path:
    """Turns a partial folder, its files synced, into a complete checkpoint and returns it; one of that name goes."""
    folder = partial.with_name(partial.name.removesuffix(".partial"))
    _sync(partial)
    remove(folder)
    partial.rename(folder)
    _sync(folder.parent)
    unfinished = folder / f"{MARKER}.draft"
    with unfinished.open("w", encoding="utf-8") as stream:
        json.dump({"files": files}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(folder / MARKER)
    _sync(folder)
    return folder


def _sync(folder: Path) -> None:
    """Makes the folder's entries last through a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Removes a checkpoint, its marker first: half removed, it is not complete."""
    (folder / MARKER).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def faults(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Why the checkpoint cannot be used, empty where it is whole; `part` of `parts` reads only its share of the
    files."""
    if folder.name.endswith(".partial"):
        return ["its writing was cut off before it was renamed"]
    try:
        marked = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return [f"it has no {MARKER} marker, so its writing was cut off"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"its {MARKER} marker cannot be read ({error})"]
    mine = sorted(marked)[part::parts]
    return [fault for name in mine if (fault := _file_fault(folder / name, *marked[name]))]


def _file_fault(path: Path, num_bytes: int, digest: str) -> str | None:
    try:
        size = path.stat().st_size
        if size != num_bytes:
            return f"file {path.name} has {size} bytes, {num_bytes} were written"
        return None if _digest(path) == digest else f"file {path.name} has another checksum than was written"
    except FileNotFoundError:
        return f"file {path.name} is missing"
    except OSError as error:
        return f"file {path.name} cannot be read ({error})"


def newest_intact(root: Path) -> Path | None:
    """The newest checkpoint under `root` that is whole, None where there is none at all.

    Newer ones that are not are named in a warning. Raises BadInput naming them where none is whole.
    """
    return first_intact(candidates(root), faults, _log.warning)


def first_intact(paths: Sequence[Path], examine: Faults, warn: Callable[[str], None]) -> Path | None:
    """As `newest_intact`, of `paths` with what `examine` finds wrong with each."""
    bad: list[str] = []
    for path in paths:
        found = examine(path)
        if not found:
            return path
        bad.append(f"{path}: {'; '.join(found)}")
        warn(f"a checkpoint cannot be used, the one before is tried. {bad[-1]}.")
    if bad:
        raise BadInput(f"no checkpoint can be used. {'. '.join(bad)}. Restore the damaged files, or start a new run.")
    return None
