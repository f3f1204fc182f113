"""`hethub tokenise`: text into a token file, streaming, complete or not at all."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from hethub.runtime.data.opening import empty, is_whole, keep, text_sources
from hethub.runtime.data.sources import Piece, list_files, pieces
from hethub.runtime.data.token_file import token_file_writer
from hethub.runtime.data.tokenizer import encode_stream, load_tokenizer
from hethub.runtime.progress import ProgressDisplay
from hethub.spec.errors import BadInput
from hethub.spec.job import DataSpec

SHOWN_BYTES = 2**23  # texts up to this size are through before anybody wonders
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class TokeniseSummary:
    """What was written."""

    out: Path
    num_files: int
    num_documents: int
    num_tokens: int
    max_token: int
    dtype: str
    text_bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.out}: {self.num_tokens:,} tokens ({self.dtype}) of {self.num_documents:,} documents from "
            f"{self.num_files:,} files, {self.text_bytes:,} bytes of text in {self.seconds:.1f} s; train with "
            f"data: {{source: tokens, path: …}} and a model of vocab >= {self.max_token + 1}"
        )


def tokenise_data(spec: DataSpec, base: Path, cache: Path, *, progress: bool) -> None:
    """Makes tokens of every text of a job that `cache` does not hold yet, so that `open_dataset` only maps them.

    Raises BadInput, RunFailed where the disk fails.
    """
    for source in text_sources(spec, base):
        if source.is_cheap or is_whole(source.kept_in(cache)):
            continue
        shows = progress and source.num_bytes > SHOWN_BYTES
        title = f"tokenise {source.name}"
        waits = partial(print, f"{title}: another process is at it; waiting for its tokens", file=sys.stderr)
        with _shown(source.num_bytes, shows, title) as advance:
            keep(source, cache, advance, waits if progress else lambda: None)


def tokenise(
    paths: Sequence[Path], tokenizer: str, out: Path, progress: bool = True, *, key: str = "text"
) -> TokeniseSummary:
    """Writes the token file `out` for `data.source: tokens` and returns what is in it.

    `paths` are text files (one document each), JSON Lines files (*.jsonl: one document per line, under `key`) and
    folders of both; `tokenizer` is `bytes` or a tokenizer.json. Raises BadInput, RunFailed where the disk fails; in
    both cases `out` is left as it was.
    """
    start = time.perf_counter()
    files = [file for path in paths for file in list_files(path)]
    _check_out(out, files)
    loaded = load_tokenizer(tokenizer, Path())
    text_bytes = sum(file.stat().st_size for file in files)
    with token_file_writer(out, loaded) as writer, _shown(text_bytes, progress) as advance:
        for batch in encode_stream(_counted(_mixed(files, key), advance), loaded):
            writer.append(batch)
        if writer.num_tokens == 0:
            raise BadInput(empty(", ".join(map(str, paths))))
    return TokeniseSummary(
        out=out,
        num_files=len(files),
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        max_token=writer.max_token,
        dtype=loaded.dtype.name,
        text_bytes=text_bytes,
        seconds=time.perf_counter() - start,
    )


def _check_out(out: Path, files: list[Path]) -> None:
    if out.is_dir():
        raise BadInput(f"--out {out} is a folder; name the file to write.")
    if not out.parent.is_dir():
        raise BadInput(f"--out {out}: there is no folder {out.parent}; make it first.")
    if out.exists() and any(out.samefile(file) for file in files):
        raise BadInput(f"--out {out} is one of the texts to read and would be overwritten. Choose another name.")


def _mixed(files: list[Path], key: str) -> Iterator[Piece]:
    for file in files:
        yield from pieces([file], "jsonl" if file.suffix == ".jsonl" else "text", key)


def _counted(texts: Iterator[Piece], advance: Advance) -> Iterator[Piece]:
    for piece in texts:
        yield piece
        advance(piece.num_bytes)


@contextmanager
def _shown(total_bytes: int, shows: bool, title: str = "tokenise") -> Iterator[Advance]:
    """A function to call with bytes done: a bar on a terminal, else a line every tenth of the way, both on stderr."""
    columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    total, done = max(1, total_bytes), 0
    with ProgressDisplay(
        title, *columns, console=Console(stderr=True, soft_wrap=True), total=total_bytes, shows=shows
    ) as display:

        def advance(num_bytes: int) -> None:
            nonlocal done
            before, done = done, done + num_bytes
            is_due = 10 * done // total > 10 * before // total
            line = f"{title}: {done:,} of {total:,} bytes ({100 * done // total} %)"
            display.update(done, line if is_due else None)

        yield advance
