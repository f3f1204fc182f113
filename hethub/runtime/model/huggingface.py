"""Hugging Face Llama folders: reading just the slices a rank holds, and writing folders that transformers loads."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hethub.spec.documents import read_json, unfinished_of
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.hugging_face import config_of
from hethub.spec.layout.tensors import HEAD, TensorInfo, model_tensors
from hethub.spec.model import ModelSpec
from hethub.spec.ranges import Range

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000

_FLOAT_TYPES = ("F64", "F32", "BF16", "F16")  # as safetensors spells them
_COPIED_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


class Weights:
    """Weights on disk, every tensor checked against the model; their files are closed when this object dies."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files  # by tensor name, the open file that holds it

    def read(self, tensor: TensorInfo, part: Range) -> Tensor:
        """The run `part` of the flattened stored tensor, (part.size,), on the CPU, in the file's dtype.

        Stored means cut dimension first (see TensorInfo). Only the rows or columns that `part` touches are read.
        """
        stored = self._files[tensor.name].get_slice(tensor.name)
        if len(tensor.shape) == 1:
            return stored[part.start : part.stop].clone()
        width = tensor.stored_shape[1]
        first, last = part.start // width, -(-part.stop // width)
        rows = stored[:, first:last].t() if tensor.split_dim == 1 else stored[first:last]
        # Slices are views of the mapped file: the copy keeps neither the file nor the rest of the tensor alive.
        return rows.flatten()[part.start - first * width : part.stop - first * width].clone()


def open_weights(folder: Path, model: ModelSpec) -> Weights:
    """The weights of `model` in the folder's safetensors, one file or indexed shards; reads headers only.

    Raises BadInput naming file and tensor where a file is missing or damaged, or a tensor is missing, of another shape,
    of no floating-point type, or unknown to the model, which would then compute something else than the folder means.
    """
    listing, paths = _weight_files(folder)
    opened = {path: _open(path) for path in paths}
    path_of = {name: path for path, file in opened.items() for name in file.keys()}  # noqa: SIM118  safe_open is no mapping
    tensors = model_tensors(model)
    for tensor in tensors:
        if tensor.name not in path_of:
            raise BadInput(_missing(tensor.name, listing))
        _check(tensor, opened[path_of[tensor.name]], path_of[tensor.name])
    for name in sorted(path_of.keys() - {tensor.name for tensor in tensors}):
        if not _is_redundant(name, model):
            raise BadInput(
                f"{path_of[name]}: the tensor {name} has no place in the model that config.json describes, so training "
                "would start from another model. Choose a plain Llama folder whose config.json fits its weights."
            )
    return Weights({name: opened[path] for name, path in path_of.items()})


def _weight_files(folder: Path) -> tuple[Path, list[Path]]:
    """The file that says where tensors are, and the files that hold them."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return single, [single]
    if not index.is_file():
        raise BadInput(
            f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}. hethub reads safetensors as `save_pretrained` writes "
            "them; load an older pytorch_model.bin in transformers once and save it again."
        )
    data = read_json(index, "index of safetensors shards")
    names = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise BadInput(f"{index}: is no index of safetensors shards (JSON with a weight_map). Copy it again.")
    if strange := [name for name in names.values() if Path(name).name != name or Path(name).suffix != ".safetensors"]:
        raise BadInput(f"{index}: the shard {strange[0]!r} is no name of a safetensors file beside it. Copy it again.")
    return index, [folder / name for name in sorted(set(names.values()))]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise BadInput(f"{path}: the weights cannot be read ({error}). Copy the file again.") from None
    except SafetensorError as error:
        raise BadInput(f"{path}: the safetensors file is damaged or cut short ({error}). Copy it again.") from None


def _missing(name: str, listing: Path) -> str:
    remedy = "Copy the folder again, or correct config.json"
    if name == HEAD:
        remedy += " (tie_word_embeddings: true where the head is the embedding)"
    return f"{listing}: the tensor {name} is missing. {remedy}."


def _check(tensor: TensorInfo, file: Any, path: Path) -> None:
    stored = file.get_slice(tensor.name)
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if shape != tensor.shape:
        raise BadInput(
            f"{path}: the tensor {tensor.name} has the shape {list(shape)}, but config.json makes it {list(tensor.shape)}. "
            "Take weights and config.json from the same model."
        )
    if dtype not in _FLOAT_TYPES:
        raise BadInput(
            f"{path}: the tensor {tensor.name} is stored as {dtype}; hethub trains from {', '.join(_FLOAT_TYPES)}. "
            "Choose weights that are not quantised."
        )


def _is_redundant(name: str, model: ModelSpec) -> bool:
    """Whether a tensor repeats what the model knows anyway: RoPE tables of old versions, the copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (name == HEAD and model.tied_head)


