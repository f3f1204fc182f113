"""Conversations: transformers' own rendering, the assistant's turns alone learnt, and templates that do not do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.data.chat import ChatTemplate
from hethub.spec.errors import BadInput
from hethub.spec.job import DataSpec
from hethub.spec.layout.tensors import IGNORED

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'hethub[train]'")

TEMPLATE = """{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "four five"},
]


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Characters as tokens, with special ones for roles and ends."""
    loaded = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    loaded.add_tokens([chr(code) for code in (10, *range(32, 127))])
    loaded.add_special_tokens(["<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"])
    loaded.save(str(folder / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "<|endoftext|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def opened(
    folder: Path, chats: list[Any], *, document_mask: bool = False, text: str | None = None, **more: Any
) -> Dataset:
    (folder / "chats.jsonl").write_text("".join(json.dumps({text or "messages": chat}) + "\n" for chat in chats))
    spec = DataSpec(
        source="chat", path="chats.jsonl", tokenizer="tokenizer.json", document_mask=document_mask, text=text
    )
    return open_dataset(spec, folder, seq_len=8, seed=1, vocab=200, **more)


def learnt(data: Dataset, folder: Path) -> str:
    loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    (stream,) = data.streams
    assert stream.trained is not None
    ids = stream.tokens[stream.trained.astype(bool)].tolist()
    return "".join(loaded.id_to_token(token) for token in ids)


def test_only_the_assistants_turns_are_learnt(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert learnt(opened(tmp_path, [CHAT, CHAT[1:3]]), tmp_path) == "two<|end|>\nfour five<|end|>\ntwo<|end|>\n"


def test_the_text_is_what_transformers_renders(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'hethub[test]'")
    save_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    template = ChatTemplate("tokenizer.json", tmp_path)
    for prompts in (False, True):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompts)
        assert template.render(CHAT, "here", prompts=prompts) == expected
    end = theirs.convert_tokens_to_ids("<|endoftext|>")
    tokens = opened(tmp_path, [CHAT]).streams[0].tokens.tolist()
    assert tokens == [*theirs.apply_chat_template(CHAT, return_dict=False), end]


def test_targets_that_are_not_learnt_count_for_nothing(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    data = opened(tmp_path, [CHAT, CHAT[1:]])
    kept = opened(tmp_path, [CHAT, CHAT[1:]], cache_dir=tmp_path / "cache")
    assert data.fingerprint == kept.fingerprint
    for step in range(6):
        inputs, targets = data.batch(step, 4, 0, 4)
        assert np.array_equal(targets, kept.batch(step, 4, 0, 4).targets)
        rows = data.samples(step, 4, 0, 4)
        assert np.array_equal(rows[:, :-1], inputs)
        assert np.array_equal(targets[targets != IGNORED], rows[:, 1:][targets != IGNORED])
        assert data.valid_tokens(step, 4) == (targets != IGNORED).sum()
    number = sum(data.valid_tokens(step, 1) for step in range(data.num_windows))
    assert number == data.streams[0].trained[1 : data.num_windows * 8 + 1].sum()


def test_an_evaluation_without_a_word_of_the_assistant_is_refused(tmp_path: Path) -> None:
    """It said that the loss is 0."""
    save_tokenizer(tmp_path)
    data = opened(tmp_path, [[{"role": "user", "content": "why? " * 40}, CHAT[2]]])
    assert data.valid_tokens(0, 1) == 0
    with pytest.raises(BadInput, match=r"the 1 samples that an evaluation .* nothing that the assistant says"):
        data.check_epoch(1)
    data.check_epoch(data.num_windows)


MARKED = """{% for m in messages %}
    {% if m.role == 'assistant' %}{% generation %}{% set said = m.content %}{{ said }}
{% endgeneration %}{% else %}{{ {'<é>': m.content} | tojson }}{{ m | tojson(indent=2) }}{{ said is defined }}{% endif %}{% endfor %}"""


def test_what_transformers_adds_to_jinja_is_there(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'hethub[test]'")
    save_tokenizer(tmp_path, MARKED)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ChatTemplate("tokenizer.json", tmp_path).render(CHAT, "here") == theirs.apply_chat_template(
        CHAT, tokenize=False
    )
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": MARKED}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate("tokenizer.json", tmp_path).text == MARKED


OF_MISTRAL = """{{ bos_token }}{% for m in messages %}{% if tools is not none and m.role == 'user' %}[AVAILABLE_TOOLS] [
{%- for tool in tools %}{{ tool }}{% endfor %}][/AVAILABLE_TOOLS]{% endif %}{{ m.content }}{{ pad_token }}{{ documents is none }}
{%- if sep_token is defined %}?{% endif %}{% endfor %}"""


def test_a_template_finds_what_transformers_gives_it(tmp_path: Path) -> None:
    """Templates as Mistral 7B v0.3's saw `tools` undefined, which is not none: every turn began with an empty list of them."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'hethub[test]'")
    save_tokenizer(tmp_path, OF_MISTRAL)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<|end|>"}))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = ChatTemplate("tokenizer.json", tmp_path).render(CHAT, "here")
    assert text == theirs.apply_chat_template(CHAT, tokenize=False)
    assert "TOOLS" not in text


