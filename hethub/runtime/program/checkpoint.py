"""Reads the checkpoints of programs: they hold every rank's pieces as parts of whole tensors, so any program reads them.

An entry is a whole tensor: `weights/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, and `torch.distributed.checkpoint.load`
reads it without hethub. Folders, markers and checksums are those of every other run.
"""

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hethub.runtime.checkpoint.dcp import Part
from hethub.runtime.checkpoint.index import METADATA
from hethub.runtime.checkpoint.record import RECORD
from hethub.spec.documents import read_json
from hethub.spec.errors import BadInput

_IN_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}  # fmt: skip


def read_record(path: Path) -> dict[str, Any]:
    """What was saved as record. Raises BadInput where the checkpoint is no program's."""
    record = read_json(path / RECORD, "record of the checkpoint")
    if not isinstance(record, dict) or record.get("strategy") != "hap":
        raise BadInput(
            f"{path}: this checkpoint is of a run without strategy 'hap'; resume it with the job's own plan."
        )
    return record


def load(path: Path, parts: Sequence[Part]) -> None:
    """Fills the parts from a checkpoint, each rank on its own. Raises BadInput where it lacks them."""
    reader = dcp.FileSystemReader(path)
    metadata = _read_metadata(path)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    by_key: dict[str, list[Part]] = {}
    for part in parts:
        by_key.setdefault(part.key, []).append(part)
    items = []
    for key, wanted in by_key.items():
        saved = metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != wanted[0].shape:
            raise BadInput(f"{path} holds no {key} of shape {wanted[0].shape}; resume with the model that was saved.")
        found = create_read_items_for_chunk_list(key, saved, [part.place for part in wanted])
        if sum(item.lengths.numel() for item in found) != sum(part.values.numel() for part in wanted):
            raise BadInput(f"{path}: elements of {key} are missing; use another checkpoint.")
        items += found
    reader.read_data(LoadPlan(items), _LoadPlanner(by_key)).wait()


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's index, which is a pickle: it may name nothing but the data classes that such an index is made of."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # where Python 3.13 alone says that paths are
        if name not in _IN_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint holds")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    """DCP's index of a checkpoint. Raises BadInput where it is none, or leads out of the folder."""
    try:
        with (path / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        places = [place.relative_path for place in metadata.storage_data.values()]
    except (pickle.UnpicklingError, OSError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise BadInput(
            f"{path / METADATA}: this is no index of a checkpoint: {error}. Use another checkpoint."
        ) from None
    for place in places:
        if not re.fullmatch(r"__\d+_\d+\.distcp", str(place)):
            raise BadInput(f"{path / METADATA}: {place!r} is no file of a checkpoint. Use another checkpoint.")
    return metadata


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Hands the reader the region of a part that a read fills; `dest_index.index` is the part's number."""

    def __init__(self, parts: dict[str, list[Part]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def resolve_tensor(self, read_item: Any) -> Tensor:
        values = self._parts[read_item.dest_index.fqn][read_item.dest_index.index].values
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dim, offset, length)
        return values

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        """The reader has filled it in place."""
