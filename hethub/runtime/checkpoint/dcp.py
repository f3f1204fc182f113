"""torch.distributed.checkpoint with planners that speak of ranges of flat tensors; the published interfaces only."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hethub.runtime.checkpoint.elements import Chunk
from hethub.spec.errors import BadInput


def write(folder: Path, chunks: Sequence[Chunk], group: dist.ProcessGroup) -> None:
    """Writes every rank's chunks to `folder`, one file per rank, synced to disk; all ranks of `group` call it.

    Raises CheckpointException on all ranks where one cannot write, or where the chunks of all ranks together do not
    hold every element of every entry exactly once.
    """
    # Nothing is copied ahead: the chunks are in host memory, and the loader for that would open a device context.
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    dcp.save({}, storage_writer=writer, planner=_SavePlanner(chunks), process_group=group)


def own_files(folder: Path, rank: int) -> list[str]:
    """The names of what `write` wrote on this rank; the coordinator, rank 0, writes the metadata too."""
    return [path.name for path in folder.glob(f"__{rank}_*")] + ([".metadata"] if rank == 0 else [])


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


class Reader:
    """Reads any ranges of a checkpoint's entries, on its own: ranks need not read together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = dcp.FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def dtype(self, key: str) -> torch.dtype:
        """The type of an entry's elements."""
        return self._entry(key).properties.dtype

    def read(self, chunks: Iterable[Chunk]) -> None:
        """Fills the chunks' values in place, rounded where their type is narrower.

        Raises BadInput where the checkpoint lacks an entry or some of its elements, or has it in another size.
        """
        by_key: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            by_key.setdefault(chunk.key, []).append(chunk)
        items = [item for key, wanted in by_key.items() for item in self._read_items(key, wanted)]
        self._reader.read_data(LoadPlan(items), _LoadPlanner(by_key)).wait()

    def _read_items(self, key: str, wanted: list[Chunk]) -> list[ReadItem]:
        saved = self._entry(key)
        if any(chunk.numel != saved.size.numel() for chunk in wanted):
            raise BadInput(
                f"{self.folder}: {key} has {saved.size.numel()} elements, but the model here has {wanted[0].numel}; "
                "resume with the model that was saved."
            )
        items = create_read_items_for_chunk_list(key, saved, [_place(chunk) for chunk in wanted])
        if sum(item.lengths.numel() for item in items) != sum(chunk.values.numel() for chunk in wanted):
            raise BadInput(f"{self.folder}: elements of {key} are missing; use another checkpoint.")
        return items

    def _entry(self, key: str) -> TensorStorageMetadata:
        found = self._metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise BadInput(f"{self.folder} holds no {key}; resume with the model that was saved.")
        return found


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Hands the storage reader the part of a chunk that a read fills; `dest_index.index` is the chunk's number."""

    def __init__(self, chunks: dict[str, list[Chunk]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = chunks

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        number = read_item.dest_index.index
        assert number is not None
        values = self._chunks[read_item.dest_index.fqn][number].values
        return values[read_item.dest_offsets[0] :][: read_item.lengths[0]]