def test_a_conversation_is_one_document_whatever_ends_its_turns(tmp_path: Path) -> None:
    """Mistral's and Llama 2's templates end every turn of the assistant with the end of document."""
    save_tokenizer(tmp_path, TEMPLATE.replace("<|end|>", "{{ eos_token }}"))
    data = opened(tmp_path, [CHAT, CHAT[1:3]], document_mask=True)
    kept = opened(tmp_path, [CHAT, CHAT[1:3]], document_mask=True, cache_dir=tmp_path / "cache")
    for (stream,) in (data.streams, kept.streams):
        assert (stream.tokens == stream.end_of_document).sum() > 6
        whole = replace(stream, seq_len=stream.num_tokens - 1)
        (found,) = whole.documents(np.array([0]), whole.rows(np.array([0]))[:, :-1])
        # The first conversation, as it is alone.
        first = opened(tmp_path, [CHAT]).num_tokens
        assert found.tolist() == [0] * first + [1] * (len(found) - first)


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ([], r"got \[\] for `turns`.*under the key `turns`"),
        ([{"role": "user"}], r"message 1 is \{'role': 'user'\}.*under the key `turns`"),
        ("hello", "got 'hello' for `turns`"),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate"),
    ],
)
def test_a_broken_conversation_is_named(tmp_path: Path, chat: Any, words: str) -> None:
    save_tokenizer(tmp_path)
    with pytest.raises(BadInput, match=f"chats.jsonl, line 2: .*({words})"):
        opened(tmp_path, [CHAT, chat], text="turns")


def test_conversations_without_a_turn_of_the_assistant_are_refused(tmp_path: Path) -> None:
    """As where the answers have another role: nothing would be learnt, and every loss be 0."""
    save_tokenizer(tmp_path)
    renamed = [{**message, "role": "gpt" if message["role"] == "assistant" else message["role"]} for message in CHAT]
    with pytest.raises(BadInput, match=r"chats\.jsonl: no message in it has the role `assistant`"):
        opened(tmp_path, [renamed, renamed])
    assert opened(tmp_path, [renamed, CHAT]).valid_tokens(0, 8)


def test_a_first_token_alone_is_nothing_to_learn() -> None:
    """No window predicts it."""
    given = {"name": "chats", "tokens": np.arange(9), "seq_len": 4, "seed": 1, "vocab": 9, "max_token": 8}
    rest = {"end_of_document": None, "tokenizer": "none"}
    for learnt, total in ((0, None), (1, 1), (8, 1)):
        trained = (np.arange(9) == learnt).astype(np.uint8)
        if total is None:
            with pytest.raises(BadInput, match="nothing to learn"):
                Dataset.one(**given, **rest, trained=trained)
        else:
            assert Dataset.one(**given, **rest, trained=trained).valid_tokens(0, 2) == total


def test_a_template_that_does_not_do_is_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=None)
    with pytest.raises(BadInput, match=r"needs a chat template, and the tokenizer tokenizer\.json has none"):
        opened(tmp_path, [CHAT])
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ["no", {"name": "tool_use"}]}')
    with pytest.raises(BadInput, match=r"needs a chat template, and the tokenizer tokenizer\.json has none"):
        opened(tmp_path, [CHAT])
    for template, words in {
        "{% for %}": "cannot be read",
        "{{ raise_exception('no system') }}": r"line 1: .*cannot render this conversation \(no system\)",
        "{{ messages | length }}": "writes the assistant's turn 3 otherwise",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}": "cannot render",
    }.items():
        save_tokenizer(tmp_path, template)
        with pytest.raises(BadInput, match=words):
            opened(tmp_path, [CHAT])


def test_bytes_have_no_template(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("{}")
    with pytest.raises(BadInput, match="the tokenizer bytes has none"):
        open_dataset(DataSpec(source="chat", path="chats.jsonl"), tmp_path, seq_len=8, seed=1, vocab=257)
