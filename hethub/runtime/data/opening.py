"""From the job's `data` section to a dataset: every source's tokens, from its token file, its cache or its text."""

import fcntl
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hethub.runtime.data.chat import ChatTemplate, conversations
from hethub.runtime.data.dataset import Dataset
from hethub.runtime.data.fingerprint import fingerprint
from hethub.runtime.data.sources import Piece, list_files, pieces, stdlib_pieces
from hethub.runtime.data.stream import Stream
from hethub.runtime.data.tables import table_files, table_pieces
from hethub.runtime.data.token_file import Marks, read_marks, read_token_file, token_file_writer
from hethub.runtime.data.tokenizer import (
    TokenBatch,
    Tokenizer,
    encode_conversations,
    encode_stream,
    load_tokenizer,
)
from hethub.spec.documents import KeyPath, unfinished_files
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import TOKENIZER, DataSpec, Job, SourceSpec


class _Tokens(NamedTuple):
    """Tokens and what their reader knows about them."""

    name: str
    array: NDArray[Any]
    max_token: int
    end_of_document: int | None
    tokenizer: str
    tokenizer_file: str
    marks: Marks


class TextSource:
    """A source that a tokenizer makes tokens of."""

    def __init__(self, spec: SourceSpec, base: Path, tokenizer: Tokenizer, reference: str) -> None:
        self.spec, self.tokenizer = spec, tokenizer
        self.files = source_files(spec, base)
        self.name = spec.source if spec.path is None else str(base / spec.path)
        self._template = ChatTemplate(reference, base) if spec.source == "chat" else None

    @property
    def num_bytes(self) -> int:
        """The size of its files together."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def is_cheap(self) -> bool:
        """Whether it is made anew in a moment, in less than it takes to keep it."""
        return self.spec.source == "python-stdlib" and self.tokenizer.identity == "bytes"

    def batches(self) -> Iterator[TokenBatch]:
        """All its tokens, in order."""
        spec, kind = self.spec, self.spec.source
        if self._template is not None:
            return encode_conversations(conversations(self.files, spec.column, self._template), self.tokenizer)
        texts: Iterator[Piece]
        if kind == "python-stdlib":
            texts = stdlib_pieces()
        elif kind in ("parquet", "hf"):
            texts = table_pieces(self.files, kind, spec.column)
        else:
            texts = pieces(self.files, "jsonl" if kind == "jsonl" else "text", spec.column)
        return encode_stream(texts, self.tokenizer)

    def kept_in(self, cache: Path) -> Path:
        """The token file of this text as it is now, there or to be written."""
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        tokenizer, template = self.tokenizer, self._template
        made: Any = "bytes"
        if tokenizer.identity != "bytes":
            # ends: earlier versions did not keep them
            made = [tokenizer.file, tokenizer.beginning, tokenizer.end_of_document, "ends"]
        what: list[Any] = [self.spec.source, made, stats]
        if self.spec.source not in ("text", "jsonl") or self.spec.text is not None:
            what.append([self.spec.column, None if template is None else [template.text, template.tokens]])
        if not self.files:
            what.append(platform.python_version())
        return cache / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]}.bin"

    def empty(self) -> BadInput:
        return BadInput(empty(self.name))


def source_files(spec: SourceSpec, base: Path) -> list[Path]:
    """The files that a source reads, in order. Raises BadInput."""
    if spec.path is None:
        return []
    path = base / spec.path
    if spec.source in ("parquet", "hf"):
        return table_files(path, spec.source)
    if spec.source == "tokens":
        return [path]
    return list_files(path, ".jsonl" if spec.source in ("jsonl", "chat") else "")


def text_sources(spec: DataSpec, base: Path) -> list[TextSource]:
    """The sources that are text. Raises BadInput."""
    found = [each for each in spec.weighted if each.source != "tokens"]
    if not found:
        return []
    tokenizer = load_tokenizer(spec.tokenizer, base, bos=spec.bos)
    return [TextSource(each, base, tokenizer, spec.tokenizer) for each in found]


def open_dataset(
    spec: DataSpec, base: Path, *, seq_len: int, seed: int, vocab: int, cache_dir: Path | None = None
) -> Dataset:
    """The dataset that `spec` describes, paths relative to `base`, for a model of `vocab` token ids.

    With `cache_dir`, tokens made of text are kept there and found again while files and tokenizer are unchanged.
    Raises BadInput where a file is missing, empty, damaged or does not go with the model.
    """
    texts = iter(text_sources(spec, base))
    found = [
        _from_token_file(base / str(each.path), spec, base)
        if each.source == "tokens"
        else _from_text(next(texts), cache_dir)
        for each in spec.weighted
    ]
    if other := next((tokens for tokens in found if tokens.tokenizer != found[0].tokenizer), None):
        raise BadInput(
            f"{other.name}: these tokens were made with another tokenizer than those of {found[0].name}; all sources of a job share "
            "one. Name it as data.tokenizer, or tokenise the text again with it."
        )
    streams = [
        Stream(
            name=tokens.name, tokens=tokens.array, seq_len=seq_len, seed=seed, vocab=vocab, max_token=tokens.max_token,
            end_of_document=tokens.end_of_document, tokenizer=tokens.tokenizer,
            tokenizer_file=tokens.tokenizer_file, trained=tokens.marks.trained, ends=tokens.marks.ends,
        )
        for tokens in found
    ]  # fmt: skip
    return Dataset(streams, [each.weight for each in spec.weighted])


def data_sections(job: Job) -> dict[KeyPath, DataSpec]:
    """The job's data and, where it evaluates, what on, by their keys."""
    evaluation = job.spec.eval
    return {("data",): job.spec.data} | ({} if evaluation is None else {("eval", "data"): evaluation.data})


