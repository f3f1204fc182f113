"""Files as data: YAML and JSON read within bounds, every mistake one clear paragraph that names file and line.

What a file holds is never run, and what it costs to read is bounded: its bytes, how deep it nests, and what aliases
make of it (a few lines of YAML can stand for more nodes than a machine has memory).
"""

import glob
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from hethub.spec.errors import BadInput

KeyPath = tuple[str | int, ...]

MOST_YAML_BYTES = 2**24  # a plan for 100,000 ranks has about half of that
MOST_JSON_BYTES = 2**26
MOST_DEPTH = 64  # the deepest of our files has twelve levels
MOST_ALIASED_NODES = 100_000

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OF_YAML_1_1 = re.compile(r"[-+]?0[0-7_]+$|.*:")  # 010 is 8 there, and 1:30 is 90

_VALUE = "value"  # what --set gives, on the command line: it has no lines

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where PyYAML was built with libyaml


class Source:
    """Where a document came from: names file and line of any key in error messages."""

    def __init__(self, name: str, lines: Mapping[KeyPath, int] | None = None) -> None:
        self.name = name
        self._lines: dict[KeyPath, int | str] = dict(lines or {})

    def at(self, path: KeyPath) -> str:
        """`file, line N: key.path`, as `place` says."""
        return f"{self.place(path)}: {dotted(path)}" if path else self.place(path)

    def place(self, path: KeyPath) -> str:
        """`file, line N` with the line of the innermost key of `path` that is written there, where one is, and what set a
        part of it; or what set it in the file's place."""
        line = next((self._lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._lines), None)
        inside = [by for key, by in self._lines.items() if isinstance(by, str) and path == key[: len(path)] != key]
        place = line if isinstance(line, str) else self.name if line is None else f"{self.name}, line {line}"
        return ", with ".join((place, *inside))

    def was_set(self, path: KeyPath, by: str) -> None:
        """What stands at `path` is no longer the file's: `by` has set it."""
        self._lines = {key: line for key, line in self._lines.items() if key[: len(path)] != path} | {path: by}


def dotted(path: KeyPath) -> str:
    """('stages', 0, 'zero') as `stages[0].zero`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def read_text(path: Path, what: str, most_bytes: int = MOST_JSON_BYTES) -> str:
    """The text of a UTF-8 file of at most `most_bytes`.

    Raises BadInput if it is missing, unreadable or longer; `what` names its role ("job file").
    """
    content = read_bytes(path, what, most_bytes)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInput(
            f"{path}, line {line}: the {what} cannot be read as UTF-8: {error}. Save it as UTF-8 in your editor."
        ) from None


def read_bytes(path: Path, what: str, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """The content of a file of at most `most_bytes`. Raises BadInput as `read_text` does."""
    try:
        check_regular(path, f"a {what}")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise BadInput(
            f"{path}: there is no such {what}. Check the path; one that a file names is relative to that file."
        ) from None
    except IsADirectoryError:
        raise BadInput(f"{path}: this is a folder; name a {what} here, the one in it perhaps.") from None
    except OSError as error:
        raise BadInput(
            f"{path}: the {what} cannot be read ({error.strerror}). Allow this user to read it, or name another."
        ) from None
    if len(content) > most_bytes:
        raise BadInput(f"{path}: the {what} is longer than {most_bytes:,} bytes, so it is none. Check the path.")
    return content


def check_regular(path: Path, what: str) -> None:
    """Raises BadInput where what is there can be read only once, or never."""
    kinds = {"p": "FIFO", "s": "socket", "c": "device", "b": "device"}
    if path.exists() and (kind := kinds.get(stat.filemode(path.stat().st_mode)[0])):
        raise BadInput(
            f"{path}: this is a {kind}, and {what} is read again and again, so it must be a regular file. Write what it gives "
            "to a file, and name that."
        )


def read_json(path: Path, what: str, most_bytes: int = MOST_JSON_BYTES, *, unique: bool = False) -> Any:
    """The data of a JSON file. Raises BadInput as `read_text` does, and where it is no JSON or, of one whose keys are to be
    `unique`, as people write files, a key stands twice: Python would silently keep the last."""
    return parse_json(read_text(path, what, most_bytes), str(path), what, unique=unique)


def parse_json(text: str | bytes, name: str, what: str, *, unique: bool = False) -> Any:
    """Do what `read_json` does, for text."""
    try:
        plain = text.removeprefix("\ufeff") if isinstance(text, str) else text  # some editors write the mark
        return json.loads(plain, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise BadInput(f"{name}: the {what} nests too deeply to be read.") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        if what == "line":  # whose end is no place of its own
            place = f"column {min(error.pos, len(error.doc.rstrip())) + 1}"
        raise BadInput(f"{name}: the {what} is not valid JSON: {error.msg}, {place}.") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: the {what} is no UTF-8 text: {error}; save the file as UTF-8.") from None
    except ValueError as error:
        raise BadInput(f"{name}: the {what} is not valid JSON: {error}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of its keys and values. Raises ValueError where a key stands twice."""
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"key '{twice}' is given twice; keep one")
    return dict(pairs)


