"""Where every element of a checkpoint lies, as JSON beside DCP's `.metadata`, which is a pickle and never read here.

A file of data holds what `torch.save` wrote for each chunk, a zip of stored parts; the elements are one part of it,
little-endian. Reading them needs no unpickling either.
"""

import io
import zipfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import IO, Annotated, BinaryIO, Literal, NamedTuple, Self

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
_ELEMENTS = "/data/0"  # how the name of the part that holds a tensor's elements ends

WholeNumber = Annotated[int, Field(ge=0)]
FileName = Annotated[str, Field(pattern=r"^__[0-9]+_[0-9]+\.distcp$")]


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
        return takewhile(lambda chunk: chunk.offset < stop, islice(self.chunks, max(first, 0), None))


class CheckpointIndex(Spec):
    """The file index.json, one to one: entries by key."""

    version: Literal[1] = 1
    entries: dict[str, IndexEntry]

    @property
    def files(self) -> set[str]:
        return {chunk.file for entry in self.entries.values() for chunk in entry.chunks}

    def in_file(self, name: str) -> Iterator[tuple[SavedChunk, torch.dtype]]:
        """The chunks that lie in a file."""
        for entry in self.entries.values():
            yield from ((chunk, entry.torch_dtype) for chunk in entry.chunks if chunk.file == name)


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
        return torch.frombuffer(bytearray(part.read()), dtype=dtype)


@contextmanager
def _part(file: BinaryIO, chunk: SavedChunk, dtype: torch.dtype) -> Iterator[IO[bytes]]:
    """The part of a chunk's zip with its elements, opened: there is one, of just their size, and not compressed."""
    file.seek(chunk.start)
    try:
        with zipfile.ZipFile(io.BytesIO(file.read(chunk.num_bytes))) as parts:
            found = [part for part in parts.infolist() if part.filename.endswith(_ELEMENTS)]
            sizes = [part.file_size for part in found if part.compress_type == zipfile.ZIP_STORED]
            if sizes != [chunk.numel * dtype.itemsize]:
                raise ValueError(f"its parts with elements have the bytes {sizes}")
            with parts.open(found[0]) as part:
                yield part
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadInput(
            f"file {chunk.file} holds no {chunk.numel:,} elements at byte {chunk.start:,}: {error}."
        ) from None