def check_sources(job: Job) -> None:
    """Raises BadInput where a source or a tokenizer cannot be opened, with its place in the job. No text is read."""
    for section, spec in data_sections(job).items():
        for number, each in enumerate(spec.weighted):
            entry = () if spec.sources is None else ("sources", number)
            try:
                files = source_files(each, job.base)
                if each.source == "tokens":
                    read_token_file(files[0])
            except BadInput as error:
                raise BadInput(f"{job.source.at((*section, *entry, 'path'))}: {error}") from None
        try:
            load_tokenizer(spec.tokenizer, job.base)
        except BadInput as error:
            raise BadInput(f"{job.source.at((*section, 'tokenizer'))}: {error}") from None


def check_files(job: Job) -> None:
    """Do what `check_sources` does, and check chat templates and the facts stored beside tokens too."""
    check_sources(job)
    for spec in data_sections(job).values():
        text_sources(spec, job.base)
        for each in spec.weighted:
            if each.source == "tokens":
                _from_token_file(job.base / str(each.path), spec, job.base)


def check_tokenizer(dataset: Dataset, folder: Path) -> str | None:
    """Raises BadInput where the data's tokenizer is not that of the Hugging Face folder that training starts from.

    What to say where the folder has none, so that nobody can tell.
    """
    if not (folder / TOKENIZER).is_file():
        name = "bytes" if dataset.tokenizer == "bytes" else "the data's tokenizer"
        return f"{folder} has no {TOKENIZER}; whether its model was trained on tokens of {name}, nobody can tell"
    if not load_tokenizer(str(folder / TOKENIZER), Path()).is_called(dataset.tokenizer):
        raise BadInput(
            f"{folder}: the data is tokenised with another tokenizer than the folder's own {TOKENIZER}, whose ids its weights know. "
            "Leave data.tokenizer out, tokenise the text again with the folder's, or put the one that is meant into the folder."
        )
    return None


def overlap(training: DataSpec, held_out: DataSpec, base: Path) -> str | None:
    """What held-out samples share with the training data: a file, or a copy of one, or `python-stdlib`; None where they
    share nothing."""

    def read(spec: DataSpec) -> list[Path]:
        return sorted({file.resolve() for each in spec.weighted for file in source_files(each, base)})

    trained_by_size: dict[int, list[Path]] = {}
    for file in read(training):
        trained_by_size.setdefault(file.stat().st_size, []).append(file)
    for file in read(held_out):
        alike = trained_by_size.get(file.stat().st_size, [])
        if file in alike:
            return str(file)
        contents = _contents(file) if alike else None
        if original := next((each for each in alike if _contents(each) == contents), None):
            return f"{file}, a copy of {original}"
    whole = [{each.source for each in spec.weighted if each.path is None} for spec in (training, held_out)]
    return min(set.intersection(*whole), default=None)


