"""From a run to text: exported folders load with their tokenizer, and greedy text is transformers' own."""

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from hethub.cli import run as command
from hethub.kernels.bodies import choose
from hethub.runtime.checkpoint import export as module
from hethub.runtime.checkpoint import integrity
from hethub.runtime.checkpoint.export import export, with_newest
from hethub.runtime.checkpoint.generate import Generator, _prompt_ids, generate
from hethub.runtime.checkpoint.index import _Window
from hethub.runtime.data.tokenise import tokenise
from hethub.runtime.data.tokenizer import byte_tokenizer, load_tokenizer
from hethub.runtime.model import huggingface
from hethub.runtime.model.layers import KeyValues
from hethub.spec.errors import BadInput
from tests.cli.test_hugging_face import folder_of
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
        checkpoint={"every_steps": 2},
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


def test_every_token_stands_where_it_does_in_the_exported_folder(run: Path, tmp_path: Path) -> None:
    """Greedy text of a model this small says little of places: it is the same wherever its tokens stand."""
    model, _ = exported(run, tmp_path / "hf")
    ids = [(7 * place) % 256 for place in range(20)]
    theirs = model(torch.tensor([ids])).logits[0]
    generator, past = with_newest(run, lambda trained: Generator(trained, torch.device("cpu"))), KeyValues()
    ours = [generator.logits(ids[:12], 0, past), *(generator.logits([ids[n]], n, past) for n in range(12, 20))]
    torch.testing.assert_close(torch.stack(ours), theirs[11:])


