"""Frozen specs that map YAML one to one; every broken rule becomes part of one clear paragraph."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from hethub.spec.documents import KeyPath, Source, read_yaml
from hethub.spec.errors import BadInput, either, suggest


class Spec(BaseModel):
    """Base of all specs: immutable, unknown keys refused, NaN and infinity refused, validated when built."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    def replace(self, **changes: Any) -> Self:
        """A copy with `changes` applied, validated again (pydantic's own model_copy is not)."""
        return type(self).model_validate({**{k: getattr(self, k) for k in self.model_fields_set}, **changes})

    def unchecked(self, **changes: Any) -> Self:
        """A copy with `changes` applied and nothing checked: what is reasoned about may lie beyond what a file may say."""
        kind: Any = type(self)
        changed: Self = kind.model_construct(**{name: getattr(self, name) for name in kind.model_fields} | changes)
        return changed

    def to_dict(self) -> dict[str, Any]:
        """Plain YAML-able data without the keys that hold their default of None."""
        plain: dict[str, Any] = _without_defaults_of_none(self, self.model_dump(mode="json"))
        return plain


def _without_defaults_of_none(value: Any, data: Any) -> Any:
    """`data`, which was dumped of `value`. A key whose default is another one keeps its None."""
    if isinstance(value, Spec) and isinstance(data, dict):
        fields = type(value).model_fields
        return {
            name: _without_defaults_of_none(getattr(value, name), own)
            for name, own in data.items()
            if own is not None or fields[name].default is not None
        }
    if isinstance(value, Mapping):
        return {
            key: _without_defaults_of_none(own, part)
            for own, (key, part) in zip(value.values(), data.items(), strict=True)
        }
    if isinstance(value, list | tuple):
        return [_without_defaults_of_none(own, part) for own, part in zip(value, data, strict=True)]
    return data


SpecT = TypeVar("SpecT", bound=Spec)


def build(cls: type[SpecT], data: Any, source: Source, what: str, prefix: KeyPath = ()) -> SpecT:
    """`data` validated as a `cls`. Raises BadInput with every broken rule in one paragraph, places named."""
    if not isinstance(data, Mapping):
        remedy = " Write `key: value`, with a space behind the colon." if isinstance(data, str) else ""
        raise BadInput(f"{source.at(prefix)}: a {what} is a mapping of keys to values; got {describe(data)}.{remedy}")
    if misplaced := [*_misplaced(data, cls)]:
        raise BadInput(
            " ".join(f"{source.at((*prefix, *path))} {_MISPLACED}; {_instead(wanted)}." for path, wanted in misplaced)
        )
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        _refuse_another(data, source, what)
        raise BadInput(explain(error, cls, source, prefix)) from None


_MISPLACED = "is yes or no (so YAML reads yes, no, on, off, true and false), and this key takes neither"


def _instead(annotation: Any) -> str:
    """What to give where a boolean is none."""
    if words := [f"'{word}'" for word in _words_of(annotation)]:
        return f"give {either(words)}"
    return "put the word in quotes" if _mentions(annotation, str) else "give a number"


def _words_of(annotation: Any) -> list[str]:
    """The words that an annotation takes, where it takes some words alone."""
    inner = getattr(annotation, "__args__", ())
    if get_origin(annotation) is Literal:
        return [word for word in inner if isinstance(word, str)]
    return [word for each in inner for word in _words_of(each)]


