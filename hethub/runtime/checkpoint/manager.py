"""The checkpoints of a run: written in the background, complete or not there at all, the newest few kept."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from hethub.communicator import World
from hethub.runtime.checkpoint import integrity
from hethub.runtime.checkpoint.elements import WEIGHTS, Chunk, held_chunks, owned_chunks, snapshot, state_of
from hethub.runtime.checkpoint.index import INDEX, METADATA
from hethub.runtime.checkpoint.reader import Reader
from hethub.runtime.checkpoint.record import RECORD, CheckpointRecord, read_record
from hethub.runtime.checkpoint.shared import require_shared
from hethub.runtime.state.optimizer import Optimizer
from hethub.spec.documents import set_aside, write_whole
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.layout.bind import Layout

if TYPE_CHECKING:
    from hethub.runtime.checkpoint.dcp import Part

_log = logging.getLogger(__name__)

# Ranks write and read unequal amounts, so some wait long for others; a dead rank is noticed by the world's own watch.
_UNEQUAL = timedelta(hours=2)

Result = TypeVar("Result")


Marks = dict[str, tuple[int, str]]  # bytes and checksum by file


class CheckpointFolder:
    """The checkpoints in `folder`, of which the newest `keep` stay, and for good those of every `keep_every`th step: all
    ranks write one together, or none is there.

    All ranks build it and make the same calls in the same order; checkpoints that are `is_indexed` have an index of ours,
    which is checked too. Raises BadInput where a rank does not see `folder`.
    """

    def __init__(
        self, folder: Path, keep: int, world: World, *, keep_every: int | None = None, is_indexed: bool = True
    ) -> None:
        require_shared(folder, world)
        self.folder, self.keep, self._world, self._is_indexed = folder, keep, world, is_indexed
        self._keep_every = keep_every
        self.note: Callable[[str], None] = _log.info  # told of every complete checkpoint, on rank 0
        # A group of its own: what a writing thread sends never meets the training's messages.
        self._group = world.gloo_group(_UNEQUAL)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return integrity.folder_of(self.folder, step)

    def begin_behind(self, step: int) -> None:
        """Called when training is about to go on behind `step`, 0 for a new run: what is unfinished goes, older
        checkpoints stay as many as are kept, and newer ones are set aside, whatever was the matter with them."""
        if self._world.rank > 0:
            return
        for partial in integrity.partials(self.folder):
            self._remove(partial)
        for path in self._own():
            if integrity.step_of(path) > step:
                _log.warning("%s is newer than what training goes on from: it is %s now", path, set_aside(path))
        self._remove_old()

    def write(self, step: int, parts: "Sequence[Part]", record: dict[str, Any]) -> None:
        """Writes every rank's parts, and rank 0's `record`; complete on return. Files first, then the marker, then the
        name. Raises RunFailed on all ranks where one cannot."""
        # A second of imports, which a run's start need not wait for.
        from torch.distributed.checkpoint import CheckpointException

        from hethub.runtime.checkpoint import dcp

        partial = integrity.partial_of(self.path_of(step))
        what = f"checkpoint of step {step}"
        with self._world.guard(what):
            try:
                self._everywhere(what, lambda: self._prepare(partial))
                try:
                    dcp.write(partial, parts, self._group, indexed=self._is_indexed)
                except CheckpointException as error:
                    causes = {rank: cause for rank, (cause, _) in error.failures.items()}
                    raise self._failed(what, causes) from error
                files = self._everywhere(what, lambda: self._finish(partial, record))
                self._everywhere(what, lambda: self._complete(partial, files))
            except RunFailed:  # all ranks have told, so none writes there any more
                if self._world.rank == 0:
                    self._remove(partial)
                raise

    def _prepare(self, partial: Path) -> None:
        if self._world.rank == 0:
            integrity.remove(partial)
            partial.mkdir(parents=True)

    def _finish(self, partial: Path, record: dict[str, Any]) -> Marks:
        """The checksums of this rank's files: on rank 0 also of the record, and of what DCP's coordinator has written."""
        names = [path.name for path in partial.glob(f"__{self._world.rank}_*")]
        if self._world.rank == 0:
            write_whole(partial / RECORD, json.dumps(record, indent=1))
            names += [METADATA, *([INDEX] if self._is_indexed else []), RECORD]
        return integrity.checksums(partial, names)

    def _complete(self, partial: Path, files: list[Marks]) -> None:
        if self._world.rank == 0:
            newest = integrity.complete(partial, {name: mark for own in files for name, mark in own.items()})
            self.note(f"checkpoint {newest} is complete")
            self._remove_old()

    def _own(self) -> list[Path]:
        """The checkpoints, newest first. A link is somebody's own, wherever it leads: it stays and counts for nothing."""
        return [path for path in integrity.candidates(self.folder) if not path.is_symlink()]

    def _remove_old(self) -> None:
        """Keeps as many whole ones as are wanted, the newest; those that were half removed go too."""
        older = self._own()[1:]
        whole = [path for path in older if (path / integrity.MARKER).exists()]
        for path in older:
            if path not in whole[: self.keep - 1] and not self._stays(path):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            integrity.remove(path)
        except OSError as error:  # on a network file system, while someone reads it; the next save tries again
            _log.warning("%s could not be removed: %s", path, error)

    def _stays(self, path: Path) -> bool:
        """Whether a checkpoint is kept for good."""
        is_whole = (path / integrity.MARKER).exists()
        return self._keep_every is not None and is_whole and integrity.step_of(path) % self._keep_every == 0

    def _everywhere(self, what: str, action: Callable[[], Result]) -> list[Result]:
        """Every rank's result of `action`. Raises RunFailed on all ranks where one could not."""
        own: tuple[Result | None, str | None]
        try:
            own = action(), None
        except Exception as error:  # noqa: BLE001  whatever it is, the others wait for this rank's word
            own = None, str(error) if isinstance(error, OSError | RunFailed) else f"{type(error).__name__}: {error}"
        answers: list[Any] = [None] * self._world.size
        dist.all_gather_object(answers, own, group=self._group)
        if failures := {rank: fault for rank, (_, fault) in enumerate(answers) if fault is not None}:
            raise self._failed(what, failures)
        return [result for result, _ in answers]

    def _failed(self, what: str, failures: dict[int, Any]) -> RunFailed:
        causes = "; ".join(f"rank {rank}: {cause}" for rank, cause in failures.items())
        remedy = " Make room or allow it there." if "[Errno" in causes else ""  # the system's refusal, whoever tells it
        return RunFailed.everywhere(
            self._world.rank,
            f"{what} could not be written: {causes}. What was complete before in {self.folder} is untouched; this one is "
            f"removed.{remedy}",
            # Where a rank cannot write, what it says may be lost as well: its log may lie on the same full disk.
            speaker=next((rank for rank in range(self._world.size) if rank not in failures), 0),
        )

    def latest(self, step: int | None = None) -> Path:
        """The newest whole checkpoint, or that of `step`, the same on all ranks.

        Newer ones that are damaged are named in a warning. Raises on all ranks BadInput where none is whole, or one is not
        of this hethub, and RunFailed where one cannot be read.
        """
        found = [path for path in integrity.candidates(self.folder) if step in (None, integrity.step_of(path))]
        names = self._world.all_gather_objects([path.name for path in found])[0]
        warn = _log.warning if self._world.rank == 0 else _log.debug
        path = integrity.first_intact([self.folder / name for name in names], self._faults, warn)
        if path is None:
            raise integrity.none_whole(self.folder)
        return path

    def _faults(self, path: Path) -> list[str]:
        """What all ranks together find damaged in a checkpoint, each having read a part of it."""
        own: list[str] = []
        refused: tuple[str, bool] | None = None  # what to say, and whether that is a failure
        try:
            own = integrity.faults(path, self._world.rank, self._world.size, contents=self._is_indexed)
        except (OSError, BadInput) as error:
            refused = str(integrity.refusal(path, error)), isinstance(error, OSError)
        answers = self._world.all_gather_objects((own, refused), _UNEQUAL)
        found = list(dict.fromkeys(fault for own, _ in answers for fault in own))
        told = [answer for _, answer in answers if answer is not None]
        if found or not told:  # contents of damaged files say nothing
            return found
        text, fails = told[0]
        raise RunFailed.everywhere(self._world.rank, text) if fails else BadInput(text)


