"""A copy of the state on a late device: it is there when training goes on."""

from typing import Any

import torch

from hethub.runtime.checkpoint.elements import snapshot
from tests.runtime.memory.test_late_arena import delay, late_trainer
from tests.support.layouts import Case, replica, stage
from tests.support.ranks import start_ranks, values


def save_late(rank: int, store: Any, case: Case) -> tuple[int, bool]:
    """How many chunks a snapshot behind late work has, and whether the host has them on return."""
    device, world, trainer = late_trainer(rank, store, case)
    device.synchronize()
    delay(device.current_stream())
    chunks = snapshot(trainer.optimizer, device)
    there = [chunk.values.clone() for chunk in chunks]
    device.synchronize()
    world.close()
    return len(chunks), all(torch.equal(own, chunk.values) for own, chunk in zip(there, chunks, strict=True))


def test_a_snapshot_is_complete_on_return() -> None:
    """What is written to disk is read by a thread that knows of no device."""
    case = Case(name="alone", vendors="g", stages=[stage((0, 4), replica([0], 8))], precision="fp32")
    [(chunks, is_there)] = values(start_ranks(1, save_late, case))
    assert chunks
    assert is_there
