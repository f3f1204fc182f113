"""Where every element of a checkpoint lies, as JSON beside DCP's `.metadata`, which is a pickle and never read here.

A file of data holds what `torch.save` wrote for each chunk, a zip of stored parts; the elements are one part of it,
little-endian. Reading them needs no unpickling either.
"""

import errno
import os
import zipfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hethub.spec.base import Spec, build
from hethub.spec.documents import Source, read_json
from hethub.spec.errors import BadInput

INDEX = "index.json"
METADATA = ".metadata"
MOST_INDEX_BYTES = 2**30  # 4 million elements take some 70

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_PIECE_BYTES = 2**20
_ELEMENTS = "/data/0"  # how the name of the part that holds a tensor's elements ends

WholeNumber = Annotated[int, Field(ge=0)]
FileName = Annotated[str, Field(pattern=r"^__[0-9]+_[0-9]+\.distcp$")]


class DamagedCheckpoint(BadInput):
    """A checkpoint's files are not as they were written, or not there any more."""


class SavedChunk(NamedTuple):
    """`numel` elements of an entry from element `offset` on: `num_bytes` of the file from byte `start` on."""

    offset: WholeNumber
    numel: Annotated[int, Field(gt=0)]
    file: FileName
    start: WholeNumber
    num_bytes: WholeNumber


class IndexEntry(Spec):
    """A one-dimensional tensor, whose chunks hold every element once, in order."""

    dtype: Literal["float32", "float64"]
    numel: Annotated[int, Field(gt=0)]
    chunks: tuple[SavedChunk, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        first, last = self.chunks[0], self.chunks[-1]
        joined = all(chunk.offset + chunk.numel == following.offset for chunk, following in pairwise(self.chunks))
        if first.offset != 0 or not joined or last.offset + last.numel != self.numel:
            raise ValueError("the chunks do not hold every element once.")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def touching(self, start: int, stop: int) -> Iterator[SavedChunk]:
        """The chunks that hold elements of [start, stop)."""
        first = bisect_right(self.chunks, start, key=lambda chunk: chunk.offset) - 1
        return takewhile(lambda chunk: chunk.offset < stop, islice(self.chunks, first, None))


class CheckpointIndex(Spec):
    """The file index.json, one to one: entries by key."""

    version: Literal[1] = 1
    entries: dict[str, IndexEntry]

    @cached_property
    def files(self) -> dict[str, list[tuple[SavedChunk, torch.dtype]]]:
        """The chunks that lie in each file."""
        found: dict[str, list[tuple[SavedChunk, torch.dtype]]] = {}
        for entry in self.entries.values():
            for chunk in entry.chunks:
                found.setdefault(chunk.file, []).append((chunk, entry.torch_dtype))
        return found


def read_index(folder: Path) -> CheckpointIndex:
    """The index of the checkpoint in `folder`. Raises BadInput."""
    if not (folder / INDEX).exists():
        raise BadInput(
            f"file {INDEX} is missing; where an earlier version wrote the checkpoint, resume with that once."
        )
    data = read_json(folder / INDEX, "checkpoint's index", MOST_INDEX_BYTES)
    return build(CheckpointIndex, data, Source(str(folder / INDEX)), "checkpoint's index")


def check_elements(file: BinaryIO, chunk: SavedChunk, dtype: torch.dtype) -> None:
    """Raises BadInput where the file holds something else there, OSError."""
    with _part(file, chunk, dtype):
        pass


def elements(file: BinaryIO, chunk: SavedChunk, dtype: torch.dtype) -> Tensor:
    """The chunk's elements, (chunk.numel,). Raises as `check_elements`."""
    with _part(file, chunk, dtype) as part:
        values = torch.empty(chunk.numel, dtype=dtype)
        room, start = values.numpy().data.cast("B"), 0
        # Piece by piece, for a zip reads what it is asked for into memory of its own.
        while count := part.readinto(room[start : start + _PIECE_BYTES]):
            start += count
        if start < len(room):
            raise EOFError(f"it ends behind {start:,} bytes")
        return values


class _Window:
    """`num_bytes` of a file from byte `start` on as a file of their own, of which only what is asked for is read."""

    def __init__(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        self._file, self._start, self._place = file, start, 0
        self._num_bytes = max(0, min(num_bytes, os.fstat(file.fileno()).st_size - start))

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._num_bytes}[whence]
        if place < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._place = place
        return place

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._num_bytes - self._place)
        self._file.seek(self._start + self._place)
        content = self._file.read(left if size < 0 else min(size, left))
        self._place += len(content)
        return content


@contextmanager
def _part(file: BinaryIO, chunk: SavedChunk, dtype: torch.dtype) -> Iterator[Any]:
    """The part of a chunk's zip with its elements, opened: there is one, of just their size, and not compressed. Whoever
    reads it to its end has checked it, for the zip keeps a CRC of it."""
    try:
        with zipfile.ZipFile(_Window(file, chunk.start, chunk.num_bytes)) as parts:
            found = [part for part in parts.infolist() if part.filename.endswith(_ELEMENTS)]
            stored = [part for part in found if part.compress_type == zipfile.ZIP_STORED]
            sizes = [part.file_size for part in stored if part.file_size == part.compress_size]
            if sizes != [chunk.numel * dtype.itemsize]:
                raise ValueError(f"its parts with elements have the bytes {sizes}")
            with parts.open(found[0]) as part:
                yield part
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadInput(
            f"file {chunk.file} holds no {chunk.numel:,} elements at byte {chunk.start:,}: {error}."
        ) from None
