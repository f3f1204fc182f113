"""`hethub tokenise` and the token file it writes."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hethub.cli import run
from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.data import tokenise as tokenise_module
from hethub.runtime.data import tokenizer as tokenizer_module
from hethub.runtime.data.opening import check_tokenizer
from hethub.runtime.data.sources import Piece
from hethub.runtime.data.token_file import HEADER_BYTES, MAGIC, token_file_writer
from hethub.runtime.data.tokenise import tokenise
from hethub.runtime.data.tokenizer import TokenBatch, byte_tokenizer, load_tokenizer
from hethub.spec.errors import BadInput
from hethub.spec.job import DataSpec
from tests.support.command import HANG_SECONDS

END = 256


def opened(path: Path, vocab: int = 257, document_mask: bool = False) -> Dataset:
    spec = DataSpec(source="tokens", path=path.name, document_mask=document_mask)
    return open_dataset(spec, path.parent, seq_len=4, seed=1, vocab=vocab)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("first")
    (folder / "b.jsonl").write_text('{"text": "second"}\n{"text": "third"}\n')
    return folder


@pytest.fixture
def token_file(texts: Path, tmp_path: Path) -> Path:
    out = tmp_path / "tokens.bin"
    tokenise([texts], "bytes", out, progress=False)
    return out


def rewrite_header(path: Path, **changes: object) -> None:
    data = path.read_bytes()
    header = json.loads(data[len(MAGIC) : HEADER_BYTES]) | changes
    path.write_bytes((MAGIC + json.dumps(header).encode()).ljust(HEADER_BYTES) + data[HEADER_BYTES:])


def test_texts_and_jsonl_become_one_mapped_stream(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokens.bin"
    summary = tokenise([texts], "bytes", out, progress=False)
    expected = [*b"first", END, *b"second", END, *b"third", END]
    data = opened(out, document_mask=True)
    assert isinstance(data.streams[0].tokens, np.memmap)
    assert data.streams[0].tokens.tolist() == expected
    assert (summary.num_files, summary.num_documents, summary.num_tokens) == (2, 3, len(expected))
    assert (summary.dtype, summary.max_token, data.vocab_needed) == ("uint16", END, END + 1)
    assert out.stat().st_size == HEADER_BYTES + 40 + 8 * 3, "19 tokens, to a border of 8 bytes, and three ends"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["texts", "tokens.bin"], "no temporary file stays"


def test_lines_keep_their_text_under_any_key(texts: Path, tmp_path: Path) -> None:
    (texts / "b.jsonl").write_text('{"content": "second"}\n{"content": "third"}\n')
    out = tmp_path / "tokens.bin"
    asked = ["tokenise", str(texts), "--tokenizer", "bytes", "--out", str(out)]
    assert run(asked) == 2
    assert run([*asked, "--key", "content"]) == 0
    assert opened(out).streams[0].tokens.tolist() == [*b"first", END, *b"second", END, *b"third", END]


def test_a_token_file_draws_the_batches_of_its_text(texts: Path, token_file: Path) -> None:
    text = DataSpec(source="text", path="a.txt")
    tokenise([texts / "a.txt"], "bytes", token_file, progress=False)
    in_memory = open_dataset(text, texts, seq_len=4, seed=1, vocab=257)
    mapped = opened(token_file)
    assert mapped.fingerprint == in_memory.fingerprint
    assert np.array_equal(mapped.samples(3, 2, 0, 2), in_memory.samples(3, 2, 0, 2))


def test_an_input_is_never_overwritten(texts: Path, tmp_path: Path) -> None:
    before = (texts / "a.txt").read_text()
    link = tmp_path / "link"
    link.symlink_to(texts / "a.txt")
    for paths, out in (([texts / "a.txt"], texts / "a.txt"), ([texts], texts / "b.jsonl"), ([texts], link)):
        with pytest.raises(BadInput, match="one of the texts to read"):
            tokenise(paths, "bytes", out, progress=False)
    assert (texts / "a.txt").read_text() == before


def test_a_failure_leaves_the_old_file_and_no_half_one(
    texts: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = token_file.read_bytes()

    def interrupted(files: list[Path], key: str) -> Iterator[Piece]:
        yield Piece("some text", True, 9)
        raise KeyboardInterrupt

    (texts / "c.jsonl").write_text("broken\n")
    with pytest.raises(BadInput, match="line 1"):
        tokenise([texts], "bytes", token_file, progress=False)
    monkeypatch.setattr(tokenise_module, "_mixed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenise([texts], "bytes", token_file, progress=False)
    assert token_file.read_bytes() == before
    assert sorted(p.name for p in token_file.parent.iterdir()) == ["texts", "tokens.bin"]


def test_an_end_that_is_asked_for_leaves_no_half_file(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(files: list[Path], key: str) -> Iterator[Piece]:
        yield Piece("some text", True, 9)
        os.kill(os.getpid(), signal.SIGTERM)
        yield Piece("more text", True, 9)

    monkeypatch.setattr(tokenise_module, "_mixed", ended)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            run(["tokenise", str(texts), "--tokenizer", "bytes", "--out", str(tmp_path / "tokens.bin")])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_out_must_be_a_file_in_a_folder_that_is_there(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a folder"):
        tokenise([texts], "bytes", tmp_path, progress=False)
    with pytest.raises(BadInput, match="there is no folder"):
        tokenise([texts], "bytes", tmp_path / "new" / "tokens.bin", progress=False)


def test_text_without_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(BadInput, match="no text in it"):
        tokenise([tmp_path / "a.txt"], "bytes", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_progress_is_plain_lines_where_there_is_no_terminal(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    tokenise([texts], "bytes", tmp_path / "out")
    assert stream.getvalue().splitlines()[-1].endswith("of 42 bytes (100 %)")
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32', but input should be 'uint16' or 'uint32'"),
        ({"dtype": "uint32"}, "the header promises 19 tokens of uint32"),
        ({"num_tokens": -1}, "num_tokens is -1"),
        ({"num_tokens": 10}, "the header promises 10 tokens"),
        ({"colour": "red"}, "colour is not a known key"),
    ],
)
def test_a_damaged_header_is_refused(token_file: Path, changes: dict[str, object], message: str) -> None:
    rewrite_header(token_file, **changes)
    with pytest.raises(BadInput, match=rf"tokens\.bin.*{message}.*`hethub tokenise`"):
        opened(token_file)


def test_damaged_files_are_refused(token_file: Path) -> None:
    data = token_file.read_bytes()
    cases = {
        "this is no token file of hethub": [data[HEADER_BYTES:], b"", np.arange(9000, dtype=np.uint16).tobytes()],
        "the header of the token file is not valid JSON": [data.replace(b"{", b"[", 1)],
        "cut short or altered": [data[:-1], data + b"\0\0"],
    }
    for message, contents in cases.items():
        for content in contents:
            token_file.write_bytes(content)
            with pytest.raises(BadInput, match=message):
                opened(token_file)


def test_tokens_of_another_tokenizer_are_refused(token_file: Path) -> None:
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(token_file.parent / "tokenizer.json"))
    spec = DataSpec(source="tokens", path="tokens.bin", tokenizer="tokenizer.json")
    with pytest.raises(BadInput, match="made with another tokenizer"):
        open_dataset(spec, token_file.parent, seq_len=4, seed=1, vocab=257)


@pytest.mark.parametrize("own", ["bytes", "tokenizer.json"])
def test_tokens_of_bytes_are_those_of_an_exported_folder(own: str, tmp_path: Path) -> None:
    """Its model could be trained on neither the bytes nor the token files that it had been trained on before."""
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer())
    (tmp_path / "one.txt").write_text("a b c a")
    tokenise([tmp_path / "one.txt"], "bytes", tmp_path / "tokens.bin", progress=False)
    for source, path in (("text", "one.txt"), ("tokens", "tokens.bin")):
        spec = DataSpec(source=source, path=path, tokenizer=own)
        data = open_dataset(spec, tmp_path, seq_len=4, seed=1, vocab=257)
        assert data.streams[0].tokens.tolist() == [*b"a b c a", END]
        assert check_tokenizer(data, tmp_path) is None


def without_ends(path: Path) -> None:
    """As earlier versions wrote the file."""
    size = HEADER_BYTES + 2 * json.loads(path.read_bytes()[len(MAGIC) : HEADER_BYTES])["num_tokens"]
    os.truncate(path, size)
    rewrite_header(path, has_ends=False)


def documents(data: Dataset) -> list[list[int]]:
    inputs = data.batch(0, data.num_windows, 0, data.num_windows).inputs
    return data.documents(0, data.num_windows, 0, data.num_windows, inputs).tolist()


def test_files_of_earlier_versions_tell_documents_by_their_end_token(token_file: Path) -> None:
    told = documents(opened(token_file, document_mask=True))
    without_ends(token_file)
    assert opened(token_file).streams[0].ends is None
    assert documents(opened(token_file, document_mask=True)) == told


def test_document_mask_needs_to_know_where_documents_end(token_file: Path) -> None:
    rewrite_header(token_file, end_of_document=None)
    opened(token_file, document_mask=True)
    without_ends(token_file)
    opened(token_file)
    with pytest.raises(BadInput, match="document_mask needs to know where documents end"):
        opened(token_file, document_mask=True)


def test_an_end_token_inside_a_text_ends_no_document(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer())
    (tmp_path / "a.jsonl").write_text('{"text": "a<|endoftext|>b"}\n{"text": "c"}\n')
    tokenise([tmp_path / "a.jsonl"], str(tmp_path / "tokenizer.json"), tmp_path / "out", progress=False)
    made = DataSpec(source="jsonl", path="a.jsonl", tokenizer="tokenizer.json", document_mask=True)
    for data in (
        open_dataset(made, tmp_path, seq_len=4, seed=1, vocab=257),
        open_dataset(made, tmp_path, seq_len=4, seed=1, vocab=257, cache_dir=tmp_path / "cache"),
        opened(tmp_path / "out", document_mask=True),
    ):
        assert data.streams[0].tokens.tolist() == [97, END, 98, END, 99, END]
        assert documents(data) == [[0, 0, 0, 0]]


def test_tokens_outside_the_vocabulary_are_refused_at_open_and_at_use(token_file: Path) -> None:
    with pytest.raises(BadInput, match=r"token id 256 .* vocabulary of 256"):
        opened(token_file, vocab=256)
    rewrite_header(token_file, max_token=255)
    data = opened(token_file, vocab=256)
    with pytest.raises(BadInput, match=r"token id 256 .* vocabulary of 256"):
        data.samples(0, 16, 0, 16)


def test_the_largest_token_may_come_early(tmp_path: Path) -> None:
    """Told by the last part of a long text alone, a model too small for it began to train."""
    tokenizer = load_tokenizer("bytes", tmp_path)
    with token_file_writer(tmp_path / "out", tokenizer) as writer:
        for tokens in ([7, END], [3, 4], [5, 6]):
            writer.append(TokenBatch(np.array(tokens, dtype=tokenizer.dtype), np.array([2]), 2))
    with pytest.raises(BadInput, match=r"token id 256 .* vocabulary of 256"):
        opened(tmp_path / "out", vocab=256)
    ends = opened(tmp_path / "out").streams[0].ends
    assert ends is not None
    assert ends.tolist() == [2, 4, 6]  # counted from the file's first token


def test_documents_of_a_text_in_memory_end_where_their_end_tokens_are(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_BATCH_PIECES", 1)
    (made,) = open_dataset(DataSpec(source="text", path="."), texts, seq_len=2, seed=1, vocab=257).streams
    assert made.ends is not None
    assert made.ends.tolist() == (np.flatnonzero(made.tokens == END) + 1).tolist()
    assert len(made.ends) > 1


def test_tokenising_needs_no_torch() -> None:
    program = "import sys, hethub.runtime.data.tokenise; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_SECONDS)


def test_large_vocabularies_take_uint32(tmp_path: Path) -> None:
    import tokenizers

    words = {"[UNK]": 0, "a": 70_000, "</s>": 70_001}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a a a a")
    summary = tokenise([tmp_path / "a.txt"], str(tmp_path / "tokenizer.json"), tmp_path / "out", progress=False)
    assert summary.dtype == "uint32"
    assert opened(tmp_path / "out", vocab=70_002).streams[0].tokens.tolist() == [70_000] * 4 + [70_001]


def test_two_hosts_that_share_a_folder_write_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers processes of two hosts often have one number."""
    monkeypatch.setattr("os.getpid", lambda: 7)
    path, tokenizer = tmp_path / "tokens.bin", load_tokenizer("bytes", tmp_path)
    batch = TokenBatch(np.arange(END + 1, dtype=tokenizer.dtype), np.array([END + 1]), END)
    with token_file_writer(path, tokenizer) as one, token_file_writer(path, tokenizer) as two:
        one.append(batch)
        two.append(batch)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert opened(path)


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_a_token_file_in_a_folder_of_text_is_called_so(texts: Path, source: str) -> None:
    """Its zeros are UTF-8: what `hethub tokenise corpus --out corpus/all.bin` wrote was trained on as text."""
    tokenise([texts], "bytes", texts / "c.jsonl", progress=False)
    with pytest.raises(BadInput, match=r"c\.jsonl: is a token file.* source: tokens"):
        open_dataset(DataSpec(source=source, path=texts.name), texts.parent, seq_len=4, seed=1, vocab=257)
