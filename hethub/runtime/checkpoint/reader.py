"""Ranges of a checkpoint's entries, read by our index in one process, without DCP and without process groups."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from hethub.runtime.checkpoint.elements import Chunk
from hethub.runtime.checkpoint.index import DamagedCheckpoint, IndexEntry, SavedChunk, elements, read_index
from hethub.runtime.checkpoint.integrity import refusal
from hethub.spec.errors import BadInput


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

        Raises BadInput where the checkpoint lacks an entry, or has it in another size, DamagedCheckpoint where its files
        are not as they were written, RunFailed where they cannot be read.
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
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{self.folder}: file {name} is missing.") from None
            except BadInput as error:
                raise DamagedCheckpoint(f"{self.folder}: {error}") from None
            except OSError as error:
                raise refusal(self.folder, error) from None

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
