"""Text from files, piece by piece, so that no file has to fit in memory."""

import codecs
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn

from hethub.spec.base import describe
from hethub.spec.documents import check_regular, parse_json
from hethub.spec.errors import BadInput

PIECE_BYTES = 2**20  # larger text files are read, and tokenised, in pieces of whole lines of about this size
TOKEN_FILE = b"hethub tokens"  # how a token file of any version begins
STDLIB_BYTES = 8 * 2**20  # python-stdlib stops before this much, so that a demo starts at once

_LINE_RULE = "Every line of a jsonl file is one object with a string under the key `{key}`."
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
# Tests, other people's packages, and code tables, which are no text to learn from.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
)


class Piece(NamedTuple):
    """Some text of one document, in order."""

    text: str
    ends_document: bool
    num_bytes: int  # read from the file for it


def list_files(path: Path, suffix: str = "") -> list[Path]:
    """The file, or the files below a folder in the order of their relative paths, hidden ones left out.

    Raises BadInput where there is nothing to read.
    """
    if path.is_file():
        return [path]
    check_regular(path, "data")
    if not path.is_dir():
        raise BadInput(
            f"{path}: there is no such file or folder of text. Check the path; one that a job names is relative to the job file."
        )
    relative = [file.relative_to(path) for file in _files_below(path) if file.name.endswith(suffix)]
    if not relative:
        raise BadInput(
            f"{path}: the folder holds no {suffix or 'visible'} files; name a folder with unpacked text in it."
        )
    return [path / name for name in sorted(relative, key=Path.as_posix)]


def _files_below(folder: Path) -> Iterator[Path]:
    """Every visible file below the folder, through links to folders too, but not through one to a folder that holds it.

    Raises BadInput where one cannot be reached: training would go on without it and never say so.
    """
    for here, folders, files in os.walk(folder, followlinks=True, onerror=_refuse_closed):
        above = Path(here).resolve()
        folders[:] = [
            name for name in folders if _is_visible(name) and not above.is_relative_to(Path(here, name).resolve())
        ]
        for path in (Path(here, name) for name in files if _is_visible(name)):
            if path.is_file():
                yield path
            elif path.is_symlink() and not path.exists():
                raise BadInput(
                    f"{path}: the link leads nowhere, so the text behind it would be missing. Mount or mend what it names "
                    f"({path.readlink()}), or remove the link."
                )


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "lost+found"  # of a file system's top, closed to all but root


def _refuse_closed(error: OSError) -> NoReturn:
    raise BadInput(
        f"{error.filename}: the folder cannot be read ({error.strerror}), so the text in it would be missing. Allow this user to "
        "read it, or take it out of the data."
    )


def pieces(files: Iterable[Path], kind: Literal["text", "jsonl"], key: str = "text") -> Iterator[Piece]:
    """The text of the files: one document per file, or one per line of JSON Lines, under `key`. Empty documents,
    and nulls, are left out."""
    for path in files:
        try:
            yield from _jsonl_pieces(path, key) if kind == "jsonl" else _text_pieces(path)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror}). Check that it is a readable file.") from None


def stdlib_pieces(folder: Path | None = None) -> Iterator[Piece]:
    """The running interpreter's own modules, one document each, the same on every machine with this Python.

    Single modules come first, then packages, each by name, up to 8 MiB; tests, code tables, build settings of this
    machine (`_sysconfigdata…`) and files that are not UTF-8 are left out.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    total = 0
    for name in sorted(_modules(folder), key=lambda name: (len(name.parts), name.as_posix())):
        data = (folder / name).read_bytes()
        total += len(data)
        if total > STDLIB_BYTES:
            return
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if text:
            yield Piece(text, True, len(data))


def _modules(folder: Path) -> Iterator[Path]:
    """The modules below the folder, relative to it; skipped folders are not entered (site-packages can be huge)."""
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in files:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(here, name).relative_to(folder)


def _text_pieces(path: Path) -> Iterator[Piece]:
    position = 0
    with _opened(path) as file:
        block = b"".join(file.readlines(PIECE_BYTES))
        while block:
            following = b"".join(file.readlines(PIECE_BYTES))
            yield Piece(_decode(block, path, position), not following, len(block))
            position += len(block)
            block = following


def _opened(path: Path) -> BinaryIO:
    """The file, whose text is to be read. Raises BadInput where it is compressed, a parquet or token file, or in an
    encoding of Windows'."""
    file = path.open("rb")
    if what := _no_text(file.peek(16)):
        file.close()
        raise BadInput(f"{path}: is {what}")
    return file


def _no_text(start: bytes) -> str | None:
    """What a file is that begins so, and what to do about it; None where it may be text."""
    if start.startswith(b"PAR1"):
        return (
            "a parquet file, and text is read as it is. A job reads it with source: parquet; for `hethub tokenise` write its "
            "column as jsonl."
        )
    if start.startswith(TOKEN_FILE):
        return "a token file, and text is read as it is. A job reads it with source: tokens; take it out of a folder of text."
    if found := next((how for magic, how in _COMPRESSED.items() if start.startswith(magic)), None):
        return f"compressed by {found}, and text is read as it is. Unpack the file."
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in start[:4]:
        return "UTF-16 or UTF-32, and text is read as UTF-8. Convert it (iconv -f utf-16 -t utf-8)."
    return None


def _decode(block: bytes, path: Path, position: int) -> str:
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path}: byte {position + error.start} is no UTF-8 text ({error.reason}). Convert the file to UTF-8 "
            "(iconv -f … -t utf-8), or take it out of the folder if it is no text."
        ) from None


def _jsonl_pieces(path: Path, key: str) -> Iterator[Piece]:
    for place, num_bytes, text in records(path, key, _LINE_RULE):
        if text is None:
            continue
        if not isinstance(text, str):
            raise BadInput(f"{place}: `{key}` is {describe(text)}; it must be a string.")
        if not is_utf8(text):
            raise BadInput(f"{place}: `{key}` holds half a surrogate pair, which is no character; repair the line.")
        if text:
            yield Piece(text, True, num_bytes)


def records(path: Path, key: str, rule: str) -> Iterator[tuple[str, int, Any]]:
    """What stands under `key` in each line of JSON Lines: its place for errors, the line's bytes, the value.

    `rule` says what a line must be, `{key}` in it being the key.
    """
    rule = rule.format(key=key)
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            place = f"{path}, line {number}"
            try:
                record = parse_json(line, place, "line")
            except BadInput as error:
                raise BadInput(f"{error} {rule}") from None
            if not isinstance(record, dict):
                raise BadInput(f"{place}: got {describe(record)}. {rule}")
            if key not in record:
                raise BadInput(
                    f"{place}: the object has no key `{key}`; it has {', '.join(record) or 'none'}. {rule} In a job a source's "
                    "`text` names another key."
                )
            yield place, len(line), record[key]


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
