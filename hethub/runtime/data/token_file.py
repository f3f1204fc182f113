"""The token file: one page of readable header, then little-endian token ids to map into memory, then what is known of
them: where documents end, and of conversations which tokens are to be learnt."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hethub.runtime.data.sources import TOKEN_FILE
from hethub.runtime.data.tokenizer import TokenBatch, Tokenizer
from hethub.spec.base import Spec, build
from hethub.spec.documents import Source, check_regular, parse_json, unfinished_of
from hethub.spec.errors import BadInput, RunFailed

MAGIC = TOKEN_FILE + b" 1\n"
HEADER_BYTES = 4096  # a page, so that the tokens start at one

_END = np.dtype("<i8")
_REMEDY = "Write the file anew with `hethub tokenise`."


class TokenHeader(Spec):
    """What stands in front of the tokens."""

    dtype: Literal["uint16", "uint32"]
    num_tokens: int = Field(ge=0)
    num_documents: int = Field(ge=0)
    max_token: int = Field(ge=0)
    end_of_document: int | None
    tokenizer: str  # Tokenizer.identity
    has_ends: bool = False  # behind the tokens stands where each document ends; files of earlier versions do not say it
    has_trained: bool = False  # and behind that a byte for each token: whether it is to be learnt

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def ends_start(self) -> int:
        """The byte where the ends begin: aligned, so that they are searched where they lie."""
        return -(-(HEADER_BYTES + self.num_tokens * self.numpy_dtype.itemsize) // _END.itemsize) * _END.itemsize

    @property
    def trained_start(self) -> int:
        return self.ends_start + self.num_documents * _END.itemsize * self.has_ends

    @property
    def file_bytes(self) -> int:
        if self.has_ends or self.has_trained:
            return self.trained_start + self.num_tokens * self.has_trained
        return HEADER_BYTES + self.num_tokens * self.numpy_dtype.itemsize


class Marks(NamedTuple):
    """What is known of the tokens of a stream, beside the tokens; None where it is not."""

    ends: NDArray[np.int64] | None  # of each document, the number of tokens up to its end, rising
    trained: NDArray[np.uint8] | None  # (num_tokens,): 1 where a token is to be learnt


def read_token_file(path: Path) -> tuple[TokenHeader, NDArray[Any]]:
    """The header and the memory-mapped tokens. Raises BadInput where the file is missing, damaged or another format."""
    check_regular(path, "data")
    try:
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES)
            file_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise BadInput(
            f"{path}: the token file cannot be read ({error.strerror}). Check the path, or write one with `hethub tokenise`."
        ) from None
    header = _parse(start, path)
    if file_bytes != header.file_bytes:
        raise BadInput(
            f"{path}: the header promises {header.num_tokens:,} tokens of {header.dtype}, a file of {header.file_bytes:,} bytes, "
            f"but it has {file_bytes:,}; it was cut short or altered. Copy it again, or: {_REMEDY}"
        )
    if header.num_tokens == 0:
        raise BadInput(f"{path}: the token file holds no tokens. {_REMEDY}")
    return header, _mapped(path, header.numpy_dtype, HEADER_BYTES, header.num_tokens)


def read_marks(path: Path, header: TokenHeader) -> Marks:
    """What a token file that `read_token_file` has read knows of its tokens, memory-mapped."""
    return Marks(
        _mapped(path, _END, header.ends_start, header.num_documents) if header.has_ends else None,
        _mapped(path, np.dtype(np.uint8), header.trained_start, header.num_tokens) if header.has_trained else None,
    )


def _mapped(path: Path, dtype: np.dtype[Any], start: int, count: int) -> NDArray[Any]:
    # Nothing cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(count,)) if count else np.empty(0, dtype=dtype)


def _parse(start: bytes, path: Path) -> TokenHeader:
    if len(start) < HEADER_BYTES or not start.startswith(MAGIC):
        raise BadInput(f"{path}: this is no token file of hethub (it does not start with its header). {_REMEDY}")
    try:
        data = parse_json(start[len(MAGIC) :], str(path), "header of the token file")
        return build(TokenHeader, data, Source(f"{path}, header"), "token file header")
    except BadInput as error:
        raise BadInput(f"{error} {_REMEDY}") from None


class TokenFileWriter:
    """Appends batches and keeps count for the header. What stands behind the tokens waits in files `beside`."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, beside: Callable[[], IO[bytes]]) -> None:
        self._file, self._tokenizer = file, tokenizer
        self._ends, self._trained = beside(), beside()
        self.num_tokens = self.num_documents = self.max_token = 0

    def append(self, batch: TokenBatch) -> None:
        self._file.write(batch.tokens.data)
        self._ends.write((batch.ends + self.num_tokens).astype(_END).data)
        if batch.trained is not None:
            self._trained.write(batch.trained.data)
        self.num_tokens += len(batch.tokens)
        self.num_documents += len(batch.ends)
        self.max_token = max(self.max_token, int(batch.tokens.max(initial=0)))

    def finish(self) -> None:
        """Writes what stands behind the tokens, and the header in front of them."""
        header = TokenHeader(
            dtype=self._tokenizer.dtype.newbyteorder("=").name,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            max_token=self.max_token,
            end_of_document=self._tokenizer.end_of_document,
            tokenizer=self._tokenizer.identity,
            has_ends=True,
            has_trained=self._trained.tell() > 0,
        )
        self._file.seek(header.ends_start)
        for marks in (self._ends, self._trained):
            marks.seek(0)
            shutil.copyfileobj(marks, self._file)
        text = MAGIC + json.dumps(header.model_dump()).encode()
        self._file.seek(0)
        self._file.write(text.ljust(HEADER_BYTES - 1) + b"\n")


@contextmanager
def token_file_writer(path: Path, tokenizer: Tokenizer) -> Iterator[TokenFileWriter]:
    """A writer whose file appears at `path` complete, when the block ends well, or not at all.

    Raises RunFailed where the disk fails.
    """
    temporary = unfinished_of(path)
    try:
        with ExitStack() as files:
            file = files.enter_context(temporary.open("wb"))
            file.seek(HEADER_BYTES)
            writer = TokenFileWriter(
                file, tokenizer, lambda: files.enter_context(tempfile.TemporaryFile(dir=path.parent))
            )
            yield writer
            writer.finish()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RunFailed(f"{path}: writing the token file failed ({error.strerror}); nothing is left behind.") from None
    finally:
        temporary.unlink(missing_ok=True)
