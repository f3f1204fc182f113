"""A Hugging Face Llama's config.json and our model's shape, each from the other by one table of keys."""

from pathlib import Path
from typing import Any

from hethub.spec.base import build, describe, form_of
from hethub.spec.documents import KeyPath, Source, read_json
from hethub.spec.errors import BadInput
from hethub.spec.model import ModelSpec

# Our key of the shape: theirs.
_SHAPE = {
    "vocab": "vocab_size", "hidden": "hidden_size", "ffn": "intermediate_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "max_seq_len": "max_position_embeddings", "init_std": "initializer_range", "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}  # fmt: skip
_ROPE = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}  # fmt: skip
# A Mistral is a Llama whose attention may see a window of the last tokens.
_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
# The only values that hethub implements: others are refused, and these are written.
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_DEFAULT_NORM_EPS, _DEFAULT_WINDOW = 1e-6, 4096  # what transformers takes where the config says nothing


def from_hugging_face(folder: Path) -> ModelSpec:
    """The shape that a Hugging Face Llama folder's config.json describes. Raises BadInput."""
    path, shape = _read_shape(folder)
    return build(ModelSpec, shape, _Config(str(path)), "Hugging Face config")


class _Config(Source):
    """Names the keys as the config does."""

    def at(self, path: KeyPath) -> str:
        return super().at(tuple((_SHAPE | _ROPE).get(str(key), key) for key in path))


def _read_shape(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder's config.json, of transformers 4.x or 5.x, and the keys of our model file that it stands for.

    Raises BadInput where the folder is none, or the model uses what hethub does not implement.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(
            f"{path}: there is no such file. `hf:` wants a folder as `save_pretrained` writes it; where it has moved, name its new "
            "place, also to resume a run."
        )
    config = read_json(path, "Hugging Face config")
    if not isinstance(config, dict):
        raise BadInput(f"{path}: a config is a mapping of keys to values; this holds {form_of(config)}.")
    _refuse_unimplemented(config, path)
    window = config.get("sliding_window", _DEFAULT_WINDOW) if config.get("model_type") == "mistral" else None
    rope = {**_mapping(config, "rope_scaling", path), **_mapping(config, "rope_parameters", path)}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return path, {
        "name": folder.resolve().name,
        "norm_eps": _DEFAULT_NORM_EPS,
        **{ours: config[theirs] for ours, theirs in _SHAPE.items() if config.get(theirs) is not None},
        **({"rope_theta": theta} if theta is not None else {}),
        "rope_scaling": _read_rope_scaling(rope, path),
        **({"sliding_window": window} if window is not None else {}),
    }


def end_tokens(folder: Path) -> set[int]:
    """The tokens that end a text, as generation_config.json or else config.json name them; empty where none does."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            content = read_json(folder / name, "Hugging Face config")
            found = content.get("eos_token_id") if isinstance(content, dict) else None
            if found is not None:
                return {token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)}
    return set()


def _mapping(config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise BadInput(f"{path}: {key} is {describe(found)}, but it is a mapping or null.")
    return found


def _refuse_unimplemented(config: dict[str, Any], path: Path) -> None:
    model_type = config.get("model_type", "llama")
    if model_type not in [*_CLASSES]:  # a file may give a list, which has no hash
        raise BadInput(
            f"{path}: model_type is {describe(model_type)}; hethub implements {' and '.join(map(repr, _CLASSES))} only. Choose a model "
            "of one of them."
        )
    for key, value in _ONLY.items():
        if config.get(key, value) != value:
            raise BadInput(
                f"{path}: {key} is {describe(config[key])}; hethub implements {describe(value)} only. Choose a model with that value."
            )
    if config.get("attention_dropout", 0.0):
        raise BadInput(
            f"{path}: attention_dropout is {config['attention_dropout']}; only 0 gives every plan the same loss. Set it to 0."
        )


def _read_rope_scaling(rope: dict[str, Any], path: Path) -> dict[str, Any] | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise BadInput(f"{path}: rope_type '{rope_type}' is not implemented; known: default, llama3.")
    return {ours: rope[theirs] for ours, theirs in _ROPE.items() if theirs in rope}


def config_of(model: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json of the model, in the keys of transformers 5.x and, beside them, those of 4.x."""
    assert model.family == "llama", model.family
    resolved = {"kv_heads": model.num_kv_heads, "head_dim": model.head_size}
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling is not None:
        scaling = model.rope_scaling.model_dump()
        rope = {"rope_type": scaling["type"], **{theirs: scaling[ours] for ours, theirs in _ROPE.items()}}
    model_type = "llama" if model.sliding_window is None else "mistral"
    return {
        "model_type": model_type,
        "architectures": [_CLASSES[model_type]],
        **({} if model.sliding_window is None else {"sliding_window": model.sliding_window}),
        **_ONLY,
        **{theirs: resolved.get(ours, getattr(model, ours)) for ours, theirs in _SHAPE.items()},
        "attention_dropout": 0.0,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling is None else rope,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }
