"""Sources and tokenizers: what becomes a document, and every way in which a file can be wrong."""

import errno
import gzip
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.data import sources as sources_module
from hethub.runtime.data import tokenizer as tokenizer_module
from hethub.runtime.data.fingerprint import fingerprint
from hethub.runtime.data.opening import check_sources, check_tokenizer, keep, text_sources
from hethub.runtime.data.sources import list_files, stdlib_pieces
from hethub.runtime.data.tokenise import tokenise
from hethub.runtime.data.tokenizer import TokenBatch
from hethub.spec.documents import unfinished_of
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.job import DataSpec, load_job
from tests.support.command import HANG_SECONDS
from tests.support.job_files import write_job
from tests.support.privileges import laid_down

END = 256
WORDS = {"[UNK]": 0, "a": 1, "b": 2, "c": 3}


def opened(base: Path, **spec: Any) -> Dataset:
    cache_dir = spec.pop("cache_dir", None)
    vocab = spec.pop("vocab", 257)
    return open_dataset(DataSpec(**spec), base, seq_len=2, seed=1, vocab=vocab, cache_dir=cache_dir)


def save_tokenizer(path: Path, end: str | None = "</s>", **changes: Any) -> Path:
    words = WORDS if end is None else {**WORDS, end: 7}  # ids with a gap: the size of the vocabulary is no bound
    tokenizer = tokenizers.Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(path))
    return path


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("héé\r\n".encode())
    data = opened(tmp_path, source="text", path="a.txt")
    assert data.streams[0].tokens.tolist() == [*"héé\r\n".encode(), END]


def test_a_folder_is_its_visible_files_in_order_of_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"b/a.md": "2", "a.txt": "1", "c": "3", "empty": "", ".hidden": "x", ".git/x": "y"}.items():
        (tmp_path / name).write_text(text)
    data = opened(tmp_path, source="text", path=".")
    assert data.streams[0].tokens.tolist() == [ord("1"), END, ord("2"), END, ord("3"), END]


def test_large_files_are_read_in_pieces_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "PIECE_BYTES", 64)
    text = "".join(f"line {i} é\n" for i in range(200)) + "no newline at the end"
    (tmp_path / "a.txt").write_text(text)
    assert len(list(sources_module.pieces([tmp_path / "a.txt"], "text"))) > 10
    assert opened(tmp_path, source="text", path="a.txt").streams[0].tokens.tolist() == [*text.encode(), END]


def test_every_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "ab"}\n\n{"text": "", "x": 1}\n{"text": null}\n{"meta": {}, "text": "\\u00e9"}'
    )
    data = opened(tmp_path, source="jsonl", path="a.jsonl")
    assert data.streams[0].tokens.tolist() == [*b"ab", END, *"é".encode(), END]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not valid JSON: Expecting ',' delimiter, column 13"),
        ('["a"]', r"got \['a'\]"),
        ('{"txt": "a", "id": 3}', "no key `text`; it has txt, id"),
        ('{"text": 5}', "`text` is 5"),
        ('{"text": "\\ud800"}', "half a surrogate pair"),
        ("\x00\x01", "not valid JSON"),
    ],
)
def test_a_broken_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n' + line + '\n{"text": "b"}\n')
    with pytest.raises(BadInput, match=f"a.jsonl, line 3: .*{message}"):
        opened(tmp_path, source="jsonl", path="a.jsonl")


@pytest.mark.parametrize("source", ["text", "jsonl", "tokens", None])
def test_a_missing_file_is_named(tmp_path: Path, source: str | None) -> None:
    key = "path" if source else "tokenizer"  # of which the file alone was named
    job = load_job(write_job(tmp_path, data={key: "nowhere"} | ({"source": source} if source else {})))
    with pytest.raises(BadInput, match=rf"job\.yaml, line \d+: data\.{key}: .*/nowhere: .* the path"):
        check_sources(job)


@pytest.mark.parametrize("source", ["text", "parquet", "tokens"])
@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_what_exists_and_is_no_file_is_called_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: str
) -> None:
    """It was called missing; a FIFO of tokens was waited for without end."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    if kind == "FIFO":
        os.mkfifo("it")
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind("it")
    else:
        Path("it").symlink_to("/dev/null")
    with pytest.raises(BadInput, match=rf"it: this is a {kind}, .* regular file"):
        opened(tmp_path, source=source, path="it")


def test_empty_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(BadInput, match=r"a\.txt: there is no text in it"):
        opened(tmp_path, source="text", path="a.txt")
    (tmp_path / "b.jsonl").write_text('\n{"text": ""}\n')
    with pytest.raises(BadInput, match=r"b\.jsonl: there is no text in it"):
        opened(tmp_path, source="jsonl", path="b.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match=r"folder: the folder holds no \.jsonl files"):
        opened(tmp_path, source="jsonl", path="folder")


def test_text_of_which_a_tokenizer_makes_nothing_is_refused(tmp_path: Path) -> None:
    """Without a cache the run ended in numpy's words."""
    save_tokenizer(tmp_path / "tokenizer.json", end=None)
    (tmp_path / "a.txt").write_text(" \n ")
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(BadInput, match=r"a\.txt: there is no text in it"):
            opened(tmp_path, source="text", path="a.txt", tokenizer="tokenizer.json", cache_dir=cache)