def write_folder(
    folder: Path,
    model: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    tokenizer_source: Path | str | None = None,
    *,
    end_of_document: int | None = None,
    bos: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a folder that transformers loads: config.json, safetensors shards, the tokenizer's files.

    `tensors` yields every tensor of the model once, in any order, in Hugging Face's shape; at most one shard of them
    is held. `tokenizer_source` is a tokenizer.json, the text of one, or a Hugging Face folder, whose special token ids
    are kept too; else `end_of_document` becomes eos_token_id. Without `bos` it is written so that it puts nothing in front of
    a text. What lies beside a tokenizer.json (its config, chat
    template, how to generate) comes with it, and is written where it does not. `folder` appears complete or not at
    all. Raises BadInput where it already holds something, cannot be made or the tokenizer is missing, RunFailed where the
    disk fails.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder}: is there already; name a new or an empty folder to write to.")
    if isinstance(tokenizer_source, Path) and not tokenizer_source.exists():
        raise BadInput(
            f"{tokenizer_source}: there is no such tokenizer.json or Hugging Face folder to take it from. Put it back; or name it "
            "where it is now, in the run's job.yaml."
        )
    with _appearing(folder) as temporary:
        ids = _token_ids(tokenizer_source, end_of_document)
        config = config_of(model, str(dtype).removeprefix("torch.")) | ids
        _write_json(temporary / "config.json", config)
        _write_tokenizer(tokenizer_source, temporary, ids)
        if not bos:
            _take_off_beginning(temporary)
        _write_weights(temporary, model, tensors, dtype, max_shard_bytes)


def _token_ids(source: Path | str | None, end_of_document: int | None) -> dict[str, Any]:
    """bos, eos and pad; named even where there are none, since transformers would take 1 and 2."""
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": end_of_document, "pad_token_id": None}
    if isinstance(source, Path) and (source / "config.json").is_file():
        config = read_json(source / "config.json", "Hugging Face config")
        ids = {key: config.get(key) for key in ids}
    return ids


def _write_tokenizer(source: Path | str | None, folder: Path, ids: dict[str, Any]) -> None:
    """The tokenizer with what belongs to it, and the file that `generate` of transformers looks into."""
    tokenizer = folder / "tokenizer.json"
    if isinstance(source, str):
        tokenizer.write_text(source, encoding="utf-8")
    elif source is not None:
        beside = source if source.is_dir() else source.parent
        for name in _COPIED_FILES:
            if (beside / name).is_file():
                shutil.copyfile(beside / name, folder / name)
        if source.is_file():
            shutil.copyfile(source, tokenizer)  # whatever its name is
    given = {key: value for key, value in ids.items() if value is not None}
    _write_unless_there(folder / "generation_config.json", given)
    if tokenizer.is_file():
        known = {added["id"]: added["content"] for added in _added_tokens(tokenizer)}
        names = {
            key.removesuffix("_id"): known[value]
            for key, value in given.items()
            if isinstance(value, int) and value in known
        }
        _write_unless_there(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def _take_off_beginning(folder: Path) -> None:
    """Stop the tokenizer, and transformers' reading of its config, from putting a beginning-of-text token in front."""
    if (tokenizer := folder / "tokenizer.json").is_file():
        _write_json(tokenizer, _without_beginning(read_json(tokenizer, "tokenizer")))
        config = folder / "tokenizer_config.json"
        _write_json(config, {**read_json(config, "tokenizer's config"), "add_bos_token": False})


def _without_beginning(content: dict[str, Any]) -> dict[str, Any]:
    """What a tokenizer.json holds, but that it puts nothing in front of a text: what trains under `bos: false`."""

    def bare(processor: Any) -> Any:
        if not isinstance(processor, dict):
            return processor
        found = {**processor, "processors": [bare(each) for each in processor.get("processors") or []]}
        for kind in ("single", "pair"):
            found[kind] = [*dropwhile(lambda piece: "SpecialToken" in piece, processor.get(kind) or [])]
        return {key: value for key, value in found.items() if key in processor}

    return {**content, "post_processor": bare(content.get("post_processor"))}


def _added_tokens(tokenizer: Path) -> list[dict[str, Any]]:
    content = read_json(tokenizer, "tokenizer")
    return content.get("added_tokens") or [] if isinstance(content, dict) else []


def _write_unless_there(path: Path, content: dict[str, Any]) -> None:
    if not path.exists():
        _write_json(path, content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path, model: ModelSpec, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_shard_bytes: int
) -> None:
    shards: list[list[str]] = []
    total_bytes = 0
    for shard in _shards(_checked(tensors, model), dtype, max_shard_bytes):
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        shards.append(list(shard))
        file = folder / f"{len(shards)}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", file)  # safetensors 0.8 lets nobody else read what it writes
    if len(shards) == 1:
        (folder / "1.safetensors").rename(folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / INDEX_FILE, index)


def _checked(tensors: Iterable[tuple[str, Tensor]], model: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(model)}
    for name, tensor in tensors:
        assert shapes.pop(name, None) == tensor.shape, f"{name} {list(tensor.shape)} is unknown, doubled or misshaped"
        yield name, tensor
    assert not shapes, f"never given: {', '.join(shapes)}"


def _shards(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """The tensors, converted, in groups of at most `max_shard_bytes` (a larger tensor has a group of its own)."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        # A copy in any case: safetensors refuses tensors that share memory, as views of one flat buffer do.
        converted = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if shard and size + converted.nbytes > max_shard_bytes:
            yield shard
            shard.clear()  # frees it even while the caller's name for it lives
            size = 0
        shard[name] = converted
        size += converted.nbytes
    yield shard


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well and vanishes otherwise."""
    temporary = unfinished_of(folder)
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise BadInput(
                f"{folder}: this user cannot write there ({error.strerror}). Allow it or name another folder."
            ) from None
        yield temporary
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        raise RunFailed(
            f"{folder}: writing the Hugging Face folder failed ({error}); nothing is left behind."
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
