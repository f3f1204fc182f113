"""Whether a checkpoint is whole: its marker, the checksums in it, and the search for the newest one that is.

A checkpoint is written as `step-N.partial`, the marker last, and then renamed to `step-N`: a folder of that name is
whole. One that is newer than what a run goes on from becomes `step-N.set-aside`, which no run touches. Checksums find
damage, not malice, for whoever can write a file can write its checksum; so the files are read as data, and what they
say is checked like any input.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hethub.runtime.checkpoint.index import INDEX, METADATA, DamagedCheckpoint, WholeNumber, check_elements, read_index
from hethub.runtime.checkpoint.record import RECORD, read_record
from hethub.spec.base import Spec, build
from hethub.spec.documents import Source, read_json, write_whole
from hethub.spec.errors import BadInput, RunFailed

MARKER = "COMPLETE"
_NAME = re.compile(r"step-([0-9]+)")
_PARTIAL = ".partial"

FileName = Annotated[str, Field(pattern=r"^\.?[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")]
FileMark = tuple[WholeNumber, Annotated[str, Field(pattern="^[0-9a-f]{32}$")]]

Faults = Callable[[Path], list[str]]


class Marker(Spec):
    """The file COMPLETE, one to one: bytes and blake2b digest of every other file."""

    files: dict[FileName, FileMark] = Field(min_length=1)


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint by its name."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def partial_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_PARTIAL}")


def candidates(root: Path) -> list[Path]:
    """Every checkpoint that was complete under `root`, whole or not by now, newest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def check_present(root: Path, step: int | None) -> None:
    """Raises BadInput, naming those that are there, where the checkpoint of `step` was asked for and is not."""
    there = [path.name for path in candidates(root)]
    if step is not None and folder_of(root, step).name not in there:
        raise BadInput(f"{folder_of(root, step)}: there is no such checkpoint; there are {', '.join(there) or 'none'}.")


def none_whole(root: Path) -> BadInput:
    """What to raise where there is nothing to resume from."""
    return BadInput(f"{root}: there is no complete checkpoint to resume from; start the job anew without --resume.")


def partials(root: Path) -> list[Path]:
    """Every folder under `root` whose writing has not come to its end."""
    return [path for path in root.glob(f"step-*{_PARTIAL}") if _NAME.fullmatch(path.name.removesuffix(_PARTIAL))]


def newest_marker(root: Path) -> float | None:
    """When the last complete checkpoint under `root` was written, by its marker, one that lacks but its name counted too;
    None where there is none."""
    times = []
    for path in [*candidates(root), *partials(root)]:
        with suppress(FileNotFoundError, NotADirectoryError):  # none is there, or its run is just removing it
            times.append((path / MARKER).stat().st_mtime)
    return max(times, default=None)


