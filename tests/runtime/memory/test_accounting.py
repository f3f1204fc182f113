"""The memory meter counts what backward keeps, each storage once, and gives it back."""

import gc
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hethub.runtime.memory.accounting import MemoryMeter
from tests.support.layouts import MODEL, Case, build_trainer, replica, stage
from tests.support.ranks import run_ranks


def test_counts_what_a_known_graph_keeps_and_returns_to_zero() -> None:
    weight = torch.randn(30, 20, requires_grad=True)
    meter = MemoryMeter([weight])
    assert meter.live_bytes == meter.peak_bytes == 0
    x = torch.randn(10, 30)
    with meter.counting():
        hidden = x @ weight  # keeps x (10 x 30); the weight is counted elsewhere
        assert meter.live_bytes == 4 * 10 * 30
        turned = hidden.tanh()  # keeps its result (10 x 20)
        assert meter.live_bytes == 4 * (10 * 30 + 10 * 20)
        loss = turned.square().sum()  # keeps the result of tanh again: one storage, counted once
        assert meter.live_bytes == 4 * (10 * 30 + 10 * 20)
    loss.backward()
    del hidden, turned, loss
    assert meter.live_bytes == x.nbytes  # ours still
    del x
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 4 * (10 * 30 + 10 * 20)


def test_views_of_one_storage_count_it_once_and_whole() -> None:
    meter = MemoryMeter([])
    base = torch.randn(8, 8)
    leaf = torch.randn(8, requires_grad=True)
    with meter.counting():
        results = [leaf * base[row] for row in range(3)]
        assert meter.live_bytes == base.nbytes
    results.pop().sum().backward()
    assert meter.live_bytes == base.nbytes  # two rows are still needed
    results.clear()
    row = base[0]
    del base
    assert meter.live_bytes == row.untyped_storage().nbytes() == 4 * 8 * 8  # a view holds all of it
    del row
    assert meter.live_bytes == 0


def test_graphs_that_are_never_run_backward_are_given_back_too() -> None:
    meter = MemoryMeter([])
    leaf = torch.randn(16, requires_grad=True)
    with meter.counting():
        result = leaf.exp()
    assert meter.live_bytes == 4 * 16
    del result
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 4 * 16


def test_a_recomputed_block_keeps_its_input_until_its_backward() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = x.sin()
        return x

    kept = {}
    for recompute in (False, True):
        meter, leaf = MemoryMeter([]), torch.randn(64, requires_grad=True)
        with meter.counting():
            result = checkpoint(block, leaf, use_reentrant=False) if recompute else block(leaf)
            kept[recompute] = meter.live_bytes
            result.sum().backward()
        del result, leaf
        assert meter.live_bytes == 0
    assert kept == {False: 5 * 64 * 4, True: 64 * 4}


def test_the_first_two_steps_are_counted_and_no_later_one_is_slowed() -> None:
    meter, leaf, counted = MemoryMeter([]), torch.randn(16, requires_grad=True), []
    for _ in range(4):
        with meter.counting_step():
            result = leaf.exp()
        counted.append(meter.live_bytes)
        del result
    assert counted == [4 * 16, 4 * 16, 0, 0]


def live_and_peak(world: Any, case: Case) -> tuple[int, int, int]:
    """Bytes alive after a step, the meter's peak, and the rank's whole memory."""
    trainer = build_trainer(world, case)
    trainer.run_step(1)
    gc.collect()
    return trainer._meter.live_bytes, trainer._meter.peak_bytes, trainer.memory_bytes


TOKENS = 2 * 16  # of a microbatch: micro-batch times sequence


@pytest.mark.parametrize(("schedule", "microbatches_held"), [("1f1b", 2), ("gpipe", 4)])
def test_a_steps_peak_is_the_microbatches_in_flight(schedule: str, microbatches_held: int) -> None:
    """The first of two stages holds as many microbatches as are in flight, and each keeps the same bytes."""
    peaks = {}
    for recompute in ("none", "full"):
        stages = [
            stage((0, 2), replica([0], 8, 2), recompute=recompute),
            stage((2, 4), replica([1], 8, 2), recompute=recompute),
        ]
        first, second = run_ranks(
            2, live_and_peak, Case(name=schedule, stages=stages, schedule=schedule, precision="fp32")
        )
        assert first[0] == second[0] == 0
        peaks[recompute] = first[1]
    width = MODEL.hidden
    inputs = 2 * TOKENS * width * 4  # the input of each of two layers
    assert peaks["full"] >= microbatches_held * inputs
    assert peaks["none"] > 2 * peaks["full"]


def test_twice_the_microbatches_in_flight_is_twice_the_memory_kept() -> None:
    peaks = {}
    for in_flight in (2, 4):
        stages = [stage((0, 2), replica([0], 8, 1, in_flight=in_flight)), stage((2, 4), replica([1], 8, 1))]
        peaks[in_flight] = run_ranks(2, live_and_peak, Case(name="deep", stages=stages, precision="fp32"))[0][1]
    assert peaks[4] == pytest.approx(2 * peaks[2], rel=0.02)
