"""Files of strangers: bombs, depths, names that point elsewhere. Each is one paragraph, soon, and nothing is run."""

import json
import os
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hethub.runtime.data.sources import pieces
from hethub.runtime.data.token_file import HEADER_BYTES, MAGIC, read_token_file
from hethub.runtime.data.tokenizer import load_tokenizer
from hethub.runtime.model.huggingface import INDEX_FILE, SINGLE_FILE, open_weights
from hethub.spec.documents import parse_yaml, read_json, read_yaml
from hethub.spec.errors import BadInput
from hethub.spec.hugging_face import from_hugging_face
from hethub.spec.job import load_job
from tests.support.job_files import write_job
from tests.support.layouts import MODEL

LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40))
MERGED = "a0: &a0 {x0: 1, y0: 2}\n" + "".join(
    f"a{n}: &a{n} {{x{n}: 1, <<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 40)
)
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2000))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (LAUGHS, r"line [56]: aliases make the job file larger than 100,000 entries"),
        (MERGED, r"line [56]: aliases make the job file larger than 100,000 entries"),
        (CHAIN, r"aliases make the job file .* deeper than 64 levels"),
        ("a: &a [*a]\n", r"line 1: an alias stands for something that holds the alias"),
        ("a: &a {b: *a}\n", r"line 1: an alias stands for something that holds the alias"),
        ("a: &a\n  ? *a\n  : 1\n", r"an alias stands for something that holds the alias"),
        ("[" * 200_000, r"line 1: the job file nests more than 64 levels deep"),
        ("- " * 200_000, r"line 1: the job file nests more than 64 levels deep"),
        ("{b: " * 100_000, r"line 1: the job file nests more than 64 levels deep"),
        ("? [1, 2]\n: 3\n", r"line 1: a key is a word"),
        ("a: !!python/object/apply:os.system [exit]\n", r"line 1: the job file is not valid YAML"),
        ("a: " + "9" * 5000, r"line 1: the job file holds what cannot be read"),
    ],
)
def test_hostile_yaml_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=complaint) as caught:
        parse_yaml(text, "job.yaml", "job file")
    assert "\n" not in str(caught.value)


def test_ordinary_aliases_and_merges_are_read() -> None:
    data, _ = parse_yaml("a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a, y: 2}\n", "a.yaml", "file")
    assert data == {"a": {"x": 1}, "b": [{"x": 1}, {"x": 1}], "c": {"x": 1, "y": 2}}


def test_an_override_is_read_within_the_same_bounds(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--set train.steps=.*nests more than 64 levels deep"):
        load_job(write_job(tmp_path), ["train.steps=" + "[" * 100_000])


def test_endless_files_are_refused(tmp_path: Path) -> None:
    for read in (partial(read_yaml, what="job file"), partial(read_json, what="profile")):
        with pytest.raises(BadInput, match=r"/dev/zero: this is a device"):
            read(Path("/dev/zero"))
    with pytest.raises(BadInput, match=r"/dev/zero: this is a device"):
        load_tokenizer("/dev/zero", tmp_path)


def test_files_of_absurd_length_are_refused(tmp_path: Path) -> None:
    (long := tmp_path / "long").touch()
    os.truncate(long, 2**24 + 1)
    with pytest.raises(BadInput, match=r"long: the job file is longer than 16,777,216 bytes"):
        read_yaml(long, "job file")
    with pytest.raises(BadInput, match=r"the profile is longer than 5 bytes"):
        read_json(long, "profile", 5)
    os.truncate(long, 2**28 + 1)
    with pytest.raises(BadInput, match=r"that is no tokenizer\.json"):
        load_tokenizer(str(long), tmp_path)


DEEP = '{"text": ' + "[" * 100_000


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(DEEP.encode(), ": .*nests too deeply"), (b'{"a":\n"\xff"}', ", line 2: .*cannot be read as UTF-8: 'utf-8'"),
     (b'{"a"', ": .*not valid JSON"), (b"9" * 5000, ": .*not valid JSON")],
)  # fmt: skip
def test_hostile_json_is_refused(content: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadInput, match=rf"config\.json{complaint}"):
        from_hugging_face(tmp_path)


def test_a_deep_line_of_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "whole"}}\n{DEEP}\n')
    with pytest.raises(BadInput, match=r"a\.jsonl, line 2: the line nests too deeply"):
        list(pieces([tmp_path / "a.jsonl"], "jsonl"))


def test_a_deep_header_of_tokens_is_named(tmp_path: Path) -> None:
    """Python 3.13 follows four thousand brackets to their end, where something is missing."""
    (tmp_path / "a.bin").write_bytes(MAGIC + b"[" * (HEADER_BYTES - len(MAGIC)))
    with pytest.raises(
        BadInput, match=r"a\.bin: the header of the token file (nests too deeply|is not valid JSON: Expecting)"
    ):
        read_token_file(tmp_path / "a.bin")


def header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


NORM = {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 16]}
HOSTILE_WEIGHTS = {
    "an endless header": struct.pack("<Q", 2**63),
    "a header beyond the file": struct.pack("<Q", 10**8) + b"{}",
    "nothing": b"",
    "no JSON": struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
    "a deep header": struct.pack("<Q", 10**5) + b"[" * 10**5,
    "more elements than numbers hold": header({"norm": NORM}) + bytes(16),
    "offsets beyond the file": header({"norm": {**NORM, "shape": [4], "data_offsets": [0, 1 << 40]}}),
    "elements that overlap": header({n: {**NORM, "shape": [4]} for n in "ab"}) + bytes(16),
    "a header that is a list": header([1]),
}


@pytest.mark.parametrize("kind", list(HOSTILE_WEIGHTS))
def test_hostile_weights_are_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(HOSTILE_WEIGHTS[kind])
    with pytest.raises(BadInput, match=r"model\.safetensors: the safetensors file is damaged"):
        open_weights(tmp_path, MODEL)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", "..", ""])
def test_shards_lie_beside_their_index(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"norm": name}}))
    with pytest.raises(BadInput, match="is no name of a safetensors file beside it"):
        open_weights(tmp_path, MODEL)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_text('{"version": "1.0", "model": 5}'),
        lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"),
        lambda path: path.mkdir(),
    ],
)
def test_hostile_tokenizers_are_refused(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    spoil(tmp_path / "tokenizer.json")
    with pytest.raises(BadInput, match=r"tokenizer\.json: "):
        load_tokenizer("tokenizer.json", tmp_path)


def test_a_tokenizer_that_cannot_encode_is_named(tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words}))
    with pytest.raises(BadInput, match=r"tokenizer\.json: this tokenizer cannot encode the text"):
        load_tokenizer("tokenizer.json", tmp_path).encode(["b"])