def read_yaml(path: Path, what: str) -> tuple[Any, Source]:
    """The data of a YAML file and its source. Raises BadInput as `read_text` does, and where it is no YAML."""
    return parse_yaml(read_text(path, what, MOST_YAML_BYTES), str(path), what)


def parse_yaml(text: str, name: str, what: str) -> tuple[Any, Source]:
    """Do what `read_yaml` does, for text. Duplicate keys are refused: YAML would silently keep the last."""
    root = None
    try:
        _check_depth(text, name, what)
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None, Source(name)
        _Expansion(name, what).measure(root)
        lines: dict[KeyPath, int] = {}
        _note_lines(root, (), lines, name)
        return loader.construct_document(root), Source(name, lines)
    except yaml.YAMLError as error:
        raise BadInput(_told(error, text, name, what)) from None
    except BadInput:
        raise
    except (ValueError, LookupError, AttributeError) as error:  # 2024-13-01, !!bool maybe, !!timestamp now
        place = f"{name}, line {line}" if root and (line := _unreadable_line(root)) else name
        raise BadInput(f"{place}: the {what} holds what cannot be read: {error}. Quote it, or correct it.") from None


def _told(error: yaml.YAMLError, text: str, name: str, what: str) -> str:
    """What is wrong with text that is no YAML, where, and what to change where that can be told."""
    if isinstance(error, ReaderError):  # which knows no line
        strange = chr(error.character)
        place = name if what == _VALUE else f"{name}, line {text.partition(strange)[0].count(chr(10)) + 1}"
        return f"{place}: the {what} is not valid YAML: unacceptable character U+{ord(strange):04X}. Take it out."
    mark, opened = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    place = f"{name}, line {mark.line + 1}" if mark and what != _VALUE else name
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    context = f"{error.context}, " if problem.startswith("but ") else ""  # type: ignore[attr-defined]
    remedy = next((remedy for known, remedy in _REMEDIES.items() if known in problem), "")
    if mark and text[mark.index : mark.index + 1] == "\t":
        remedy = " Indent with spaces, not with tabs."
    elif not remedy and opened and mark and opened.line < mark.line and what != _VALUE:
        remedy = f" What begins in line {opened.line + 1} is not closed, or its lines are not indented alike."
    return f"{place}: the {what} is not valid YAML: {context}{problem}.{remedy}"


# Of what the parser says without a remedy.
_REMEDIES = {
    "mapping values are not allowed": " Begin the keys of one mapping in the same column, and quote a text that holds `: `.",
    "but found another document": " Keep one, without the line `---`.",
    "could not determine a constructor": " Take the tag (`!…`) out: files hold plain values.",
}


def _unreadable_line(node: yaml.Node) -> int | None:
    """The line of the first value of which Python makes nothing."""
    for child in _children(node):
        if line := _unreadable_line(child):
            return line
    try:
        if isinstance(node, yaml.ScalarNode):
            _Loader("").construct_document(node)
    except (ValueError, LookupError, AttributeError):
        return node.start_mark.line + 1
    return None


