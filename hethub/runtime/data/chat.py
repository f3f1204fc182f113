"""Conversations: a tokenizer's chat template makes one document of each, of which the assistant's turns are learnt."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hethub.runtime.data.sources import is_utf8, records
from hethub.spec.base import describe
from hethub.spec.documents import read_json, read_text
from hethub.spec.errors import BadInput

_RULE = (
    "Every line of a chat file is one object with a list of messages under the key `{key}`, each with a `role` and a "
    "`content`, both strings."
)
_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]  # that templates may name
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


class Conversation(NamedTuple):
    """A conversation as text, and which characters of it the assistant says."""

    text: str
    learnt: list[tuple[int, int]]  # [start, stop) of the assistant's turns, in order
    num_bytes: int


class ChatTemplate:
    """The template of a tokenizer: chat_template.jinja beside its tokenizer.json, or what tokenizer_config.json says."""

    def __init__(self, tokenizer: str, base: Path) -> None:
        folder = (base / tokenizer).parent
        config = {} if tokenizer == "bytes" else tokenizer_config(folder)
        self.text = _default(config.get("chat_template"))
        if tokenizer != "bytes" and (folder / TEMPLATE).is_file():
            self.text = read_text(folder / TEMPLATE, "chat template")
        if not isinstance(self.text, str):
            raise BadInput(
                f"data source chat needs a chat template, and the tokenizer {tokenizer} has none: neither {TEMPLATE} beside it nor "
                f"`chat_template` in {CONFIG}. Put one there, or name the tokenizer.json of a model that chats."
            )
        self._name = str(folder / TEMPLATE)
        self.tokens = {key: token for key in _TOKENS if (token := special_token(config, key))}
        self._template = self._compiled()

    def _compiled(self) -> Any:
        try:
            import jinja2
            from jinja2.ext import Extension
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise BadInput("data source chat needs the package jinja2: pip install 'hethub[data]'.") from None

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        class Generation(Extension):
            """{% generation %} … {% endgeneration %}, by which templates mark what the assistant says: it writes nothing."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                return jinja2.nodes.Scope(
                    parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
                )

        # As transformers renders it: a template of a stranger's folder reaches nothing but its messages.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = _json  # jinja's own writes < and & for HTML
        try:
            return environment.from_string(str(self.text))
        except jinja2.TemplateError as error:
            raise BadInput(f"{self._name}: the chat template cannot be read ({error}).") from None

    def render(self, messages: Sequence[Any], place: str, *, prompts: bool = False) -> str:
        """The conversation as text; it `prompts` the assistant's next turn. Raises BadInput."""
        try:
            # As transformers: Mistral's templates list the tools unless they are none.
            given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": prompts}
            text: str = self._template.render(**given, **self.tokens)
        except Exception as error:  # noqa: BLE001  a template is a program: it may fail in any way on what it is given
            raise BadInput(
                f"{place}: the chat template {self._name} cannot render this conversation ({error})."
            ) from None
        return text

    def conversation(self, messages: Any, key: str, place: str, num_bytes: int) -> Conversation:
        """The whole text, and the assistant's turns in it with what the template ends them with; `key`: under which the
        messages stand. Raises BadInput."""
        _check(messages, key, place)
        text, learnt = self.render(messages, place), []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self.render(messages[:number], place, prompts=True)
                stop = self.render(messages[: number + 1], place)
                if not (stop.startswith(start) and text.startswith(stop)):
                    raise BadInput(
                        f"{place}: the chat template {self._name} writes the assistant's turn {number + 1} otherwise when others "
                        "follow, so what is to be learnt is not told apart. Train on the rendered text, or change the template."
                    )
                learnt.append((len(start), len(stop)))
        return Conversation(text, learnt, num_bytes)


def _default(template: Any) -> Any:
    """Return the template that transformers takes, where there are several with names."""
    if not isinstance(template, list):
        return template
    named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
    return named[0].get("template") if named else None


def _json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json says, beside a tokenizer.json; empty where there is none. Raises BadInput."""
    config = read_json(folder / CONFIG, "tokenizer's config") if (folder / CONFIG).is_file() else {}
    return config if isinstance(config, dict) else {}


def special_token(config: dict[str, Any], key: str) -> str:
    """A special token as tokenizer_config.json has it: a string, or a mapping with its content; empty: none."""
    given = config.get(key)
    found = given.get("content") if isinstance(given, dict) else given
    return found if isinstance(found, str) else ""


def _check(messages: Any, key: str, place: str) -> None:
    rule = _RULE.format(key=key)
    if not isinstance(messages, list) or not messages:
        raise BadInput(f"{place}: got {describe(messages)} for `{key}`. {rule}")
    for number, message in enumerate(messages, 1):
        fits = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fits:
            raise BadInput(f"{place}: message {number} is {describe(message)}. {rule}")
        if not is_utf8(message["content"]):
            raise BadInput(f"{place}: message {number} holds half a surrogate pair, which is no character.")


def conversations(files: Sequence[Path], key: str, template: ChatTemplate) -> Iterator[Conversation]:
    """Every conversation of JSON Lines files."""
    for path in files:
        try:
            for place, num_bytes, messages in records(path, key, _RULE):
                yield template.conversation(messages, key, place, num_bytes)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror}). Check that it is a readable file.") from None
