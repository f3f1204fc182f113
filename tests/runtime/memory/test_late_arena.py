"""Copies between host and device on a late device: both ways at once, each buffer's in their order, and no more memory."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from hethub.communicator import Rendezvous, connect
from hethub.runtime.memory.host_arena import HostArena
from hethub.runtime.state.optimizer import _batches
from hethub.spec.layout.state import brought_elements
from tests.support.device_cases import CASES
from tests.support.late import device as late
from tests.support.late import engine
from tests.support.late.tensor import may_wait
from tests.support.layouts import Case, build_trainer, replica, stage
from tests.support.ranks import start_ranks, values

SIZE = 1000
[OFFLOADED] = [case for case in CASES if case.name == "offload parameters"]


def late_trainer(rank: int, store: Any, case: Case) -> tuple[Any, Any, Any]:
    """A late device, the group on it, and the case's trainer."""
    device = late.install()
    may_wait.set(True)
    world = connect(Rendezvous.on_one_host(store, rank, case.size), device=device, islands=case.islands)
    return device, world, build_trainer(world, case)


def delay(stream: Any) -> None:
    """Makes a stream's next work later than a host that runs ahead."""
    with stream.active():
        engine.engine().submit(lambda: time.sleep(2e-3))


def copy_both_ways(rank: int, store: Any) -> tuple[bool, bool, bool, bool]:
    """Whether computing passes a buffer's store, and a fetch another buffer's; whether that waits for its own buffer's, and
    has what was stored."""
    device = late.install()
    arena, ones = HostArena(device), torch.ones(SIZE).to(device.torch_device)
    kept, stored = arena.empty(SIZE, torch.float32), arena.empty(SIZE, torch.float32)
    arena.store(kept, ones * 3)
    arena.synchronize()
    slow = engine.Point()
    arena._down.wait(slow)
    stored.zero_()
    arena.store(stored, ones * 2)
    device.current_stream().record().synchronize()
    goes_on = bool((stored == 0).all())
    passes = bool((arena.fetch(kept).wait().cpu() == 3).all())
    fetch = arena.fetch(stored)
    time.sleep(0.05)
    waits = not fetch.event.is_done()
    slow.reached.set()
    device.new_stream().record().synchronize()  # wakes what waits for it
    return goes_on, passes, waits, bool((fetch.wait().cpu() == 2).all())


def test_computing_and_a_fetch_pass_what_is_stored_elsewhere() -> None:
    assert values(start_ranks(1, copy_both_ways)) == [(True, True, True, True)]


def fetch_often(rank: int, store: Any) -> int:
    """Bytes in use at the peak of many fetches, each of which is used and let go, where copies are late."""
    device = late.install()
    arena, taken = HostArena(device), engine.engine()
    host = arena.empty(SIZE, torch.float32)
    arena.store(host, torch.ones(SIZE).to(device.torch_device))
    arena.synchronize()
    before = taken.peak_bytes = taken.used_bytes
    for _ in range(20):
        delay(arena._up)
        arena.fetch(host).wait().mul_(2)
    device.synchronize()
    return taken.peak_bytes - before


def test_what_was_fetched_and_waited_for_is_had_again_at_once() -> None:
    [peak] = values(start_ranks(1, fetch_often))
    assert peak <= 2 * 4096


def store_layers(rank: int, store: Any) -> int:
    """Bytes in use at the peak of many layers, each of which stores a result and lets it go, where copies are late."""
    device = late.install()
    arena, taken = HostArena(device), engine.engine()
    hosts = [arena.empty(SIZE, torch.float32) for _ in range(20)]
    x = torch.ones(SIZE).to(device.torch_device)
    device.synchronize()
    before = taken.peak_bytes = taken.used_bytes
    for host in hosts:
        delay(arena._down)
        arena.leave([arena.store(host, x * 2)])
        arena.end_layer()
    device.synchronize()
    assert all(bool((host == 2).all()) for host in hosts)
    return taken.peak_bytes - before


def test_on_the_device_are_a_layer_and_what_has_left_the_one_before() -> None:
    """An allocator that keeps memory for the copies' stream gave none of it out again: all layers' lay there."""
    [peak] = values(start_ranks(1, store_layers))
    assert peak <= 3 * 4096


