"""From the job's `data` section to a dataset."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hethub.runtime.data.dataset import Dataset
from hethub.runtime.data.sources import Piece, list_files, pieces, stdlib_pieces
from hethub.runtime.data.token_file import read_token_file, token_file_writer
from hethub.runtime.data.tokenizer import Tokenizer, encode_stream, load_tokenizer, missing_end
from hethub.spec.errors import BadInput
from hethub.spec.job import DataSpec


class _Tokens(NamedTuple):
    """Tokens and what their reader knows about them."""

    array: NDArray[Any]
    max_token: int
    end_of_document: int | None
    tokenizer: str


def open_dataset(
    spec: DataSpec, base: Path, *, seq_len: int, seed: int, vocab: int, cache_dir: Path | None = None
) -> Dataset:
    """The dataset that `spec` describes, paths relative to `base`, for a model of `vocab` token ids.

    With `cache_dir`, text tokenised by a tokenizer.json is kept there and found again while files and tokenizer are
    unchanged. Raises BadInput where a file is missing, empty, damaged or does not go with the model.
    """
    name = spec.source if spec.path is None else str(base / spec.path)
    if spec.source == "tokens":
        tokens = _from_token_file(base / str(spec.path), spec, base)
    else:
        tokens = _from_text(name, spec, base, cache_dir)
    return Dataset(
        name=name,
        tokens=tokens.array,
        seq_len=seq_len,
        seed=seed,
        vocab=vocab,
        max_token=tokens.max_token,
        end_of_document=tokens.end_of_document,
        tokenizer=tokens.tokenizer,
    )


def _from_token_file(path: Path, spec: DataSpec, base: Path) -> _Tokens:
    header, array = read_token_file(path)
    if spec.tokenizer != "bytes" and load_tokenizer(spec.tokenizer, base).identity != header.tokenizer:
        raise BadInput(
            f"{path}: these tokens were made with another tokenizer than data.tokenizer {spec.tokenizer}. Name the one "
            "that made them, leave data.tokenizer out, or tokenise the text again."
        )
    if spec.document_mask and header.end_of_document is None:
        raise BadInput(
            f"{path}: data.document_mask needs an end-of-document token between documents, and these tokens have "
            "none. Set document_mask: false, or tokenise with a tokenizer that has such a token."
        )
    return _Tokens(array, header.max_token, header.end_of_document, header.tokenizer)


def _from_text(name: str, spec: DataSpec, base: Path, cache_dir: Path | None) -> _Tokens:
    tokenizer = load_tokenizer(spec.tokenizer, base)
    if spec.document_mask and tokenizer.end_of_document is None:
        raise BadInput(missing_end(tokenizer, "data.document_mask keeps documents apart"))
    files = [] if spec.path is None else list_files(base / spec.path, ".jsonl" if spec.source == "jsonl" else "")
    if cache_dir is not None and files and tokenizer.identity != "bytes":
        header, array = read_token_file(_cached(cache_dir, files, spec, tokenizer))
        return _Tokens(array, header.max_token, tokenizer.end_of_document, tokenizer.identity)
    batches = [batch.tokens for batch in encode_stream(_texts(files, spec), tokenizer)]
    if not batches:
        raise BadInput(empty(name))
    array = np.concatenate(batches)
    return _Tokens(array, int(array.max()), tokenizer.end_of_document, tokenizer.identity)


def _texts(files: list[Path], spec: DataSpec) -> Iterator[Piece]:
    if spec.source == "python-stdlib":
        return stdlib_pieces()
    return pieces(files, "jsonl" if spec.source == "jsonl" else "text")


def _cached(cache_dir: Path, files: list[Path], spec: DataSpec, tokenizer: Tokenizer) -> Path:
    """The token file of these texts, written now unless it is there; ranks that race write the same, atomically."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([spec.source, tokenizer.identity, stats]).encode()).hexdigest()[:32]
    path = cache_dir / f"{key}.bin"
    if not path.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with token_file_writer(path, tokenizer) as writer:
            for batch in encode_stream(_texts(files, spec), tokenizer):
                writer.append(batch)
            if writer.num_tokens == 0:
                raise BadInput(empty(str(files[0] if len(files) == 1 else files[0].parent)))
    return path


def empty(name: str) -> str:
    """The paragraph for data without a token."""
    return f"{name}: there is no text in it, so there is nothing to train on. Name a file or folder that holds text."