def checksums(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Size in bytes and blake2b digest of each file."""
    return {name: ((folder / name).stat().st_size, _digest(folder / name)) for name in names}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def complete(partial: Path, files: dict[str, tuple[int, str]]) -> Path:
    """Turns a partial folder, its files synced, into a complete checkpoint and returns it; one of that name goes.

    The marker comes first and the name last: whatever has the name is whole, or was damaged since.
    """
    write_whole(partial / MARKER, json.dumps({"files": files}, indent=1))
    _sync(partial)
    remove(_finished(partial))
    return _rename(partial)


def finish_cut_off(root: Path) -> None:
    """Gives their name to the partial folders under `root` that have a marker, so only that was left to do. Only the
    run's owner may call it."""
    for partial in partials(root):
        if (partial / MARKER).exists() and not _finished(partial).exists():
            _rename(partial)


def _finished(partial: Path) -> Path:
    return partial.with_name(partial.name.removesuffix(_PARTIAL))


def _rename(partial: Path) -> Path:
    folder = _finished(partial)
    partial.rename(folder)
    _sync(folder.parent)
    return folder


def _sync(folder: Path) -> None:
    """Makes the folder's entries last through a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Removes a checkpoint, its marker first: half removed, it is not complete. What a link leads to stays."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        with suppress(FileNotFoundError):
            (folder / MARKER).rename(folder / f"{MARKER}.removed")
        shutil.rmtree(folder)


def faults(folder: Path, part: int = 0, parts: int = 1, *, contents: bool = True) -> list[str]:
    """What of the checkpoint is damaged, empty where nothing is; `part` of `parts` reads only its share of the files.
    `contents`: index and record are looked into too.

    Raises OSError where a file cannot be read, and BadInput where undamaged files hold what this hethub does not write:
    neither says that it is damaged.
    """
    try:
        files = _marks(folder)
    except DamagedCheckpoint as error:
        return [str(error)]
    mine = sorted(files)[part::parts]
    found = [fault for name in mine if (fault := _file_fault(folder / name, *files[name]))]
    if contents and not found:
        _check_contents(folder, files, mine)
    return found


def check_at_a_glance(folder: Path) -> None:
    """Raises DamagedCheckpoint for what can be seen without reading the data, whose reader finds the rest; RunFailed."""
    try:
        for name, (num_bytes, digest) in _marks(folder).items():
            if fault := _file_fault(folder / name, num_bytes, digest if name in (RECORD, INDEX) else None):
                raise DamagedCheckpoint(fault)
    except OSError as error:
        raise refusal(folder, error) from None


def _marks(folder: Path) -> dict[str, FileMark]:
    """Return the size and checksum of every file, as the marker lists them. Raises DamagedCheckpoint, OSError."""
    marker = folder / MARKER
    if not marker.exists():
        raise DamagedCheckpoint(f"it has no {MARKER} marker")
    if not marker.is_file():
        raise DamagedCheckpoint(f"its {MARKER} marker is no file")
    marker.open("rb").close()  # an OSError here says nothing of damage; `read_json` would make a BadInput of it
    try:
        return build(Marker, read_json(marker, "marker"), Source(str(marker)), "marker").files
    except BadInput:  # what it breaks is said for whoever writes such files; nobody mends a marker
        raise DamagedCheckpoint(
            f"its {MARKER} marker cannot be read, so nobody knows whether the rest is whole"
        ) from None


def refusal(folder: Path, error: OSError | BadInput) -> RunFailed | BadInput:
    """What to raise where `faults` does."""
    another = f"name an older one as {folder.parent}/step-N"
    if isinstance(error, BadInput):
        return BadInput(
            f"{folder}: its checksums fit, but it is no checkpoint of this hethub: {error} Use the version that wrote it, or {another}."
        )
    return RunFailed(
        f"{folder}: the checkpoint cannot be read ({error}), which says nothing of whether it is whole. Try again, or {another}."
    )


def _check_contents(folder: Path, files: Container[str], mine: Iterable[str]) -> None:
    """Raises BadInput for what is wrong with a checkpoint whose files are as they were written: they may be a
    stranger's."""
    index, record = read_index(folder), read_record(folder)
    for name in sorted({INDEX, METADATA, RECORD, *index.files}):
        if name not in files:
            raise BadInput(f"file {name} is not listed in its {MARKER} marker.")
    for step in (record.step, record.extra.step):
        if folder_of(folder.parent, step) != folder:
            raise BadInput(f"its record is of step {step}.")
    for name in index.files.keys() & set(mine):
        with (folder / name).open("rb") as file:
            for chunk, dtype in index.files[name]:
                check_elements(file, chunk, dtype)


def _file_fault(path: Path, num_bytes: int, digest: str | None) -> str | None:
    """What is damaged in a file; without a `digest` its size is all that is looked at."""
    if not path.exists():
        return f"file {path.name} is missing"
    if not path.is_file():
        return f"file {path.name} is no file"
    if path.stat().st_size != num_bytes:
        return f"file {path.name} has {path.stat().st_size} bytes, {num_bytes} were written"
    return (
        None if digest is None or _digest(path) == digest else f"file {path.name} has another checksum than was written"
    )


def first_intact(paths: Sequence[Path], examine: Faults, warn: Callable[[str], None]) -> Path | None:
    """The first of `paths`, newest first, in which `examine` finds nothing damaged; None where there is none at all.

    Those before it are named in a warning. Raises BadInput naming all where each is damaged.
    """
    bad: list[str] = []
    for path in paths:
        found = examine(path)
        if not found:
            return path
        bad.append(f"{path}: {'; '.join(found)}")
        warn(f"a checkpoint is damaged, the one before is tried. {bad[-1]}.")
    if bad:
        raise BadInput(f"no checkpoint can be used. {'. '.join(bad)}. Restore the damaged files, or start a new run.")
    return None
