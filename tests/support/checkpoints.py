"""Saving and loading in rank processes, and the whole state put together from every rank's part of it."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hethub.runtime.checkpoint import CheckpointManager, elements, integrity
from hethub.runtime.checkpoint.elements import Chunk, held_chunks, owned_chunks, state_of
from hethub.runtime.loop.trainer import Trainer, TrainingRank
from hethub.spec.errors import BadInput
from tests.support.layouts import Case, build_trainer

Parts = list[tuple[str, int, np.ndarray]]  # key, first element, values


def newest_intact(root: Path) -> Path | None:
    """The newest checkpoint under `root` that is whole, as a run on one rank finds it; warns and raises as that does."""

    def examine(path: Path) -> list[str]:
        try:
            return integrity.faults(path)
        except (OSError, BadInput) as error:
            raise integrity.refusal(path, error) from None

    return integrity.first_intact(integrity.candidates(root), examine, logging.getLogger(__name__).warning)


def numbers(chunks: Iterable[Chunk], prefix: str = "") -> Parts:
    """The chunks' values, wide enough for numpy (which loses no bit of them)."""
    return [
        (prefix + c.key, c.offset, (c.values.float() if c.values.dtype == torch.bfloat16 else c.values).numpy().copy())
        for c in chunks
    ]


def state_parts(trainer: TrainingRank) -> tuple[Parts, Parts]:
    """This rank's masters and moments, and the weights it holds."""
    if not isinstance(trainer, Trainer):
        return [], []
    trainer.stepping.flush()
    optimizer, storage = trainer.optimizer, trainer.storage
    owned = [c for run in optimizer.runs for c in owned_chunks(run, state_of(run))]
    return numbers(owned), numbers(held_chunks(storage), prefix="held ")


def counters(trainer: TrainingRank) -> tuple[int, float, int]:
    return trainer.updates, trainer.loss_scale.value, trainer.loss_scale.good_steps


def start(world: Any, case: Case) -> TrainingRank:
    """A trainer whose loss scale, if it has one, overflows at first, so that updates and steps come apart."""
    trainer = build_trainer(world, case)
    if trainer.loss_scale.dynamic:
        trainer.loss_scale.value = 2.0**20
    return trainer


def train_and_save(world: Any, case: Case, folder: Path, steps: Iterable[int], keep: int) -> Any:
    """Trains up to the last of `steps`, saving after each of them; this rank's state then."""
    trainer = start(world, case)
    store = CheckpointManager(folder, keep, world)
    wanted = list(steps)
    for step in range(1, wanted[-1] + 1):
        trainer.run_step(step)
        if step in wanted:
            trainer.save(store, step, blocking=False)
    store.wait()
    return *state_parts(trainer), counters(trainer)


def load_and_save(world: Any, case: Case, source: Path, target: Path, chunk_elements: int) -> Any:
    """Restores the latest checkpoint of `source` and saves it again, as this plan cuts it; this rank's state."""
    elements.CHUNK_ELEMENTS = chunk_elements
    trainer = build_trainer(world, case)
    store = CheckpointManager(source, 1, world)
    path = store.latest()
    step = trainer.restore(store, path)
    again = CheckpointManager(target, 1, world)
    trainer.save(again, step, blocking=True)
    return *state_parts(trainer), counters(trainer)


def assembled(parts: Iterable[Parts]) -> dict[str, np.ndarray]:
    """Whole tensors from all ranks' parts; raises AssertionError where elements are missing or ranks disagree."""
    sizes: dict[str, int] = {}
    known = [part for own in parts for part in own]
    for key, offset, values in known:
        sizes[key] = max(sizes.get(key, 0), offset + values.size)
    whole = {key: np.full(size, np.nan, dtype=np.float64) for key, size in sizes.items()}
    for key, offset, values in known:
        here = whole[key][offset : offset + values.size]
        assert np.all(np.isnan(here) | (here == values)), f"ranks disagree on {key}"
        here[:] = values
    assert not any(np.isnan(values).any() for values in whole.values())
    return whole
