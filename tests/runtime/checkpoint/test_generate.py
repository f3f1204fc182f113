"""From a run to text: exported folders load with their tokenizer, and greedy text is transformers' own."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hethub.runtime.checkpoint.generate import _prompt_ids
from hethub.runtime.data.tokenizer import byte_tokenizer, load_tokenizer
from tests.runtime.data.test_sources import save_tokenizer, save_with_beginning
from tests.support.command import check_refused, one, ranks
from tests.support.job_files import ALONE, plan, write_job
from tests.support.plain_llama import transformers

CLUSTER = {"nodes": [{"name": "alone", "accelerator": "CPU-core", "accelerators": 1}]}
PROMPT = "line 7: 49"
END = 256


def trained(folder: Path, **job: Any) -> Path:
    """The run folder of a tiny job in one process."""
    train = {"steps": 3, "precision": "fp64", "lr": 0.01, "grad_clip": None}
    path = write_job(
        folder,
        cluster=CLUSTER,
        plan_file=plan(ALONE, precision="fp64"),
        train=train,
        checkpoint={"every_steps": None},
        **job,
    )
    ended = one(ranks(1, "train", path, "--run-dir", folder / "run", cwd=folder))
    assert ended.exit_code == 0, ended.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("generate"))


def exported(run: Path, to: Path) -> Any:
    ended = one(ranks(1, "export", run, "--to", to, cwd=to.parent))
    assert ended.exit_code == 0, ended.stderr
    model = transformers().LlamaForCausalLM.from_pretrained(to, dtype=torch.float64)
    return model, transformers().AutoTokenizer.from_pretrained(to)


def generated(run: Path, *options: Any, prompt: str = PROMPT) -> str:
    ended = one(ranks(1, "generate", run, prompt, *options, cwd=run.parent))
    assert ended.exit_code == 0, ended.stderr
    return ended.stdout.removesuffix("\n")


def test_greedy_text_is_that_of_the_exported_folder(run: Path, tmp_path: Path) -> None:
    model, tokenizer = exported(run, tmp_path / "hf")
    ids = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert ids[0].tolist() == list(PROMPT.encode())
    (theirs,) = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=END)
    assert generated(run, "--tokens", 40) == tokenizer.decode(theirs, skip_special_tokens=True)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id) == (END,) * 3


def test_a_prompt_begins_as_it_does_in_transformers(tmp_path: Path) -> None:
    save_with_beginning(tmp_path / "tokenizer.json")
    theirs = transformers().PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    model = SimpleNamespace(vocab=8, max_seq_len=8)
    trained: Any = SimpleNamespace(record=SimpleNamespace(model=model))
    ids = _prompt_ids("a b", load_tokenizer("tokenizer.json", tmp_path), trained, 1)
    assert ids == theirs("a b", padding=False)["input_ids"] == [3, 1, 2]


def test_what_is_drawn_follows_the_seed(run: Path) -> None:
    drawn = [generated(run, "--tokens", 30, "--temperature", 1.5, "--seed", seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_tokenizer_comes_with_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    save_tokenizer(tmp_path / "words" / "tokenizer.json")
    (tmp_path / "words" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    data = {"source": "text", "path": "words.txt", "tokenizer": "words/tokenizer.json"}
    (tmp_path / "words.txt").write_text("a b c a b " * 300)
    run = trained(tmp_path, data=data)
    _, tokenizer = exported(run, tmp_path / "hf")
    assert tokenizer("a b c", add_special_tokens=False, padding=False, truncation=False)["input_ids"][:2] == [1, 2]
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == {"eos_token_id": 7}
    assert set(generated(run, "--tokens", 3, prompt="a b").split()) <= {"a", "b", "c", "[UNK]"}
    (tmp_path / "words" / "tokenizer.json").unlink()
    check_refused(ranks(1, "generate", run, "a", cwd=tmp_path), "tokenizer.json: the tokenizer cannot be read")


def test_bytes_are_exported_as_a_tokenizer_of_every_byte() -> None:
    import tokenizers

    loaded, ours = tokenizers.Tokenizer.from_str(byte_tokenizer()), load_tokenizer("bytes", Path())
    for text in ("plain", " two  spaces\n\t", "é漢字🙂", "\x00\x7f"):
        ids = loaded.encode(text, add_special_tokens=False).ids
        assert ids == list(text.encode()) == ours.encode([text])[0].tolist()
        assert loaded.decode(ids) == ours.decode(ids) == text
    assert loaded.token_to_id("<|endoftext|>") == END


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["", "--tokens", 3], "the prompt is empty"),
        (["a" * 60, "--tokens", 30], "60 tokens; with --tokens 30 that is more than the 64"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(run: Path, options: list[Any], words: str) -> None:
    check_refused(ranks(1, "generate", run, *options, cwd=run.parent), words)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    check_refused(ranks(1, "generate", tmp_path, "a", cwd=tmp_path), "there is no run with checkpoints here")