class CheckpointManager(CheckpointFolder):
    """The checkpoints of a plan's run, written in the background."""

    def __init__(self, folder: Path, keep: int, world: World, *, keep_every: int | None = None) -> None:
        super().__init__(folder, keep, world, keep_every=keep_every)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._newest_step: int | None = None

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(self, record: CheckpointRecord, optimizer: Optimizer | None, *, blocking: bool = False) -> None:
        """Saves the state as it is now; training may go on as soon as this returns.

        `record` comes back from `load` as rank 0 gave it; an unused rank has no optimizer. A save still under way is
        waited for first, and its failure raised (RunFailed). A step that is already saved is not saved again. With
        `blocking`, the checkpoint is complete on return.
        """
        self.wait()
        if record.step != self._newest_step:
            # The copy's memory goes when it is written: nothing else keeps it.
            chunks = [] if optimizer is None else snapshot(optimizer, self._world.device)
            self._writing = self._thread.submit(self._write, record, chunks)
        if blocking:
            self.wait()

    @property
    def has_failed(self) -> bool:
        """Whether the last save has ended without a checkpoint; `wait` raises why."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def wait(self) -> None:
        """Returns when no save is under way. Raises RunFailed where one failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, record: CheckpointRecord, chunks: list[Chunk]) -> None:
        """Runs in the writing thread on all ranks."""
        from hethub.runtime.checkpoint.dcp import Part

        parts = [Part(chunk.key, (chunk.numel,), (chunk.offset,), chunk.values) for chunk in chunks]
        self.write(record.step, parts, record.to_dict())
        self._newest_step = record.step

    # -- restoring -------------------------------------------------------------------------------------------------

    def load(self, path: Path, layout: Layout, optimizer: Optimizer | None) -> CheckpointRecord:
        """Restores masters, moments and every weight this rank holds; returns the record that `save` got.

        The restored numbers are the saved ones, bit by bit, under any plan. Raises BadInput where the checkpoint is
        of another model or precision.
        """
        record = read_record(path)
        record.check(layout.model, layout.plan.precision, path)
        if optimizer is not None:
            Reader(path).read([*held_chunks(optimizer.storage), *_optimizer_chunks(optimizer)])
            optimizer.set_updates(record.updates)
        self._newest_step = record.step
        return record


def _optimizer_chunks(optimizer: Optimizer) -> Iterator[Chunk]:
    """What the optimizer keeps beside the weights: moments, and the masters of half precisions."""
    for run in optimizer.runs:
        state = state_of(run)
        if not optimizer.keeps_masters:
            del state[WEIGHTS]
        yield from owned_chunks(run, state)
