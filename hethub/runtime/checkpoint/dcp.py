"""Ranges of flat tensors, written by torch.distributed.checkpoint (its published interfaces only).

Its import takes a second of processor time, so a run's start does without: the first save imports this file.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

from hethub.runtime.checkpoint.elements import Chunk
from hethub.runtime.checkpoint.index import INDEX, METADATA
from hethub.spec.documents import write_whole


def write(folder: Path, chunks: Sequence[Chunk], group: dist.ProcessGroup) -> None:
    """Writes every rank's chunks to `folder`, one file per rank, synced to disk; all ranks of `group` call it.

    Raises CheckpointException on all ranks where one cannot write, or where the chunks of all ranks together do not
    hold every element of every entry exactly once.
    """
    # Nothing is copied ahead: the chunks are in host memory, and the loader for that would open a device context.
    writer = IndexedWriter(folder, per_thread_copy_ahead=0)
    dcp.save({}, storage_writer=writer, planner=_SavePlanner(chunks), process_group=group)


def own_files(folder: Path, rank: int) -> list[str]:
    """The names of what `write` wrote on this rank; the coordinator, rank 0, writes metadata and index too."""
    return [path.name for path in folder.glob(f"__{rank}_*")] + ([METADATA, INDEX] if rank == 0 else [])


class Writer(dcp.FileSystemWriter):
    """DCP's writer, which says what the system refused."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """As DCP's. Raises OSError with what the system refused, where torch.save's end would hide it."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            refused = error.__context__
            raise (refused if isinstance(refused, OSError) else error) from None


class IndexedWriter(Writer):
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
    """Saves chunks as they are; the default planner then checks that they hold every element once."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {_index(chunk): chunk for chunk in chunks}
        assert len(self._chunks) == len(chunks), "two chunks of this rank start at the same element"

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(index, chunk) for index, chunk in self._chunks.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._chunks[write_item.index].values


def _index(chunk: Chunk) -> MetadataIndex:
    return MetadataIndex(chunk.key, torch.Size([chunk.offset]))


def _place(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([chunk.offset]), chunk.values.size())


def _write_item(index: MetadataIndex, chunk: Chunk) -> WriteItem:
    properties = TensorProperties(dtype=chunk.values.dtype)
    data = TensorWriteData(chunk=_place(chunk), properties=properties, size=torch.Size([chunk.numel]))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