def test_text_is_drawn_from_behind_all_that_went_before(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[tuple[int, int]] = []
    logits = Generator.logits

    def noted(self: Generator, ids: list[int], start: int, past: KeyValues) -> torch.Tensor:
        places.append((start, len(ids)))
        return logits(self, ids, start, past)

    monkeypatch.setattr(Generator, "logits", noted)
    assert "".join(generate(run, "abc", tokens=3, temperature=0.0, seed=1))
    assert places == [(0, 3), (3, 1), (4, 1)]


def test_text_waits_for_no_compiler(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would make programs for the length of every prompt, on a device."""
    made: list[Any] = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, tensors: made.append(graph) or graph)
    choose(True)
    try:
        assert "".join(generate(run, PROMPT, tokens=3, temperature=0.0, seed=1))
    finally:
        choose(None)
    assert not made


def test_a_prompt_begins_as_it_does_in_transformers(tmp_path: Path) -> None:
    save_with_beginning(tmp_path / "tokenizer.json")
    theirs = transformers().PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    model = SimpleNamespace(vocab=8, max_seq_len=8)
    trained: Any = SimpleNamespace(record=SimpleNamespace(model=model))
    ids = _prompt_ids("a b", load_tokenizer("tokenizer.json", tmp_path), trained, 1)
    assert ids == theirs("a b", padding=False)["input_ids"] == [3, 1, 2]


def test_a_prompt_begins_as_the_runs_documents_do(tmp_path: Path) -> None:
    """It began with the tokenizer's token also where `data.bos: false` had left it out of all that was trained on; then in
    the exported folder alone."""
    save_with_beginning(tmp_path / "tokenizer.json")
    (tmp_path / "words.txt").write_text("a b c a b " * 300)
    data = {"source": "text", "path": "words.txt", "tokenizer": "tokenizer.json", "bos": False}
    run = trained(tmp_path, data=data)
    check_refused(ranks(1, "generate", run, "", cwd=tmp_path), "the prompt is empty")
    _, theirs = exported(run, tmp_path / "hf")
    assert theirs("a b")["input_ids"] == [1, 2]


def test_a_prompt_may_fill_what_the_model_takes(run: Path) -> None:
    assert generated(run, "--tokens", 4, prompt="a" * 60).startswith("a" * 60)
    check_refused(ranks(1, "generate", run, "a" * 61, "--tokens", 4, cwd=run.parent), "more than the 64")


@pytest.mark.parametrize(("vocab", "is_known"), [(3, False), (4, True)])
def test_a_prompt_knows_the_models_tokens_alone(vocab: int, *, is_known: bool, tmp_path: Path) -> None:
    save_with_beginning(tmp_path / "tokenizer.json")
    trained: Any = SimpleNamespace(record=SimpleNamespace(model=SimpleNamespace(vocab=vocab, max_seq_len=8)))
    with nullcontext() if is_known else pytest.raises(BadInput, match=r"has token id 3, but .* ends at 3"):
        _prompt_ids("a b", load_tokenizer("tokenizer.json", tmp_path), trained, 1)


def test_what_is_drawn_follows_the_seed(run: Path) -> None:
    drawn = [generated(run, "--tokens", 30, "--temperature", 1.5, "--seed", seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    # The smallest temperature divided logits to infinities, which have no chances.
    assert generated(run, "--tokens", 3, "--temperature", 5e-324) == generated(run, "--tokens", 3)


def test_a_tokenizer_comes_with_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    save_tokenizer(tmp_path / "5ca1ab1e")  # as in Hugging Face's cache, whose folders hold links
    (tmp_path / "words" / "tokenizer.json").symlink_to("../5ca1ab1e")
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


def test_a_tokenizer_beside_a_folder_that_has_none_is_exported(tmp_path: Path) -> None:
    """Nothing was written of it, and nothing said: the folder was taken for its place."""
    folder_of(tmp_path / "tiny")
    save_tokenizer(tmp_path / "words.json")
    (tmp_path / "words.txt").write_text("a b c a b " * 300)
    data = {"source": "text", "path": "words.txt", "tokenizer": "words.json"}
    run = trained(tmp_path, data=data, model_name="hf:tiny")
    _, tokenizer = exported(run, tmp_path / "hf")
    assert tokenizer("a b", add_special_tokens=False, padding=False, truncation=False)["input_ids"] == [1, 2]


def test_an_export_says_that_nobody_named_the_tokenizer(tmp_path: Path) -> None:
    """The folder was written without one, and without a word."""
    save_tokenizer(tmp_path / "words.json")
    (tmp_path / "words.txt").write_text("a b c a b " * 300)
    tokenise([tmp_path / "words.txt"], str(tmp_path / "words.json"), tmp_path / "words.bin")
    run = trained(tmp_path, data={"source": "tokens", "path": "words.bin"})
    ended = one(ranks(1, "export", run, "--to", tmp_path / "hf", cwd=tmp_path))
    assert ended.exit_code == 0, ended.stderr
    assert "tokenizer it does not know, so none is written; set data.tokenizer in" in ended.stderr
    assert not (tmp_path / "hf" / "tokenizer.json").exists()


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
        (["a", "--seed", 10**30], "is not between 0 and 2**64"),
        (["a", "--seed", 3], "give a --temperature above 0"),  # it had no effect, without a word
        (["\udcff"], "the prompt is no UTF-8"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(run: Path, options: list[Any], words: str) -> None:
    check_refused(ranks(1, "generate", run, *options, cwd=run.parent), words)


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copied"))


@pytest.mark.parametrize("says", ["the data's tokenizer", "the folder that training started from"])
def test_text_ends_where_transformers_ends_it(copied: Path, tmp_path: Path, says: str) -> None:
    export(copied, tmp_path / "hf")
    model = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    ids, options = torch.tensor([list(PROMPT.encode())]), {"do_sample": False, "pad_token_id": END}
    (on,) = model.generate(ids, max_new_tokens=40, **options)
    end = int(on[len(PROMPT) + 9])
    (ended,) = model.generate(ids, max_new_tokens=40, eos_token_id=end, **options)
    assert ended[-1] == end
    assert len(ended) < len(on)
    if says == "the data's tokenizer":
        newest = copied / "checkpoints" / "step-3"
        record = json.loads((newest / "record.json").read_text())
        (newest / "record.json").write_text(json.dumps(record | {"end_of_document": end}))
        sign(newest)
    else:
        (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, end]}))
        job = yaml.safe_load((copied / "job.yaml").read_text())
        (copied / "job.yaml").write_text(yaml.safe_dump({**job, "model": f"hf:{tmp_path / 'hf'}"}))
    text = "".join(generate(copied, PROMPT, tokens=40, temperature=0.0, seed=1))
    assert text == bytes(ended[len(PROMPT) : -1].tolist()).decode(errors="replace")


def test_an_older_checkpoint_can_be_named(copied: Path, tmp_path: Path) -> None:
    checkpoints = copied / "checkpoints"
    assert export(checkpoints / "step-2", tmp_path / "two").startswith("step 2 of")
    assert export(copied, tmp_path / "three").startswith("step 3 of")
    with pytest.raises(BadInput, match=r"step-7: there is no such checkpoint; there are step-3, step-2\."):
        export(checkpoints / "step-7", tmp_path / "seven")


def test_only_what_is_read_is_checked_and_only_once(copied: Path, tmp_path: Path, monkeypatch: Any) -> None:
    digested, read = [], []
    digest, window = integrity._digest, _Window.read

    def reading(self: Any, size: int = -1) -> bytes:
        content = window(self, size)
        read.append(len(content))
        return content

    monkeypatch.setattr(integrity, "_digest", lambda path: digested.append(path.name) or digest(path))
    monkeypatch.setattr(_Window, "read", reading)
    newest = copied / "checkpoints" / "step-3"
    data = (newest / "__0_0.distcp").stat().st_size
    assert integrity.faults(newest) == []
    assert sum(read) < 0.1 * data  # the elements are in the file's checksum
    digested.clear()
    read.clear()
    export(copied, tmp_path / "hf")
    assert sorted(digested) == ["index.json", "record.json"]
    assert sum(read) < 0.4 * data  # a third of it is weights


def test_damage_and_a_removal_are_met_while_reading(
    copied: Path, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    newest = copied / "checkpoints" / "step-3"
    entry = json.loads((newest / "index.json").read_text())["entries"]["weights/model.norm.weight"]
    _, _, name, start, num_bytes = entry["chunks"][0]
    content = bytearray((newest / name).read_bytes())
    where = content.index(b"FB", start)  # the padding of the part that holds the elements
    content[where + num_bytes // 2 - (where - start)] ^= 1
    (newest / name).write_bytes(content)
    assert export(copied, tmp_path / "two").startswith("step 2 of")
    assert "step-3: file __0_0.distcp holds no" in caplog.text
    weights = module.iterate_weights

    def removed(path: Path, model: Any) -> Any:
        for number, each in enumerate(weights(path, model)):
            if number == 3 and path.name == "step-2":
                newest.rename(newest.with_name("step-4"))  # of which training writes more
                integrity.remove(path)
            yield each

    monkeypatch.setattr(module, "iterate_weights", removed)
    with pytest.raises(BadInput, match=r"step-2: removed while it was read. .*step-4: "):
        export(copied, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_that_training_is_removing_is_not_called_an_earlier_versions(
    copied: Path, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    weights = module.iterate_weights

    def half_removed(path: Path, model: Any) -> Any:
        if path.name == "step-3":
            (path / integrity.MARKER).rename(path / f"{integrity.MARKER}.removed")
            (path / "index.json").unlink()
        return weights(path, model)

    monkeypatch.setattr(module, "iterate_weights", half_removed)
    assert export(copied, tmp_path / "two").startswith("step 2 of")
    assert "step-3: removed while it was read." in caplog.text


def test_checkpoints_of_programs_and_of_newer_versions_are_refused(copied: Path, tmp_path: Path) -> None:
    newest = copied / "checkpoints" / "step-3"
    record = json.loads((newest / "record.json").read_text())
    (newest / "record.json").write_text(json.dumps(record | {"later": 1}))
    sign(newest)
    with pytest.raises(
        BadInput, match=r"step-3: its checksums fit.*later is not a known key.*Use the version that wrote it"
    ):
        export(copied, tmp_path / "hf")
    (newest / "index.json").unlink()
    sign(newest)
    with pytest.raises(BadInput, match=r"as a program's \(strategy hap\)"):
        export(copied, tmp_path / "hf")


def sign(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()} - {integrity.MARKER}
    (folder / integrity.MARKER).write_text(json.dumps({"files": integrity.checksums(folder, names)}))


def test_a_folder_may_be_the_current_one_or_a_link(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("there")
    export(run, tmp_path / "link")
    assert (tmp_path / "there" / "config.json").exists()
    monkeypatch.chdir(tmp_path / "here")
    export(run, Path())
    assert (tmp_path / "here" / "config.json").exists()


def test_the_text_that_was_trained_on_may_be_gone(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text " * 200)
    tokenise([tmp_path / "text.txt"], "bytes", tmp_path / "tokens.bin")
    run = trained(tmp_path, data={"source": "tokens", "path": "tokens.bin"})
    (tmp_path / "tokens.bin").unlink()
    _, tokenizer = exported(run, tmp_path / "hf")
    assert (tokenizer("ab")["input_ids"], tokenizer.eos_token_id) == ([97, 98], END)
    assert generated(run, "--tokens", 2).startswith(PROMPT)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    check_refused(ranks(1, "generate", tmp_path, "a", cwd=tmp_path), "there is no run with checkpoints here")


def test_an_end_that_is_asked_for_leaves_no_half_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended as soon as the folder is there, and behind its first file."""
    before = signal.getsignal(signal.SIGTERM)

    def ended(work: Any) -> Any:
        return lambda *given, **named: (work(*given, **named), os.kill(os.getpid(), signal.SIGTERM))

    try:
        for owner, name, work in ((Path, "mkdir", Path.mkdir), (huggingface, "save_file", huggingface.save_file)):
            monkeypatch.setattr(owner, name, ended(work))
            with pytest.raises(SystemExit, match="143"):
                command(["export", str(run), "--to", str(tmp_path / "hf")])
            monkeypatch.undo()
            assert list(tmp_path.iterdir()) == []
    finally:
        signal.signal(signal.SIGTERM, before)
