"""The keys of every YAML file: JSON schemas and the page of all keys, both made from the specs."""

import ast
import inspect
import io
import json
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

FILES = {
    "job": "JOB.yaml: what to train, on what, how",
    "cluster": "CLUSTER.yaml: nodes of accelerators and the links between them",
    "plan": "PLAN.yaml: what every accelerator does",
    "model": "MODEL.yaml: the shape of a transformer",
    "catalogue": "CATALOGUE.yaml: node types that `hethub size` may choose from",
}


class Key(NamedTuple):
    """A key of a file by its dotted path (`nodes[].count`), what it may be, its default as text, what it is for."""

    path: str
    type: str
    default: str  # empty: it must be given
    text: str


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON schema of a kind of file; comments of the specs are its descriptions."""
    from pydantic import TypeAdapter

    from hethub.spec.plan import PlanSpec
    from hethub.spec.program import ProgramPlanSpec

    cls = _spec_of(kind)
    schema: dict[str, Any]
    if cls is PlanSpec:
        schema = TypeAdapter(PlanSpec | ProgramPlanSpec).json_schema()  # the second: plans of strategy hap
        classes = {**_classes(PlanSpec), **_classes(ProgramPlanSpec)}
    else:
        schema, classes = cls.model_json_schema(), _classes(cls)
    for name, definition in [(cls.__name__, schema), *schema.get("$defs", {}).items()]:
        texts = comments(classes[name]) if name in classes else {}
        for key, field in definition.get("properties", {}).items():
            field.pop("title", None)
            if key in texts:
                field["description"] = texts[key].replace("None:", "null:")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": FILES[kind]}


def _spec_of(kind: str) -> Any:
    from hethub.capacity.catalogue import CatalogueSpec
    from hethub.spec.cluster import ClusterSpec
    from hethub.spec.job import JobSpec
    from hethub.spec.model import ModelSpec
    from hethub.spec.plan import PlanSpec

    specs = {"job": JobSpec, "cluster": ClusterSpec, "plan": PlanSpec, "model": ModelSpec, "catalogue": CatalogueSpec}
    return specs[kind]


def _classes(cls: Any) -> dict[str, Any]:
    """A spec and all specs inside it, by name."""
    found: dict[str, Any] = {}

    def gather(annotation: Any) -> None:
        if isinstance(annotation, type) and hasattr(annotation, "model_fields") and annotation.__name__ not in found:
            found[annotation.__name__] = annotation
            for field in annotation.model_fields.values():
                gather(field.annotation)
        for argument in get_args(annotation):
            gather(argument)

    gather(cls)
    return found


def comments(cls: Any) -> dict[str, str]:
    """Return for each field of a spec the comment beside or above it in the spec's code, or in that of its base classes."""
    bases = [base for base in reversed(cls.__mro__) if getattr(base, "model_fields", None)]
    return {field: text for base in bases for field, text in _own_comments(base).items()}


@cache
def _own_comments(cls: Any) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    beside = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith("# noqa")
    }
    found = {}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own = [beside[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in beside]
            above: list[str] = []
            line = node.lineno - 1
            while not own and line in beside and lines[line - 1].lstrip().startswith("#"):
                above.insert(0, beside[line])
                line -= 1
            if own or above:
                found[node.target.id] = " ".join(own or above)
    return found


def keys(kind: str) -> list[Key]:
    """Every key of a kind of file, in the order of its spec; but those that another file has under the same name."""
    schema = json_schema(kind)
    definitions = schema.get("$defs", {})
    if "properties" not in schema:  # a plan of layers, or of hap, whose keys nobody writes
        schema = definitions[_spec_of(kind).__name__]
    elsewhere = {"catalogue": {"NodeSpec", "LinksSpec"}, "plan": {"PlannedFor"}}.get(kind, set())
    return list(_below(schema, definitions, "", elsewhere))


def _below(node: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str, known: set[str]) -> Iterator[Key]:
    required = node.get("required", ())
    for name, field in node["properties"].items():
        path = f"{prefix}{name}"
        type_, text = _type(field, definitions), field.get("description", "")
        if type_ != "mapping" or text:
            yield Key(path, type_, "" if name in required else _default(field), text)
        for reference, suffix in _references(field):
            if reference not in known and "properties" in definitions[reference]:
                yield from _below(definitions[reference], definitions, f"{path}{suffix}.", {*known, reference})


def _references(field: Mapping[str, Any], suffix: str = "") -> Iterator[tuple[str, str]]:
    """The specs that a field holds, each with what stands for an element of it in a path."""
    if "$ref" in field:
        yield field["$ref"].rpartition("/")[2], suffix
    for part in (*field.get("anyOf", ()), *field.get("allOf", ())):
        yield from _references(part, suffix)
    if isinstance(field.get("items"), dict):
        yield from _references(field["items"], f"{suffix}[]")


_NUMBERS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _type(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """What a value may be, in words."""
    if "$ref" in field:
        inner = definitions[field["$ref"].rpartition("/")[2]]
        return "mapping" if "properties" in inner else _type(inner, definitions)
    for union in ("anyOf", "allOf"):
        if union in field:
            return " or ".join(dict.fromkeys(_type(part, definitions) for part in field[union]))
    if "const" in field or "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        items = field.get("items") or {"anyOf": field.get("prefixItems", [{}])}
        return f"list of {_type(items, definitions)}"
    if field.get("type") == "object":
        values = field.get("additionalProperties")
        return f"mapping to {_type(values, definitions)}" if isinstance(values, dict) else "mapping"
    names = {"string": "text", "boolean": "`true` \\| `false`", "null": "`null`"}
    limits = [f"{sign} {field[name]:g}" for name, sign in _NUMBERS.items() if name in field]
    return " ".join([names.get(field.get("type", ""), field.get("type", "anything")), *limits])


def _default(field: Mapping[str, Any]) -> str:
    if "default" not in field:
        return "the defaults below"
    value = field["default"]
    return "empty" if value == "" else f"`{json.dumps(value, ensure_ascii=False)}`".replace('"', "")


def page() -> str:
    """The page of all keys, in Markdown."""
    lines = [
        "# Every key", "",
        "Made from the specs by `python -m hethub.commands.reference docs/reference.md`; a test holds it to them.",
        "Paths in a file are relative to it. A key that is not known is refused, with the nearest one.",
        "`hethub schema job` prints the same as a JSON schema, for editors.", "",
    ]  # fmt: skip
    for kind, title in FILES.items():
        lines += [f"## {title}", "", "| key | type | default | |", "|---|---|---|---|"]
        lines += [
            f"| `{key.path}` | {key.type} | {key.default or 'must be given'} | {key.text.replace('|', chr(92) + '|')} |"
            for key in keys(kind)
        ]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