def _check_depth(text: str, name: str, what: str) -> None:
    """Refuse text that is nested too deeply, before YAML composes its nodes, which recurses in C without a limit."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MOST_DEPTH:
                assert event.start_mark is not None
                raise BadInput(
                    f"{name}, line {event.start_mark.line + 1}: the {what} nests more than {MOST_DEPTH} levels deep; "
                    "no file of ours does. Check the brackets and the indentation."
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Expansion:
    """How many nodes a document stands for where every alias is written out, and how deep they nest."""

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what
        self._known: dict[int, tuple[int, int] | None] = {}  # by node: nodes and levels; None while it is open
        self._aliased = 0

    def measure(self, node: yaml.Node) -> tuple[int, int]:
        """Nodes and levels. Raises BadInput where an alias stands inside what it stands for, or beyond the limits.

        An alias follows what it stands for, so it is known by then: the recursion is as deep as the text is.
        """
        if id(node) in self._known:
            found = self._known[id(node)]
            if found is None:
                raise BadInput(
                    f"{self._place(node)}: an alias stands for something that holds the alias; write it out."
                )
            self._aliased += found[0]
            if self._aliased > MOST_ALIASED_NODES or found[1] > MOST_DEPTH:
                raise BadInput(
                    f"{self._place(node)}: aliases make the {self._what} larger than {MOST_ALIASED_NODES:,} entries or "
                    f"deeper than {MOST_DEPTH} levels; write out what is meant."
                )
            return found
        self._known[id(node)] = None
        inner = [self.measure(child) for child in _children(node)]
        size, depth = 1 + sum(size for size, _ in inner), 1 + max((depth for _, depth in inner), default=0)
        self._known[id(node)] = size, depth
        return size, depth

    def _place(self, node: yaml.Node) -> str:
        return f"{self._name}, line {node.start_mark.line + 1}"


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _note_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        line = f", line {node.start_mark.line + 1}: {dotted(path)}"
        _check_scalar(node, name + (line if path else ": the value"))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*path, index), lines, name)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = f"{name}, line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise BadInput(f"{place}: a key is a word; got a list or a mapping.")
            here = (*path, key.value)
            if (
                node.flow_style
                and key.value.isdigit()
                and not key.style
                and isinstance(value, yaml.ScalarNode)
                and not value.value
            ):
                raise BadInput(
                    f"{place}: {dotted(here)} has no value: between braces a comma ends one. Write numbers without commas "
                    "(1000000, 3.5)."
                )
            if here in lines:
                raise BadInput(f"{place}: {dotted(here)} is given twice; keep one.")
            lines[here] = key.start_mark.line + 1
            _note_lines(value, here, lines, name)


def _check_scalar(node: yaml.ScalarNode, place: str) -> None:
    if "\0" in node.value:
        raise BadInput(f"{place} holds a zero character, which no name or text may; take it out.")
    if node.tag in _NUMBERS and _OF_YAML_1_1.match(node.value):
        raise BadInput(
            f"{place} is {node.value}, which YAML 1.1 reads in base 8 or 60 and YAML 1.2 does not; write a plain "
            "decimal number, or quote it if it is a name."
        )


def set_key(override: str, data: Any, source: Source) -> None:
    """Sets one `key.path=value` in the raw data, the value read as YAML."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise BadInput(f"--set {override}: write key.path=value, for example --set train.steps=5.")
    value, _ = parse_yaml(text, f"--set {override}", _VALUE)
    *parents, last = key.split(".")
    here, outermost = data, (*parents, last)
    for depth, parent in enumerate(parents, 1):
        if isinstance(here, dict) and here.get(parent) is None:
            here[parent], outermost = {}, outermost[:depth]
        elif isinstance(here, dict) and isinstance(here[parent], dict):
            here[parent] = {**here[parent]}  # an alias stands for the same one elsewhere
        here = here[parent] if isinstance(here, dict) else None
    if not isinstance(here, dict):
        where = f" at '{'.'.join(parents)}'" if parents else ""
        raise BadInput(f"--set {override}: {source.name} has no mapping{where} to put '{last}' into.")
    here[last] = value
    source.was_set(outermost, f"--set {override}")


def write_text(text: str, path: Path) -> None:
    """Writes a file, or the one that a link leads to, so that it is there as before or whole. What takes no file in its
    place, as a pipe, is written to. Raises OSError, which names the file also where a disk is full."""
    file = path.resolve()
    is_replaced = path.is_file() or not path.exists()
    try:
        if is_replaced and os.access(file.parent, os.W_OK, effective_ids=True):
            write_whole(file, text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = str(path)
        raise


def write_yaml(data: Any, path: Path) -> None:
    """Writes plain data as YAML in the order given; lists of scalars stay on one line."""
    write_text(dump_yaml(data), path)


def dump_yaml(data: Any) -> str:
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


class Dumper(yaml.SafeDumper):
    """SafeDumper without anchors: a person edits these files."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def unfinished_of(path: Path) -> Path:
    """A name beside `path` for what is still being written, which no other process has: on hosts that share a folder
    containers often have the same process numbers."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def unfinished_files(path: Path) -> list[Path]:
    """What is there under names that `unfinished_of` gave for `path`: being written, or left by who was killed."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.*.tmp"))


def write_whole(path: Path, text: str) -> None:
    """Writes the file so that it is there as before or whole, whenever this process ends.

    It keeps who may read it. A link of that name is replaced, not followed. Raises OSError.
    """
    unfinished = unfinished_of(path)
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            if path.is_file():
                shutil.copymode(path, unfinished)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Renames a file or a folder so that nothing uses or removes it; where it is now. Raises OSError."""
    names = chain([f"{path.name}.set-aside"], (f"{path.name}.set-aside-{number}" for number in count(2)))
    return path.rename(next(place for name in names if not (place := path.with_name(name)).exists()))