def _contents(file: Path) -> str:
    """A hash of a file, of a large one by samples as of tokens."""
    return fingerprint(np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8))


def _from_token_file(path: Path, spec: DataSpec, base: Path) -> _Tokens:
    header, array = read_token_file(path)
    named = None if spec.tokenizer == "bytes" else load_tokenizer(spec.tokenizer, base)
    if named is not None and not named.is_called(header.tokenizer):
        raise BadInput(
            f"{path}: these tokens were made with another tokenizer than data.tokenizer {spec.tokenizer}. Name the one "
            "that made them, leave data.tokenizer out, or tokenise the text again."
        )
    marks = read_marks(path, header)
    if spec.document_mask and marks.ends is None and header.end_of_document is None:
        raise BadInput(
            f"{path}: data.document_mask needs to know where documents end, and neither does this file say it nor have its tokens an "
            "end of document. Set document_mask: false, or tokenise the text again."
        )
    tokenizer, file = (header.tokenizer, header.tokenizer) if named is None else (named.identity, named.file)
    return _Tokens(str(path), array, header.max_token, header.end_of_document, tokenizer, file, marks)


def _from_text(source: TextSource, cache_dir: Path | None) -> _Tokens:
    tokenizer = source.tokenizer
    if cache_dir is not None and not source.is_cheap:
        path = keep(source, cache_dir)
        header, array = read_token_file(path)
        max_token, marks = header.max_token, read_marks(path, header)
    else:
        array, marks = _in_memory(source)
        max_token = int(array.max())
    return _Tokens(source.name, array, max_token, tokenizer.end_of_document, tokenizer.identity, tokenizer.file, marks)


def _in_memory(source: TextSource) -> tuple[NDArray[Any], Marks]:
    batches = list(source.batches())
    if not any(len(batch.tokens) for batch in batches):
        raise source.empty()
    before = np.cumsum([0, *(len(batch.tokens) for batch in batches)])
    ends = np.concatenate([batch.ends + start for batch, start in zip(batches, before, strict=False)])
    marked = [batch.trained for batch in batches if batch.trained is not None]
    marks = Marks(ends, np.concatenate(marked) if marked else None)
    return np.concatenate([batch.tokens for batch in batches]), marks


def keep(
    source: TextSource,
    cache: Path,
    advance: Callable[[int], None] = lambda _: None,
    waits: Callable[[], None] = lambda: None,
) -> Path:
    """The token file of a text in `cache`, written now unless it is there whole; of processes that share the cache one
    writes it, and the others wait.

    `advance` is told the bytes of text that are done, batch by batch; `waits` is called before this one waits.
    Raises BadInput, RunFailed where the disk fails.
    """
    path = source.kept_in(cache)
    if is_whole(path):
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with _sole_writer(path, waits):
        if is_whole(path):
            return path
        try:
            with token_file_writer(path, source.tokenizer) as writer:
                for batch in source.batches():
                    writer.append(batch)
                    advance(batch.num_bytes)
                if writer.num_tokens == 0:
                    raise source.empty()
        except RunFailed as error:
            raise RunFailed(
                f"{error} It would hold the tokens of {source.name}; a folder with more room can be named in HETHUB_CACHE."
            ) from None
    return path


def is_whole(path: Path) -> bool:
    """Whether a token file can be read; one that cannot is made anew."""
    try:
        read_token_file(path)
    except BadInput:
        return False
    return True


@contextmanager
def _sole_writer(path: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Inside, no other process writes `path`, and what killed ones left of it is gone. Where a file system has no locks,
    processes may write it side by side, each under a name of its own."""
    with ExitStack() as held:
        try:
            lock = held.enter_context(path.with_suffix(".lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        else:
            for left in unfinished_files(path):
                left.unlink(missing_ok=True)
        yield


def empty(name: str) -> str:
    """The paragraph for data without a token."""
    return f"{name}: there is no text in it, so there is nothing to train on. Name a file or folder that holds text."
