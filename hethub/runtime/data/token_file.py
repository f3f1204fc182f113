"""The token file: one page of readable header, then little-endian token ids to map into memory."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hethub.runtime.data.tokenizer import TokenBatch, Tokenizer
from hethub.spec.base import Spec, build
from hethub.spec.documents import Source, parse_json, unfinished_of
from hethub.spec.errors import BadInput, RunFailed

MAGIC = b"hethub tokens 1\n"
HEADER_BYTES = 4096  # a page, so that the tokens start at one

_REMEDY = "Write the file anew with `hethub tokenise`."


class TokenHeader(Spec):
    """What stands in front of the tokens."""

    dtype: Literal["uint16", "uint32"]
    num_tokens: int = Field(ge=0)
    num_documents: int = Field(ge=0)
    max_token: int = Field(ge=0)
    end_of_document: int | None
    tokenizer: str  # Tokenizer.identity

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")


def read_token_file(path: Path) -> tuple[TokenHeader, NDArray[Any]]:
    """The header and the memory-mapped tokens. Raises BadInput where the file is missing, damaged or another format."""
    try:
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES)
            file_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise BadInput(
            f"{path}: the token file cannot be read ({error.strerror}). Check data.path, or write one with `hethub tokenise`."
        ) from None
    header = _parse(start, path)
    expected = HEADER_BYTES + header.num_tokens * header.numpy_dtype.itemsize
    if file_bytes != expected:
        raise BadInput(
            f"{path}: the header promises {header.num_tokens:,} tokens of {header.dtype}, a file of {expected:,} bytes, "
            f"but it has {file_bytes:,}; it was cut short or altered. Copy it again, or: {_REMEDY}"
        )
    if header.num_tokens == 0:
        raise BadInput(f"{path}: the token file holds no tokens. {_REMEDY}")
    return header, np.memmap(path, dtype=header.numpy_dtype, mode="r", offset=HEADER_BYTES)


def _parse(start: bytes, path: Path) -> TokenHeader:
    if len(start) < HEADER_BYTES or not start.startswith(MAGIC):
        raise BadInput(f"{path}: this is no token file of hethub (it does not start with its header). {_REMEDY}")
    try:
        data = parse_json(start[len(MAGIC) :], str(path), "header of the token file")
        return build(TokenHeader, data, Source(f"{path}, header"), "token file header")
    except BadInput as error:
        raise BadInput(f"{error} {_REMEDY}") from None


class TokenFileWriter:
    """Appends batches and keeps count for the header."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer) -> None:
        self._file = file
        self._tokenizer = tokenizer
        self.num_tokens = self.num_documents = self.max_token = 0

    def append(self, batch: TokenBatch) -> None:
        self._file.write(batch.tokens.data)
        self.num_tokens += len(batch.tokens)
        self.num_documents += batch.num_documents
        self.max_token = max(self.max_token, int(batch.tokens.max(initial=0)))

    def write_header(self) -> None:
        header = TokenHeader(
            dtype=self._tokenizer.dtype.newbyteorder("=").name,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            max_token=self.max_token,
            end_of_document=self._tokenizer.end_of_document,
            tokenizer=self._tokenizer.identity,
        )
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
        with temporary.open("wb") as file:
            file.seek(HEADER_BYTES)
            writer = TokenFileWriter(file, tokenizer)
            yield writer
            writer.write_header()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RunFailed(f"{path}: writing the token file failed ({error.strerror}); nothing is left behind.") from None
    finally:
        temporary.unlink(missing_ok=True)
