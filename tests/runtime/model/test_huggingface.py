"""Hugging Face folders: what transformers writes we read, what we write transformers loads; damage is named."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hethub.runtime.model.huggingface import INDEX_FILE, SINGLE_FILE, open_weights, write_folder
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.hugging_face import config_of, from_hugging_face
from hethub.spec.layout.tensors import EMBEDDING, FINAL_NORM, HEAD, model_tensors
from hethub.spec.model import ModelSpec
from hethub.spec.ranges import Range, split
from tests.support.plain_llama import transformers
from tests.support.privileges import laid_down

LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500000.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 70000.0}},
    "wide heads": {"head_dim": 16, "num_key_value_heads": 1},
    "llama 3.1": {"rope_parameters": LLAMA_31, "num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
}


def tiny(**changes: Any) -> Any:
    config = transformers().LlamaConfig(
        **{
            "vocab_size": 48,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.05,
            "pad_token_id": None,
            **changes,
        }
    )
    torch.manual_seed(0)
    return transformers().LlamaForCausalLM(config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain model in one file."""
    tiny().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def all_tensors(folder: Path, model: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in Hugging Face's shape, read through `Weights`."""
    weights = open_weights(folder, model)
    for tensor in model_tensors(model):
        stored = weights.read(tensor, Range(0, tensor.numel)).view(tensor.stored_shape)
        yield tensor.name, stored.t() if tensor.split_dim == 1 else stored


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_transformers_read_equal(tmp_path: Path, kind: str, shard_size: str) -> None:
    reference = tiny(**KINDS[kind])
    reference.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX_FILE).exists() == (shard_size == "20KB")
    model = from_hugging_face(tmp_path)
    expected = dict(reference.named_parameters())
    assert_same(dict(all_tensors(tmp_path, model)), expected)
    assert sum(tensor.numel for tensor in model_tensors(model)) == model.parameters


def test_parts_are_runs_of_the_stored_tensor(folder: Path) -> None:
    model = from_hugging_face(folder)
    originals = load_file(folder / SINGLE_FILE)
    weights = open_weights(folder, model)
    for tensor in model_tensors(model):
        original = originals[tensor.name]
        flat = (original.t() if tensor.split_dim == 1 else original).flatten()
        for part in [*split(tensor.numel, 3), *split(tensor.numel, 7), Range(5, 5), Range(1, 2)]:
            read = weights.read(tensor, part)
            assert torch.equal(read, flat[slice(*part)]), (tensor.name, part)
            assert read.untyped_storage().nbytes() == read.nbytes, "nothing but the part is kept"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_written_folder_loads_back_equal(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    tiny(**KINDS[kind]).to(dtype).save_pretrained(tmp_path / "theirs")
    reference = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    model = from_hugging_face(tmp_path / "theirs")
    write_folder(tmp_path / "ours", model, all_tensors(tmp_path / "theirs", model), dtype, max_shard_bytes=20_000)
    assert from_hugging_face(tmp_path / "ours").replace(name="theirs") == model
    loaded, report = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == dtype
    assert_same(dict(loaded.named_parameters()), dict(reference.named_parameters()))
    tokens = torch.arange(40)[None]
    assert torch.equal(loaded(tokens).logits, reference(tokens).logits)
    assert loaded.config.rope_parameters == reference.config.rope_parameters


def test_a_config_of_either_generation_means_the_same(tmp_path: Path) -> None:
    """transformers 4.x reads rope_theta, rope_scaling and torch_dtype, 5.x rope_parameters and dtype."""
    reference = tiny(**KINDS["llama 3.1"])
    reference.save_pretrained(tmp_path / "theirs")
    model = from_hugging_face(tmp_path / "theirs")
    write_folder(tmp_path / "ours", model, all_tensors(tmp_path / "theirs", model), torch.bfloat16)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    for dropped in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        kept = {key: value for key, value in config.items() if key not in dropped}
        (tmp_path / "ours" / "config.json").write_text(json.dumps(kept))
        assert from_hugging_face(tmp_path / "ours").replace(name="theirs") == model
        assert transformers().LlamaConfig.from_pretrained(tmp_path / "ours").rope_parameters == LLAMA_31


@pytest.mark.parametrize("window", [7, None])
def test_a_mistral_is_a_llama_with_a_window(tmp_path: Path, window: int | None) -> None:
    transformers().MistralConfig(sliding_window=window, hidden_size=64, num_attention_heads=8).save_pretrained(tmp_path)
    model = from_hugging_face(tmp_path)
    assert model.sliding_window == window
    (tmp_path / "config.json").write_text(json.dumps(config_of(model, "float32")))
    assert from_hugging_face(tmp_path) == model
    loaded = transformers().AutoConfig.from_pretrained(tmp_path)
    assert (loaded.model_type, getattr(loaded, "sliding_window", None)) == ("mistral" if window else "llama", window)
    (tmp_path / "config.json").write_text(json.dumps({**config_of(model, "float32"), "model_type": "qwen2"}))
    with pytest.raises(BadInput, match="model_type is 'qwen2'; hethub implements 'llama' and 'mistral' only"):
        from_hugging_face(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("vocab_size", None, "config.json: vocab_size is missing"),
        ("num_hidden_layers", -1, "config.json: num_hidden_layers is -1"),
        ("model_type", ["llama"], r"model_type is \['llama'\]"),
        ("model_type", None, "model_type is nothing; hethub implements"),
        ("attention_bias", True, "attention_bias is true; hethub implements false only"),
    ],
)
def test_a_fault_of_a_config_is_told_by_its_own_key(folder: Path, key: str, value: Any, told: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(BadInput, match=told):
        from_hugging_face(folder)


def test_a_config_that_is_no_mapping_is_called_what_it_is(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    with pytest.raises(BadInput, match=r"config.json: a config is a mapping of keys to values; this holds a list\.$"):
        from_hugging_face(folder)


def test_a_window_left_out_is_the_one_of_transformers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    assert (
        from_hugging_face(folder).sliding_window == transformers().MistralConfig.from_pretrained(folder).sliding_window
    )


def test_an_epsilon_left_out_is_the_one_of_transformers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))
    assert from_hugging_face(folder).norm_eps == transformers().LlamaConfig.from_pretrained(folder).rms_norm_eps


