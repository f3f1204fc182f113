"""Ranges of flat tensors, written by torch.distributed.checkpoint (its published interfaces only), read by our index."""

import io
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from hethub.runtime.checkpoint.elements import Chunk
from hethub.runtime.checkpoint.index import (
    INDEX,
    METADATA,
    IndexedWriter,
    IndexEntry,
    SavedChunk,
    elements,
    read_index,
)
from hethub.spec.errors import BadInput


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
        self.folder, self._entries = folder, read_index(folder).entries

    def whole(self, key: str, numel: int) -> Tensor:
        """All elements of an entry, (numel,), in the type they were saved in. Raises BadInput as `read` does."""
        entry = self._sized_entry(key, numel)
        values = torch.empty(numel, dtype=entry.torch_dtype)
        self.read([Chunk(key, numel, 0, values)])
        return values

    def read(self, chunks: Iterable[Chunk]) -> None:
        """Fills the chunks' values in place, rounded where their type is narrower.

        Raises BadInput where the checkpoint lacks an entry, or has it in another size, or cannot be read.
        """
        wanted: dict[tuple[SavedChunk, torch.dtype], list[Chunk]] = {}
        for chunk in chunks:
            entry = self._sized_entry(chunk.key, chunk.numel)
            for saved in entry.touching(chunk.offset, chunk.offset + chunk.values.numel()):
                wanted.setdefault((saved, entry.torch_dtype), []).append(chunk)
        by_file = groupby(sorted(wanted, key=lambda key: (key[0].file, key[0].start)), key=lambda key: key[0].file)
        for name, places in by_file:
            try:
                with (self.folder / name).open("rb") as file:
                    for place in places:
                        _fill(wanted[place], place[0].offset, elements(file, *place))
            except (OSError, BadInput) as error:
                raise BadInput(f"{self.folder}: the checkpoint cannot be read: {error}; use another one.") from None

    def _sized_entry(self, key: str, numel: int) -> IndexEntry:
        if key not in self._entries:
            raise BadInput(f"{self.folder} holds no {key}; resume with the model that was saved.")
        entry = self._entries[key]
        if entry.numel != numel:
            raise BadInput(
                f"{self.folder}: {key} has {entry.numel} elements, but the model here has {numel}; "
                "resume with the model that was saved."
            )
        return entry


def _fill(chunks: Iterable[Chunk], offset: int, saved: Tensor) -> None:
    """Copies to every chunk the part that it shares with the saved elements, which begin at `offset`."""
    for chunk in chunks:
        first, last = max(offset, chunk.offset), min(offset + saved.numel(), chunk.offset + chunk.values.numel())
        chunk.values[first - chunk.offset : last - chunk.offset].copy_(saved[first - offset : last - offset])
