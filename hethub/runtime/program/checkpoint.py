"""Checkpoints of a program's state: every rank's pieces as parts of whole tensors, so that any program reads them.

An entry is a whole tensor: `weights/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, and `torch.distributed.checkpoint.load`
reads it without hethub. Folders, markers and checksums are those of every other run.
"""

import json
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hethub.communicator import World
from hethub.runtime.checkpoint import integrity
from hethub.runtime.checkpoint.dcp import Writer
from hethub.runtime.checkpoint.index import METADATA
from hethub.runtime.checkpoint.manager import CheckpointFolder, Marks
from hethub.runtime.checkpoint.record import RECORD
from hethub.spec.documents import read_json, write_whole
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


class Part(NamedTuple):
    """`values` lie at `offsets` in the entry `key` of `shape`."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor

    @property
    def place(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.values.size())


class ProgramCheckpoints(CheckpointFolder):
    """The checkpoints of a program's run."""

    def __init__(self, folder: Path, keep: int, world: World, *, keep_every: int | None = None) -> None:
        super().__init__(folder, keep, world, keep_every=keep_every, is_indexed=False)

    def save(self, step: int, parts: Sequence[Part], record: dict[str, Any]) -> None:
        """Writes every rank's parts and `record`, complete on return. Raises RunFailed on all ranks where one cannot."""
        self.write_folder(
            step, lambda partial: self._write(partial, parts), lambda partial: self._finish(partial, record)
        )

    def _write(self, partial: Path, parts: Sequence[Part]) -> None:
        writer = Writer(partial, per_thread_copy_ahead=0)
        dcp.save({}, storage_writer=writer, planner=_SavePlanner(parts), process_group=self._group)

    def _finish(self, partial: Path, record: dict[str, Any]) -> Marks:
        names = [path.name for path in partial.glob(f"__{self._world.rank}_*")]
        if self._world.rank == 0:
            write_whole(partial / RECORD, json.dumps(record, indent=1))
            names += [METADATA, RECORD]
        return integrity.checksums(partial, names)

    def latest(self, step: int | None = None) -> Path:
        """The newest whole checkpoint, or that of `step`, the same on all ranks. Raises BadInput where there is none."""
        found = super().latest(step)
        if found is None:
            raise BadInput(
                f"{self.folder}: there is no complete checkpoint to resume from; start the job anew without --resume."
            )
        return found


def read_record(path: Path) -> dict[str, Any]:
    """What `save` got as record. Raises BadInput where the checkpoint is no program's."""
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


class _SavePlanner(dcp.DefaultSavePlanner):
    """Saves parts as they are; the default planner then checks that they hold every element once."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {MetadataIndex(part.key, torch.Size(part.offsets)): part for part in parts}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(list(self._items()))
        return self.plan

    def _items(self) -> Iterator[WriteItem]:
        for index, part in self._parts.items():
            properties = TensorProperties(dtype=part.values.dtype)
            data = TensorWriteData(chunk=part.place, properties=properties, size=torch.Size(part.shape))
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._parts[write_item.index].values.detach().cpu()


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
