"""Copies between host and device on a late device: both ways at once, each buffer's in their order, and no more memory."""

import time
from itertools import groupby
from typing import Any

import torch

from hethub.communicator import Rendezvous, connect
from hethub.runtime.memory.host_arena import HostArena
from tests.support.device_cases import CASES
from tests.support.late import device as late
from tests.support.late import engine
from tests.support.late.tensor import may_wait
from tests.support.layouts import Case, build_trainer
from tests.support.ranks import start_ranks, values

SIZE = 1000


def copy_both_ways(rank: int, store: Any) -> tuple[bool, bool, bool]:
    """Whether a fetch passes another buffer's store, whether it waits for its own buffer's, and has what that stored."""
    device = late.install()
    arena, ones = HostArena(device), torch.ones(SIZE).to(device.torch_device)
    kept, stored = arena.empty(SIZE, torch.float32), arena.empty(SIZE, torch.float32)
    arena.store(kept, ones * 3)
    arena.synchronize()
    slow = engine.Point()
    arena._down.wait(slow)
    arena.store(stored, ones * 2)
    passes = bool((arena.fetch(kept).wait().cpu() == 3).all())
    fetch = arena.fetch(stored)
    time.sleep(0.05)
    waits = not fetch.event.is_done()
    slow.reached.set()
    device.new_stream().record().synchronize()  # wakes what waits for it
    return passes, waits, bool((fetch.wait().cpu() == 2).all())


def test_a_fetch_passes_what_is_stored_elsewhere() -> None:
    assert values(start_ranks(1, copy_both_ways)) == [(True, True, True)]


def fetch_often(rank: int, store: Any) -> int:
    """Bytes in use at the peak of many fetches, each of which is used and let go, where copies are late."""
    device = late.install()
    arena, taken = HostArena(device), engine.engine()
    host = arena.empty(SIZE, torch.float32)
    arena.store(host, torch.ones(SIZE).to(device.torch_device))
    arena.synchronize()
    before = taken.peak_bytes = taken.used_bytes
    for _ in range(20):
        with arena._up.active():
            taken.submit(lambda: time.sleep(2e-3))
        arena.fetch(host).wait().mul_(2)
    device.synchronize()
    return taken.peak_bytes - before


def test_what_was_fetched_and_waited_for_is_had_again_at_once() -> None:
    [peak] = values(start_ranks(1, fetch_often))
    assert peak <= 2 * 4096


def step_offloaded(rank: int, store: Any, case: Case) -> tuple[int, int, int]:
    """Bytes that an update takes at its peak, those of its largest batch of moments, and of all."""
    device = late.install()
    may_wait.set(True)
    world = connect(Rendezvous.on_one_host(store, rank, case.size), device=device, islands=case.islands)
    optimizer = build_trainer(world, case).stepping._optimizer
    arena, taken = optimizer.arena, engine.engine()
    fetch = arena.fetch

    def fetch_late(*given: Any) -> Any:
        with arena._up.active():
            taken.submit(lambda: time.sleep(2e-3))
        return fetch(*given)

    arena.fetch = fetch_late
    device.synchronize()
    before = taken.peak_bytes = taken.used_bytes
    optimizer.step(1, 1.0)
    device.synchronize()
    batches = [
        sum(tensor.nbytes for run in batch for tensor in (run.master, run.exp_avg, run.exp_avg_sq))
        for _, batch in groupby(optimizer.runs, key=lambda run: run.bucket.span)
    ]
    grown = taken.peak_bytes - before
    world.close()
    return grown, max(batches), sum(batches)


def test_an_offloaded_update_holds_two_batches() -> None:
    """However late the copies are: what one has stored is there for the next but one."""
    [case] = [case for case in CASES if case.name == "offload optimizer"]
    [(grown, largest, whole)] = values(start_ranks(1, step_offloaded, case))
    assert whole > 7 * largest
    assert largest <= grown < 2.5 * largest