def _misplaced(value: Any, annotation: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Where a boolean stands, though what the annotation describes has none there (pydantic counts it as 1 or 0), and that
    annotation."""
    if isinstance(value, bool):
        if annotation is not type(None) and not _mentions(annotation, bool) and _spec_in(annotation) is None:
            yield path, annotation
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _misplaced(item, annotation, (*path, place))
    elif isinstance(value, Mapping):
        spec = _spec_in(annotation)
        if spec is None and not _mentions(annotation, dict):
            return  # a mapping has no place here, whatever is in it
        inner = dict.fromkeys(value, annotation)
        if spec is not None:
            inner = {field.alias or name: field.annotation for name, field in spec.model_fields.items()}
        for key, item in value.items():
            if key in inner:
                yield from _misplaced(item, inner[key], (*path, key))


def _mentions(annotation: Any, kind: type) -> bool:
    return kind in (annotation, get_origin(annotation)) or any(
        _mentions(each, kind) for each in getattr(annotation, "__args__", ())
    )


# Keys that tell one kind of our files from the others.
_TELLING = {
    "job file": ("train", "data"),
    "plan file": ("stages", "program"),
    "model file": ("hidden", "layers"),
    "cluster file": ("nodes",),
    "catalogue": ("nodes",),
    "profile": ("devices",),
}


def _refuse_another(data: Mapping[str, Any], source: Source, what: str) -> None:
    """Raises BadInput where a file is plainly of another kind: every key of it would be called unknown."""
    if not any(key in data for key in _TELLING.get(what, data)):
        for other, keys in _TELLING.items():
            if key := next((key for key in keys if key in data), None):
                raise BadInput(f"{source.name}: this is a {other}, as its key '{key}' says; name a {what} here.")


def load(cls: type[SpecT], path: str | Path, what: str) -> SpecT:
    """The spec in a YAML file. Raises BadInput."""
    data, source = read_yaml(Path(path), what)
    return build(cls, data, source, what)


def describe(value: Any) -> str:
    """A short quotation of a wrong value."""
    # Of an int with thousands of digits Python writes the hexadecimal ones alone.
    shown = hex if isinstance(value, int) and value.bit_length() > 10_000 else repr
    text = shown(value).lower() if isinstance(value, bool) else shown(value)  # as YAML writes it
    return "nothing" if value is None else text if len(text) <= 80 else text[:77] + "..."


def show_gib(num_bytes: float) -> str:
    """Bytes in GiB, with two digits however few they are: 0.00 would say that nothing is there."""
    gib = num_bytes / 2**30
    return f"{gib:.2f}" if gib >= 0.1 or not gib else f"{gib:.2g}"


def form_of(value: Any) -> str:
    """What a value is, in a word of YAML and JSON, where it may be too long to quote."""
    forms = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return forms.get(type(value), "nothing")


def explain(error: ValidationError, cls: type[Spec], source: Source, prefix: KeyPath = ()) -> str:
    """All faults of a pydantic error as sentences in our words: place, what was given, rule, remedy."""
    faults = error.errors()
    places = [_written(fault["loc"], kind=fault["type"]) for fault in faults]
    told = [
        _sentence(fault, cls, source, prefix)
        for fault, place in zip(faults, places, strict=True)
        if not (_is_echo(fault) and any(other[: len(place)] == place for other in places if other != place))
    ]
    return " ".join(_without_repetition(_either(told)))


def _either(told: list[str]) -> list[str]:
    """The sentences; the forms that one key may have, which pydantic refuses one by one, in one of them."""
    joined: dict[str, str] = {}
    for sentence in told:
        said, asks, form = sentence.partition(_ASKS)
        key = said if asks else sentence
        joined[key] = f"{joined[key].removesuffix('.')} or {form}" if key in joined and asks else sentence
    return [*joined.values()]


_ASKS = ", but input should be "


def _without_repetition(told: list[str]) -> list[str]:
    """The sentences; what all unknown keys of one mapping share, the list of the known ones, behind the last alone."""
    rules = [sentence.partition(_KNOWN)[2] for sentence in told]
    return [
        f"{sentence.partition(_KNOWN)[0]}." if rule and rule in rules[n + 1 :] else sentence
        for n, (sentence, rule) in enumerate(zip(told, rules, strict=True))
    ]


_KNOWN = "; known: "


def _is_echo(fault: Any) -> bool:
    """Whether a fault may only repeat one further in: a mapping where a name might stand too, a list without its broken
    entries."""
    return fault["type"] == "too_short" or (fault["type"] == "string_type" and isinstance(fault["input"], Mapping))


def _sentence(fault: Any, cls: type[Spec], source: Source, prefix: KeyPath) -> str:
    place = _written(fault["loc"], kind=fault["type"])
    path = (*prefix, *place)
    kind, given = fault["type"], fault.get("input")
    if kind == "extra_forbidden":
        return f"{source.at(path)} is not a known key; {suggest(str(place[-1]), _known_keys(cls, place[:-1]))}"
    if kind == "missing":
        return f"{source.at(path)} is missing; add it."
    if kind == "value_error":
        error = fault["ctx"]["error"]
        return f"{source.at((*path, *getattr(error, 'key', ())))}: {error}"
    if kind == "invalid_key":
        key = json.dumps(given, default=str)  # true and null as YAML writes them
        return f"{source.at((*path[:-1], key))} is not a known key; {suggest(key, _known_keys(cls, place[:-1]))}"
    if kind == "too_short":
        return (
            f"{source.at(path)} is {describe(given)}, but it needs at least {fault['ctx']['min_length']} item; add one."
        )
    if kind == "too_long":
        return f"{source.at(path)} is {describe(given)}, but it takes {fault['ctx']['max_length']} items at most."
    said = f"{source.at(path)} is {describe(given)}"
    if fault["loc"][-1:] == ("[key]",):  # pydantic's word for what is wrong with a key, not with its value
        said = f"{source.at(path[:-1])} has the key {describe(given)}"
    return f"{said}, but {_SHAPES.get(kind) or _lower_first(fault['msg'])}.{_remedy(kind, given)}"


def _remedy(kind: str, given: Any) -> str:
    """What to change where a key has nothing below it, or a mapping stands in a list's place."""
    if kind in _LISTS and (given is None or isinstance(given, Mapping)):
        return " Begin every entry with `- `."
    if kind in _MAPPINGS and given is None:
        return " Indent its keys below it; what has a default may be left out."
    return ""


_MAPPINGS, _LISTS = ("model_type", "dict_type"), ("tuple_type", "list_type")

# Of YAML, where pydantic speaks of Python's types and of our classes.
_SHAPES = {
    **dict.fromkeys(_MAPPINGS, "input should be a mapping of keys to values"),
    **dict.fromkeys(_LISTS, "input should be a list"),
    "none_required": "hethub has nothing of the kind; leave it out",  # a key that is reserved
    "bool_parsing": "input should be true or false",
    "int_type": "input should be a whole number",
    "float_type": "input should be a number",
    "float_parsing": "input should be a number alone, without its unit",
    "string_type": "input should be text (a number or a date in quotes)",
    "int_parsing": "input should be a whole number in digits (10000; YAML takes 1e4 for text)",
}


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _written(loc: KeyPath, kind: str) -> KeyPath:
    """The place of a fault as the user wrote it: pydantic adds the tried type's name inside a union.

    An unknown key is always the user's own word, whatever it looks like.
    """
    own = loc[-1:] if kind == "extra_forbidden" else ()
    return (*(part for part in loc[: len(loc) - len(own)] if not _is_union_tag(part)), *own)


def _is_union_tag(part: str | int) -> bool:
    return isinstance(part, str) and (part.endswith("Spec") or "[" in part or part in _UNION_TAGS)


_UNION_TAGS = {"str", "int", "float", "bool", "constrained-str", "constrained-int", "literal"}


def _known_keys(cls: type[Spec], path: KeyPath) -> list[str]:
    """The keys allowed at `path` below a spec of type `cls`."""
    for part in path:
        if isinstance(part, str) and part in cls.model_fields:
            inner = _spec_in(cls.model_fields[part].annotation)
            if inner is None:
                return []
            cls = inner
    return [field.alias or name for name, field in cls.model_fields.items()]


def _spec_in(annotation: Any) -> type[Spec] | None:
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    return next((found for arg in getattr(annotation, "__args__", ()) if (found := _spec_in(arg))), None)