def spread_offloaded(rank: int, store: Any, case: Case) -> tuple[int, int, int]:
    """How many bytes are fetched to send new weights to other holders, those of the largest unit, and those in use at the peak."""
    device, world, trainer = late_trainer(rank, store, case)
    weights = trainer.zero_manager.weights
    storage, taken = weights._storage, engine.engine()
    device.synchronize()
    before = taken.peak_bytes = taken.used_bytes
    fetched = storage.arena.fetched_bytes
    for unit in storage.offloaded_weights:
        delay(storage.arena._down)
        weights.spread(unit)
    device.synchronize()
    grown, fetched = taken.peak_bytes - before, storage.arena.fetched_bytes - fetched
    world.close()
    return fetched, max(each.nbytes for each in storage.offloaded_weights.values()), grown


def test_weights_that_one_rank_holds_are_not_sent_to_itself() -> None:
    """They were fetched and stored again, each step."""
    [(fetched, _, _)] = values(start_ranks(1, spread_offloaded, OFFLOADED))
    assert fetched == 0


def test_weights_pass_the_device_unit_by_unit() -> None:
    """However late the copies are: what goes to the host took memory of its own for each unit."""
    stages = [stage((0, 4), replica([0], 4, 2), replica([1], 4, 2), zero=1, offload=["parameters"])]
    case = Case(name="two offload parameters", vendors="gg", stages=stages)
    for fetched, largest, grown in values(start_ranks(2, spread_offloaded, case)):
        assert fetched > 3 * largest
        assert grown < 2.5 * largest


def step_offloaded(rank: int, store: Any, case: Case) -> tuple[int, int, int, bool]:
    """Bytes that an update takes at its peak, those of its largest batch of moments, and of all; and whether the host has
    numbers then."""
    device, world, trainer = late_trainer(rank, store, case)
    optimizer = trainer.stepping._optimizer
    arena, taken = optimizer.arena, engine.engine()
    fetch = arena.fetch

    def fetch_late(*given: Any) -> Any:
        delay(arena._up)
        return fetch(*given)

    def store_late(*given: Any) -> Any:
        delay(arena._down)
        return stored(*given)

    stored, arena.fetch, arena.store = arena.store, fetch_late, store_late
    device.synchronize()
    before = taken.peak_bytes = taken.used_bytes
    optimizer.step_runs(optimizer.runs, 1, 1.0)
    device.synchronize()
    assert max(run.local.size for run in optimizer.runs) == brought_elements()  # the embedding's, cut
    batches = [
        sum(tensor.nbytes for run in batch for tensor in (run.master, run.exp_avg, run.exp_avg_sq))
        for batch in _batches(optimizer.runs, brought_elements())
    ]
    grown = taken.peak_bytes - before
    kept = [tensor for run in optimizer.runs for tensor in (run.master, run.exp_avg, run.exp_avg_sq)]
    world.close()
    return grown, max(batches), sum(batches), all(bool(tensor.isfinite().all()) for tensor in kept)


def test_an_offloaded_update_holds_three_batches() -> None:
    """However late the copies are: one is fetched, one stepped, one stored."""
    [case] = [replace(case, bucket_elements=1 << 9) for case in CASES if case.name == "offload optimizer"]
    [(grown, largest, whole, is_kept)] = values(start_ranks(1, step_offloaded, case))
    assert is_kept  # memory that is had again too soon is poisoned
    assert whole > 7 * largest
    assert largest <= grown < 3.5 * largest


def start_beside_computing(rank: int, store: Any, case: Case) -> tuple[bool, bool]:
    """Whether what is computed goes on while copies from the host stand still, and whether the weights come behind them."""
    device, world, trainer = late_trainer(rank, store, case)
    weights = trainer.zero_manager.weights
    arena, slow = weights._storage.arena, engine.Point()
    weights.start(1)
    weights.finish(1)
    expected = weights._present[1].buffer.cpu()
    weights.free(1)
    device.synchronize()
    arena._up.wait(slow)
    weights.start(1)
    goes_on = device.current_stream().record().reached.wait(5)
    slow.reached.set()
    device.new_stream().record().synchronize()  # wakes what waits for it
    weights.finish(1)
    is_there = bool((weights._present[1].buffer.cpu() == expected).all())
    weights.free(1)
    world.close()
    return goes_on, is_there


@pytest.mark.parametrize("vendors", ["gg", "gc"])
def test_a_layer_computes_while_the_next_one_s_weights_are_fetched_and_gathered(vendors: str) -> None:
    """The compute stream waited for the copy before the gather, and so before the layer at work."""
    [case] = [case for case in CASES if case.name == "zero3 of two, offloaded"]
    found = values(start_ranks(2, start_beside_computing, replace(case, vendors=vendors)))
    assert found == [(True, True)] * 2