def test_shards_keep_to_their_size(tmp_path: Path, folder: Path) -> None:
    model = from_hugging_face(folder)
    write_folder(tmp_path / "ours", model, all_tensors(folder, model), torch.float32, max_shard_bytes=12_000)
    index = json.loads((tmp_path / "ours" / INDEX_FILE).read_text())
    shards = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        assert shard.stat().st_mode == (tmp_path / "ours" / "config.json").stat().st_mode  # whoever reads one reads all
        tensors = load_file(shard)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 12_000
        assert {name for name, file in index["weight_map"].items() if file == shard.name} == tensors.keys()
        with safe_open(shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert index["metadata"]["total_size"] == 4 * model.parameters


def test_tokenizer_and_special_ids_come_along(tmp_path: Path, folder: Path) -> None:
    model = from_hugging_face(folder)
    (folder / "tokenizer.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, 8], "bos_token_id": 3}))

    def written(name: str, **arguments: Any) -> tuple[Any, bool]:
        write_folder(tmp_path / name, model, all_tensors(folder, model), torch.float32, **arguments)
        config = transformers().LlamaConfig.from_pretrained(tmp_path / name)
        return config, (tmp_path / name / "tokenizer.json").exists()

    config, copied = written("a", tokenizer_source=folder)
    assert (config.bos_token_id, config.eos_token_id, copied) == (3, [7, 8], True)
    config, copied = written("b", tokenizer_source=folder / "tokenizer.json", end_of_document=9)
    assert (config.bos_token_id, config.eos_token_id, copied) == (None, 9, True)
    config, copied = written("c")
    assert (config.bos_token_id, config.eos_token_id, copied) == (None, None, False)


def test_a_folder_in_use_is_not_overwritten_and_an_empty_one_is_filled(tmp_path: Path, folder: Path) -> None:
    model = from_hugging_face(folder)
    with pytest.raises(BadInput, match="is there already"):
        write_folder(folder, model, iter(()), torch.float32)
    with pytest.raises(BadInput, match="no such tokenizer"):
        write_folder(tmp_path / "new", model, iter(()), torch.float32, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", model, all_tensors(folder, model), torch.float32)
    assert (tmp_path / "empty" / SINGLE_FILE).exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, folder: Path) -> None:
    """It was called a failing disk, by an error number and a name that the user has not given."""
    model = from_hugging_face(folder)
    (tmp_path / "others").mkdir(mode=0o555)
    (tmp_path / "file").touch()
    with laid_down():
        for parent in ("others", "file"):
            with pytest.raises(BadInput, match=rf"{parent}/ours: this user cannot write there \("):
                write_folder(tmp_path / parent / "ours", model, all_tensors(folder, model), torch.float32)


def test_a_failed_export_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    model = from_hugging_face(folder)

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from list(all_tensors(folder, model))[:5]
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match="No space left on device"):
        write_folder(tmp_path / "ours", model, failing(), torch.float32, max_shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_an_export_must_give_every_tensor_once(tmp_path: Path, folder: Path) -> None:
    model = from_hugging_face(folder)
    tensors = list(all_tensors(folder, model))
    for wrong in (tensors[:-1], [*tensors, tensors[0]], [(tensors[0][0], tensors[0][1].t()), *tensors[1:]]):
        with pytest.raises(AssertionError, match=r"never given|doubled or misshaped"):
            write_folder(tmp_path / "ours", model, iter(wrong), torch.float32)
        assert not (tmp_path / "ours").exists()


def test_what_old_versions_store_besides_is_passed_over(folder: Path) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | inv_freq, folder / SINGLE_FILE)
    model = from_hugging_face(folder)
    assert_same(dict(all_tensors(folder, model)), tensors)
    tied = model.replace(tied_head=True)
    assert_same(dict(all_tensors(folder, tied)), {name: t for name, t in tensors.items() if name != HEAD})


def edited(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged or cut short"),
    "only a start": (lambda path: path.write_bytes(path.read_bytes()[:50]), "damaged or cut short"),
    "empty": (lambda path: path.write_bytes(b""), "damaged or cut short"),
    "noise": (lambda path: path.write_bytes(bytes(range(256)) * 8), "damaged or cut short"),
    "no norm": (edited(lambda t: t.pop(FINAL_NORM)), rf"the tensor {FINAL_NORM} is missing"),
    "no head": (edited(lambda t: t.pop(HEAD)), rf"{HEAD} is missing.*tie_word_embeddings"),
    "a bias": (edited(lambda t: t.update(bias=torch.ones(1))), "the tensor bias has no place"),
    "short": (edited(lambda t: t.update({EMBEDDING: torch.ones(47, 32)})), rf"{EMBEDDING} has the shape \[47, 32\]"),
    "integers": (edited(lambda t: t.update({FINAL_NORM: torch.ones(32, dtype=torch.int8)})), "is stored as I8"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_refused_by_name(folder: Path, damage: str) -> None:
    model = from_hugging_face(folder)
    apply, message = DAMAGES[damage]
    apply(folder / SINGLE_FILE)
    with pytest.raises(BadInput, match=rf"model\.safetensors: .*{message}"):
        open_weights(folder, model)


def test_damaged_shards_are_refused_by_name(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path, max_shard_size="20KB")
    model = from_hugging_face(tmp_path)
    first = min(tmp_path.glob("model-*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    with pytest.raises(BadInput, match=rf"{first.name}: .*cut short"):
        open_weights(tmp_path, model)
    first.unlink()
    with pytest.raises(BadInput, match=rf"{first.name}: the weights cannot be read"):
        open_weights(tmp_path, model)
    first.write_bytes(content)
    for broken in ("{", "{}", "[]", '{"weight_map": {"a": 3}}'):
        (tmp_path / INDEX_FILE).write_text(broken)
        with pytest.raises(BadInput, match=rf"{INDEX_FILE}: (is no|the) index"):
            open_weights(tmp_path, model)
    (tmp_path / INDEX_FILE).unlink()
    with pytest.raises(BadInput, match="holds neither"):
        open_weights(tmp_path, model)