def test_text_that_is_no_utf8_is_named_with_its_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "PIECE_BYTES", 8)
    (tmp_path / "a.txt").write_bytes(b"first line\n" * 3 + b"ab\xff")
    with pytest.raises(BadInput, match=r"a\.txt: byte 35 is no UTF-8"):
        opened(tmp_path, source="text", path="a.txt")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_lines_in_wide_characters_are_told_to_be_converted(tmp_path: Path, encoding: str) -> None:
    """They were no valid JSON, by a codec's words; and of some a part was read."""
    (tmp_path / "a.jsonl").write_text('{"text": "a word"}\n' * 3, encoding=encoding)
    with pytest.raises(BadInput, match=r"a\.jsonl: is UTF-16 or UTF-32, and text is read as UTF-8\. Convert it"):
        opened(tmp_path, source="jsonl", path="a.jsonl")


def test_a_line_that_is_no_utf8_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "ä"}\n', encoding="latin-1")
    with pytest.raises(BadInput, match=r"a\.jsonl, line 2: the line is no UTF-8 text: .*; save the file as UTF-8\."):
        opened(tmp_path, source="jsonl", path="a.jsonl")


def test_the_stdlib_is_capped_and_skips_what_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("json", "test", "site-packages"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bad.py").write_bytes(b"# \xff")
    for name in ("b.py", "a.py", "json/a.py", "test/t.py", "site-packages/s.py", "_sysconfigdata_x.py", "note.txt"):
        (tmp_path / name).write_text(f"# {name}\n")
    assert [piece.text for piece in stdlib_pieces(tmp_path)] == ["# a.py\n", "# b.py\n", "# json/a.py\n"]
    monkeypatch.setattr(sources_module, "STDLIB_BYTES", 15)
    assert [piece.text for piece in stdlib_pieces(tmp_path)] == ["# a.py\n", "# b.py\n"]


def test_a_tokenizer_file_gives_whole_documents_and_their_ends(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text('{"text": "a b c a"}\n{"text": "c"}\n')
    data = opened(tmp_path, source="jsonl", path="a.jsonl", tokenizer="tokenizer.json", vocab=8, document_mask=True)
    assert data.streams[0].tokens.tolist() == [1, 2, 3, 1, 7, 3, 7], "neither truncated nor padded"
    assert data.end_of_document == 7


def test_the_end_of_document_is_what_the_folder_says(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
    for named, end in (("c", 3), ({"content": "b"}, 2), ("not in it", 7), (None, 7)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        data = opened(
            tmp_path, source="jsonl", path="a.jsonl", tokenizer="tokenizer.json", cache_dir=tmp_path / "cache"
        )
        assert data.streams[0].tokens.tolist() == [1, 2, end, 3, end]
        assert data.end_of_document == end


def save_with_beginning(path: Path) -> None:
    """As Llama's and Mistral's: a text begins with `c`, here."""
    tokenizer = tokenizers.Tokenizer.from_file(str(save_tokenizer(path)))
    tokenizer.post_processor = TemplateProcessing(single="c $A", special_tokens=[("c", 3)])
    tokenizer.save(str(path))


def test_documents_begin_with_what_the_tokenizer_puts_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_beginning(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "b"}\n')
    (tmp_path / "b.txt").write_text("a\nb\na\n")
    lines = {"source": "jsonl", "path": "a.jsonl", "tokenizer": "tokenizer.json", "cache_dir": tmp_path / "cache"}
    assert opened(tmp_path, **lines).streams[0].tokens.tolist() == [3, 1, 2, 7, 3, 2, 7]
    assert opened(tmp_path, **lines, bos=False).streams[0].tokens.tolist() == [1, 2, 7, 2, 7]
    # Once a document, in however many pieces and batches it is read.
    monkeypatch.setattr(sources_module, "PIECE_BYTES", 1)
    monkeypatch.setattr(tokenizer_module, "_BATCH_PIECES", 2)
    text = {"source": "text", "path": "b.txt", "tokenizer": "tokenizer.json"}
    assert opened(tmp_path, **text).streams[0].tokens.tolist() == [3, 1, 2, 1, 7]


def test_a_tokenizer_is_known_however_its_file_is_written(tmp_path: Path) -> None:
    """transformers saves it with other spaces, padding and truncation."""
    path = save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "tokenizer.json").write_text(json.dumps({**json.loads(path.read_text()), "padding": None}))
    (tmp_path / "one.txt").write_text("a b c a")
    tokenise([tmp_path / "one.txt"], str(path), tmp_path / "tokens.bin", progress=False)
    named = {"source": "tokens", "path": "tokens.bin"}
    data = opened(tmp_path, **named, tokenizer="saved/tokenizer.json")
    assert check_tokenizer(data, tmp_path / "saved") is None
    save_tokenizer(tmp_path / "saved" / "tokenizer.json", end="</t>")
    with pytest.raises(BadInput, match="another tokenizer than the folder's own"):
        check_tokenizer(data, tmp_path / "saved")
    with pytest.raises(BadInput, match=r"than data\.tokenizer"):
        opened(tmp_path, **named, tokenizer="saved/tokenizer.json")


def test_what_earlier_versions_called_a_tokenizer_is_still_known(tmp_path: Path) -> None:
    """By the hash of its file: in token files, and in what checkpoints hold of their data."""
    path = save_tokenizer(tmp_path / "tokenizer.json")
    earlier = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "one.txt").write_text("a b c a")
    text = opened(tmp_path, source="text", path="one.txt", tokenizer="tokenizer.json")
    tokens = np.array([1, 2, 3, 1, 7], dtype="<u2")
    saved = fingerprint(tokens, tokenizer=earlier, seq_len=2, end_of_document=7)
    assert saved != text.fingerprint
    assert text.is_of(saved)
    assert not text.is_of(fingerprint(tokens, tokenizer=earlier, seq_len=3, end_of_document=7))
    tokenise([tmp_path / "one.txt"], str(path), tmp_path / "tokens.bin", progress=False)
    content = (tmp_path / "tokens.bin").read_bytes()
    (tmp_path / "tokens.bin").write_bytes(content.replace(text.tokenizer.encode(), earlier.encode()))
    for more in ({}, {"tokenizer": "tokenizer.json"}):
        data = opened(tmp_path, source="tokens", path="tokens.bin", **more)
        assert data.is_of(saved)
        assert check_tokenizer(data, tmp_path) is None
    sources = [{"source": "tokens", "path": "tokens.bin"}, {"source": "text", "path": "one.txt"}]
    assert opened(tmp_path, sources=sources, tokenizer="tokenizer.json").tokenizer == text.tokenizer


def test_an_end_of_document_is_asked_for_only_where_it_is_needed(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer.json", end=None)
    (tmp_path / "one.txt").write_text("a b c a")
    (tmp_path / "two.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    one = {"source": "text", "path": "one.txt", "tokenizer": "tokenizer.json"}
    assert opened(tmp_path, **one).streams[0].tokens.tolist() == [1, 2, 3, 1]
    with pytest.raises(BadInput, match=r"several documents are packed.*</s>"):
        opened(tmp_path, source="jsonl", path="two.jsonl", tokenizer="tokenizer.json")


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "one.txt").write_text("a b c a")
    with pytest.raises(BadInput, match=r"token id 7 .* vocabulary of 4\..* vocab >= 8"):
        opened(tmp_path, source="text", path="one.txt", tokenizer="tokenizer.json", vocab=4)


def test_a_broken_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.txt").write_text("a b c a")
    with pytest.raises(BadInput, match=r"tokenizer\.json: the tokenizer cannot be read"):
        opened(tmp_path, source="text", path="one.txt", tokenizer="tokenizer.json")
    for content in (b"{}", b"\xff", b"not JSON"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(BadInput, match=r"tokenizer\.json: this is no tokenizer\.json"):
            opened(tmp_path, source="text", path="one.txt", tokenizer="tokenizer.json")
    monkeypatch.setattr(tokenizer_module, "_MOST_FILE_BYTES", 7)
    with pytest.raises(BadInput, match=r"tokenizer\.json: is longer than 7 bytes"):
        opened(tmp_path, source="text", path="one.txt", tokenizer="tokenizer.json")


def test_cached_tokens_are_found_again_until_the_text_changes(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer.json")
    text = tmp_path / "a.jsonl"
    text.write_text(json.dumps({"text": "a b c a"}))
    spec = {"source": "jsonl", "path": "a.jsonl", "tokenizer": "tokenizer.json"}
    cache = tmp_path / "cache"
    fresh, first = opened(tmp_path, **spec), opened(tmp_path, **spec, cache_dir=cache)
    assert first.fingerprint == fresh.fingerprint
    (written,) = cache.glob("*.bin")
    before = written.stat().st_mtime_ns
    assert isinstance(opened(tmp_path, **spec, cache_dir=cache).streams[0].tokens, np.memmap)
    assert written.stat().st_mtime_ns == before
    text.write_text(json.dumps({"text": "b b b b b"}))
    assert opened(tmp_path, **spec, cache_dir=cache).streams[0].tokens.tolist() == [2, 2, 2, 2, 2, 7]


def test_of_processes_that_share_a_cache_one_makes_the_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    spec, cache = DataSpec(source="text", path="a.txt"), tmp_path / "cache"
    (one,), (two,) = text_sources(spec, tmp_path), text_sources(spec, tmp_path)
    (batch,), begun, waiting, made = one.batches(), Event(), Event(), []

    def slow(name: str) -> Iterator[TokenBatch]:
        made.append(name)
        begun.set()
        assert waiting.wait(HANG_SECONDS), "the other one did not wait"
        yield batch

    one.batches, two.batches = partial(slow, "one"), partial(slow, "two")  # type: ignore[method-assign]
    with ThreadPoolExecutor() as threads:
        first = threads.submit(keep, one, cache)
        assert begun.wait(HANG_SECONDS)
        second = threads.submit(keep, two, cache, waits=waiting.set)
        assert first.result() == second.result()
    assert made == ["one"]


def test_what_a_killed_process_left_goes_and_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("a b c a")
    spec = {"source": "text", "path": "a.txt", "tokenizer": "tokenizer.json", "cache_dir": tmp_path / "cache"}
    tokens = opened(tmp_path, **spec).streams[0].tokens.tolist()
    (kept,) = (tmp_path / "cache").glob("*.bin")
    os.truncate(kept, 4100)
    unfinished_of(kept).write_bytes(b"left by a process that was killed")
    assert opened(tmp_path, **spec).streams[0].tokens.tolist() == tokens
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".bin", ".lock"]


def test_a_full_disk_under_the_cache_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (source,) = text_sources(DataSpec(source="text", path="a.txt"), tmp_path)

    def full() -> Iterator[TokenBatch]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    source.batches = full  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match=r"No space left on device.*a\.txt.*HETHUB_CACHE"):
        keep(source, tmp_path / "cache")


def test_folders_are_read_through_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "a.jsonl").write_text('{"text": "1"}\n')
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "b.jsonl").write_text('{"text": "2"}\n')
    (tmp_path / "corpus" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "deep" / "back").symlink_to(tmp_path / "elsewhere")  # a link to a folder that holds it
    data = opened(tmp_path, source="jsonl", path="corpus")
    assert data.streams[0].tokens.tolist() == [ord("1"), END, ord("2"), END]


def test_text_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    """A closed folder, or a link to what is not mounted, was left out without a word: a run learnt from the rest."""
    corpus = tmp_path / "corpus"
    (corpus / "closed").mkdir(parents=True)
    for name in ("a.jsonl", "closed/b.jsonl"):
        (corpus / name).write_text('{"text": "1"}\n')
    for hidden in (".closed", "lost+found"):
        (corpus / hidden).mkdir(mode=0)
    (corpus / ".#lock").symlink_to(tmp_path / "nowhere")
    assert len(list_files(corpus, ".jsonl")) == 2
    (corpus / "closed").chmod(0)
    with laid_down(), pytest.raises(BadInput, match=r"closed: the folder cannot be read \(Permission denied\)"):
        list_files(corpus, ".jsonl")
    (corpus / "closed").chmod(0o700)
    (corpus / "shard").symlink_to(tmp_path / "unmounted")
    with pytest.raises(BadInput, match=r"shard: the link leads nowhere.*unmounted"):
        list_files(corpus, ".jsonl")


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_a_parquet_file_is_called_so(tmp_path: Path, source: str) -> None:
    """`hethub tokenise web.parquet` advised to convert it to UTF-8."""
    (tmp_path / "web.parquet").write_bytes(b"PAR1\x15\x04\xff rows")
    with pytest.raises(BadInput, match=r"web\.parquet: is a parquet file.* source: parquet"):
        opened(tmp_path, source=source, path="web.parquet")


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_a_compressed_file_is_called_so(tmp_path: Path, source: str) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(BadInput, match=r"a\.jsonl\.gz: is compressed by gzip.* Unpack"):
        opened(tmp_path, source=source, path="a.jsonl.gz")
