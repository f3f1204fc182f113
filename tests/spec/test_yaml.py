"""The loader: YAML maps one to one, and every mistake is a sentence with file, line and key path."""

import resource
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from hethub.spec.base import Spec, build, load
from hethub.spec.documents import dump_yaml, parse_yaml, read_yaml, write_text
from hethub.spec.errors import BadInput


class InnerSpec(Spec):
    depth: Annotated[int, Field(ge=1)]
    kind: Literal["oak", "elm"] = "oak"


class OuterSpec(Spec):
    name: str
    rate: float = 0.5
    main: InnerSpec = InnerSpec(depth=1)
    others: tuple[InnerSpec, ...] = ()
    owner: str | InnerSpec = "nobody"
    pair: tuple[int, int] = (1, 2)
    heights: dict[str, int] = {}  # noqa: RUF012


def outer(text: str) -> OuterSpec:
    data, source = parse_yaml(text, "tree.yaml", "tree file")
    return build(OuterSpec, data, source, "tree file")


def refusal(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        outer(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_written_is_what_is_read() -> None:
    spec = outer("name: a\nothers: [{depth: 2}, {depth: 3, kind: elm}]\n")
    assert spec.others == (InnerSpec(depth=2), InnerSpec(depth=3, kind="elm"))
    assert outer(dump_yaml(spec.to_dict())) == spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\nrats: 1\n", "tree.yaml, line 2: rats is not a known key; did you mean 'rate'?"),
        ("name: a\nothers:\n- depth: 1\n- {depth: 2, kinds: elm}\n",
         "tree.yaml, line 4: others[1].kinds is not a known key; did you mean 'kind'?"),
        ("name: a\nmain: {depth: 1, xyzzy: 1}\n", "main.xyzzy is not a known key; known: depth, kind"),
        ("rate: 1\n", "tree.yaml: name is missing; add it."),
        ("name: a\nmain:\n  kind: elm\n", "tree.yaml, line 2: main.depth is missing"),
        ("name: a\nmain: {depth: zero}\n", "main.depth is 'zero', but input should be a whole number in digits"),
        ("name: a\nmain: {depth: 1e4}\n", "main.depth is '1e4', but input should be a whole number in digits (10000; YAML"),
        ("name: a\n\nmain: {depth: 0}\n", "tree.yaml, line 3: main.depth is 0, but input should be greater than or equal to 1"),
        ("name: a\nmain: {depth: 1, kind: ash}\n", "main.kind is 'ash', but input should be 'oak' or 'elm'"),
        ("name: a\nrate: .nan\n", "rate is nan, but input should be a finite number"),
        ("name: a\nmain: {depth: yes}\n", "tree.yaml, line 2: main.depth is yes or no (so YAML reads yes, no, on, off,"),
        ("name: a\nmain: {depth: no}\n", "line 2: main.depth is yes or no"),
        ("name: a\nrate: on\n", "line 2: rate is yes or no"),
        ("name: no\n", "line 1: name is yes or no"),
        ("name: a\npair:\n- 1\n- true\n", "tree.yaml, line 4: pair[1] is yes or no"),
        ("name: a\nothers: [{depth: 1, kind: on}]\n", "others[0].kind is yes or no"),
        ("name: a\nmain: yes\n", "main is true, but input should be a mapping"),
        ("name: a\nmain: {depth: 1.5}\n", "main.depth is 1.5, but input should be a valid integer"),
        ("name: [1]\n", "name is [1], but input should be text"),
        ("name: 8\n", "name is 8, but input should be text (a number or a date in quotes)"),
        ("name: a\nowner: {depth: 0}\n", "owner.depth is 0"),
        ("name: a\nname: b\n", "tree.yaml, line 2: name is given twice; keep one."),
        ("name: a\nothers:\n- {depth: 1, depth: 2}\n", "tree.yaml, line 3: others[0].depth is given twice"),
        ("name: 'a\n", "tree.yaml, line 2: the tree file is not valid YAML"),
        ("name: a: b\n", "tree.yaml, line 1: the tree file is not valid YAML"),
        ("name: a\nmain:\n\tdepth: 1\n", "that cannot start any token. Indent with spaces"),
        ("name: a\nborn: 2024-13-01\n", "line 2: the tree file holds what cannot be read: month must be in 1..12"),
        ("name: a\nmain: {depth: " + 5000 * "9" + "}\n", "line 2: the tree file holds what cannot be read: Exceeds the limit"),
        ("name: a\nmain: {depth: -0x" + 5000 * "f" + "}\n", "line 2: main.depth is -0xfff"),  # a traceback
        ("name: a\nnull: b\n", "tree.yaml, line 2: null is not a known key; known: "),  # none, without its line
        ("name: a\nheights: {no: 1}\n", "line 2: heights has the key false, but input should be text"),  # heights[0] is false
        ("name: a\nheights: {7: 1}\n", "line 2: heights has the key 7, but input should be text"),
        ("name: !!bool maybe\n", "line 1: the tree file holds what cannot be read"),
        ("name: !!timestamp now\n", "line 1: the tree file holds what cannot be read"),
        ("name: a\n---\nname: b\n", "expected a single document in the stream, but found another document"),
        ("name: \0\n", "unacceptable character"),
        ('name: a\nmain: {kind: "o\\0k"}\n', "tree.yaml, line 2: main.kind holds a zero character, which no name or text may"),
        ("name: a\nmain: {depth: 010}\n", "line 2: main.depth is 010, which YAML 1.1 reads in base 8 or 60"),  # it was 8
        ("name: a\nmain: {depth: 1:30}\n", "line 2: main.depth is 1:30, which YAML 1.1 reads in base 8 or 60"),  # it was 90
        ("name: a\nmain: 5\n", "line 2: main is 5, but input should be a mapping of keys to values."),
        ("name: a\nothers: {depth: 1}\n", "others is {'depth': 1}, but input should be a list."),
        ("name: a\npair: [1, 2, 3]\n", "pair is [1, 2, 3], but it takes 2 items at most."),
        ("name: a\n5: b\n", "tree.yaml, line 2: 5 is not a known key; known: "),
        ("name: a\nmain: {depth: 1, true: b}\n", "line 2: main.true is not a known key; known: depth, kind"),
        ("- a\n", "tree.yaml: a tree file is a mapping of keys to values; got ['a']"),
        ("", "tree.yaml: a tree file is a mapping of keys to values; got nothing"),
        ("just words", "got 'just words'"),
        ("name:a\n", "got 'name:a'. Write `key: value`, with a space behind the colon."),
        ("name: a\n  rate: 1\n",
         "line 2: the tree file is not valid YAML: mapping values are not allowed in this context. Begin the keys of one"),
        ("name: 'a\nrate: 1\n",
         "line 3: the tree file is not valid YAML: found unexpected end of stream. What begins in line 1 is not closed"),
        ("name: a\nmain: {depth: 1\nrate: 1\n", "What begins in line 2 is not closed"),
        ("name: a\n---\nname: b\n", "found another document. Keep one, without the line `---`."),
        ("name: ä\nrate: \a1\n", "tree.yaml, line 2: the tree file is not valid YAML: unacceptable character U+0007. Take it out."),
        ("name: a\nmain:\n", "main is nothing, but input should be a mapping of keys to values. Indent its keys below it;"),
        ("name: a\nothers: {depth: 1}\n", "but input should be a list. Begin every entry with `- `."),
        ("name: a\nothers:\n", "others is nothing, but input should be a list. Begin every entry with `- `."),
        ("name: a\nmain: {depth: null}\n", "main.depth is nothing, but input should be a whole number."),
        ("name: a\nmain: {depth: 1,000}\n", "line 2: main.000 has no value: between braces a comma ends one. Write numbers without commas"),
        ("name: a\nmain: {depth: 1,000,000}\n", "line 2: main.000 has no value"),  # was given twice
        ("name: a\nowner: 8\n", "owner is 8, but input should be text (a number or a date in quotes) or a mapping of keys to values."),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(text: str, expected: str) -> None:
    assert expected in refusal(text)


def test_a_number_is_one_whether_quoted_or_with_a_point() -> None:
    for written in ("2", "2.0", "'2'", "2.0e+0", "'02'"):
        assert outer(f"name: a\nrate: {written}\nmain: {{depth: {written}}}\n").main.depth == 2
    assert outer("name: a\nrate: 2e-1\n").rate == 0.2  # which is text to YAML


def test_all_mistakes_come_at_once() -> None:
    message = refusal("name: a\nmain: {depth: 0}\nrats: 1\n")
    assert "main.depth is 0" in message
    assert "rats is not a known key" in message


def test_the_keys_that_are_known_are_listed_once() -> None:
    message = refusal("name: a\nxyz: 1\nzyx: 2\n")
    assert "xyz is not a known key. tree.yaml, line 3: zyx is not a known key; known: " in message
    assert message.count("known: ") == 1


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.yaml: there is no such tree file"):
        load(OuterSpec, tmp_path / "nowhere.yaml", "tree file")
    with pytest.raises(BadInput, match=r"this is a folder; name a tree file here, the one in it perhaps\."):
        read_yaml(tmp_path, "tree file")
    (tmp_path / "latin.yaml").write_bytes(b"name: a\n# caf\xe9\n")
    with pytest.raises(
        BadInput, match=r"latin\.yaml, line 2: the tree file cannot be read as UTF-8: .*Save it as UTF-8"
    ):
        read_yaml(tmp_path / "latin.yaml", "tree file")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match=r"binary\.yaml, line 1: the tree file cannot be read as UTF-8: .*utf-8"):
        read_yaml(tmp_path / "binary.yaml", "tree file")


def test_specs_are_frozen_and_replace_validates() -> None:
    spec = InnerSpec(depth=2)
    with pytest.raises(ValueError, match="frozen"):
        spec.depth = 3  # type: ignore[misc]
    assert spec.replace(depth=3) == InnerSpec(depth=3)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        spec.replace(depth=0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_file_that_cannot_be_written_is_named() -> None:
    """The system says of a full disk only that it is full."""
    with pytest.raises(OSError, match="/dev/full"):
        write_text("much\n", Path("/dev/full"))


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    """On a full disk `hethub plan --out plan.yaml` left nothing of the plan there, and said that it was untouched."""
    (tmp_path / "plan.yaml").write_text("edited\n")
    (tmp_path / "plan.yaml").chmod(0o664)
    (tmp_path / "link.yaml").symlink_to("plan.yaml")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for name in ("plan.yaml", "link.yaml", "new.yaml"):
            with pytest.raises(OSError, match=name):
                write_text("much\n" * 100, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "plan.yaml").read_text() == "edited\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml", "plan.yaml"]
    write_text("whole\n", tmp_path / "link.yaml")
    assert (tmp_path / "plan.yaml").read_text() == "whole\n"
    assert (tmp_path / "plan.yaml").stat().st_mode & 0o777 == 0o664
