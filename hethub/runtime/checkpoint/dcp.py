"""Parts of tensors, written by torch.distributed.checkpoint (its published interfaces only).

Its import takes a second of processor time, so a run's start does without: the first save imports this file.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from hethub.runtime.checkpoint.index import INDEX
from hethub.spec.documents import write_whole


class Part(NamedTuple):
    """`values` lie at `offsets` in the entry `key` of `shape`."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor

    @property
    def place(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.values.size())


def write(folder: Path, parts: Sequence[Part], group: dist.ProcessGroup, *, indexed: bool) -> None:
    """Writes every rank's parts to `folder`, a file per rank, synced to disk; where `indexed` also an index of ours, which
    knows one-dimensional entries only. All ranks of `group` call it.

    Raises CheckpointException on all ranks where one cannot write, or where the parts of all ranks together do not
    hold every element of every entry exactly once.
    """
    # Nothing is copied ahead: a plan's parts are in host memory, and the loader for that would open a device context.
    writer = (_IndexedWriter if indexed else _Writer)(folder, per_thread_copy_ahead=0)
    dcp.save({}, storage_writer=writer, planner=_SavePlanner(parts), process_group=group)


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, which says what the system refused."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write as DCP does, but raise the OSError that says what the system refused: the end of torch.save would hide it."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            refused = error.__context__
            raise (refused if isinstance(refused, OSError) else error) from None


class _IndexedWriter(_Writer):
    """A writer that on the coordinator leaves the index too."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        places = {written.index: written.storage_data for of_rank in results for written in of_rank}
        entries = {key: _described(key, saved, places) for key, saved in metadata.state_dict_metadata.items()}
        write_whole(Path(self.path) / INDEX, json.dumps({"version": 1, "entries": entries}))


def _described(key: str, saved: object, places: dict[MetadataIndex, Any]) -> dict[str, Any]:
    assert isinstance(saved, TensorStorageMetadata)
    chunks = []
    for chunk in sorted(saved.chunks, key=lambda chunk: chunk.offsets):
        place = places[MetadataIndex(key, chunk.offsets)]
        chunks.append([chunk.offsets[0], chunk.sizes[0], place.relative_path, place.offset, place.length])
    return {"dtype": str(saved.properties.dtype).removeprefix("torch."), "numel": saved.size.numel(), "chunks": chunks}


class _SavePlanner(dcp.DefaultSavePlanner):
    """Saves parts as they are; the default planner then checks that they hold every element once."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {MetadataIndex(part.key, torch.Size(part.offsets)): part for part in parts}
        assert len(self._parts) == len(parts), "two parts of this rank start at the same element"

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
