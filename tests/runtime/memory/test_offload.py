"""Parameters and optimizer state in host memory: the same training as without, and the bytes where they are said to
be."""

import gc
from typing import Any

import numpy as np
import pytest
import torch

from hethub.kernels.device import choose_device
from hethub.predictor.memory.ranks import rank_memory
from hethub.runtime.memory.accounting import MemoryMeter
from hethub.runtime.memory.activation_offload import OffloadedLayer
from hethub.runtime.memory.host_arena import Copy, HostArena
from hethub.runtime.pipeline.passes import MicrobatchPass, _OffloadedGraph
from tests.support.layouts import MODEL, Case, Shards, build_trainer, replica, shards, stage
from tests.support.ranks import run_ranks

TIED = MODEL.replace(tied_head=True)


def pair(zero: int, **more: Any) -> list[dict[str, Any]]:
    return [stage((0, 4), replica([0], 4, 2), replica([1], 4, 2), zero=zero, **more)]


def train_counting(world: Any, case: Case) -> tuple[list[float], Shards, dict[str, int]]:
    """Losses, weights, and where this rank's bytes lie after the last step."""
    trainer = build_trainer(world, case)
    losses = [trainer.run_step(step).loss for step in range(1, case.steps + 1)]
    gc.collect()
    weights = trainer.zero_manager.weights
    counted = {
        "host": trainer.arena.live_bytes,
        "device": trainer.storage.device_bytes + trainer.optimizer.device_bytes,
        "transient": trainer._meter.live_bytes,
        "state": trainer.optimizer.state_bytes,
        "most_present": weights.most_present if weights else 0,
    }
    return losses, shards(trainer), counted


def assert_alike(ours: Shards, others: Shards, tolerance: float) -> None:
    """The same runs with the same values; torch's AdamW rounds the ends of a run otherwise than its middle."""
    assert ours
    for one, other in zip(sorted(ours, key=_place), sorted(others, key=_place), strict=True):
        assert one[:3] == other[:3]
        assert np.abs(one[3] - other[3]).max() <= tolerance * np.abs(one[3]).max(), one[0]


def _place(shard: tuple[str, int, int, Any]) -> tuple[str, int]:
    return shard[:2]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("precision", "steps", "loss_tolerance", "tolerance"),
    # In bf16 an element may be rounded to its neighbour; from the third step on AdamW, whose step is as long for the
    # smallest gradient, makes that a difference of the order of the learning rate.
    [("fp64", 3, 1e-12, 1e-12), ("bf16", 2, 1e-3, 2**-7)],
    ids=["fp64", "bf16"],
)
def test_offloaded_state_trains_the_same_model(
    zero: int, precision: str, steps: int, loss_tolerance: float, tolerance: float
) -> None:
    model = TIED if zero % 2 else MODEL
    results = {}
    for offload in ([], ["parameters", "optimizer"]):
        case = Case(name="offload", stages=pair(zero, offload=offload), precision=precision, model=model, steps=steps)
        results[bool(offload)] = run_ranks(2, train_counting, case)
    width, wide = (2, 4) if precision == "bf16" else (8, 8)
    norms = MODEL.hidden * (2 * MODEL.layers + 1)
    for (losses, held, here), (host_losses, host_held, there) in zip(results[False], results[True], strict=True):
        assert host_losses == pytest.approx(losses, rel=loss_tolerance)
        assert_alike(held, host_held, tolerance)
        assert here["host"] == 0
        assert there["transient"] == here["transient"] == 0
        assert there["state"] == here["state"]
        moved = sum(values.size for name, *_, values in held if "norm" not in name) * width
        assert there["host"] == moved + there["state"]
        gradients = model.parameters if zero < 2 else here["state"] // (12 if precision == "bf16" else 16) + norms
        assert there["device"] <= norms * width + gradients * wide
        assert 0 < there["most_present"] <= 3


def test_optimizer_state_alone_leaves_the_weights_where_they_are() -> None:
    case = Case(name="optimizer", stages=pair(1, offload=["optimizer"]), precision="fp32", steps=2)
    for _, _, counted in run_ranks(2, train_counting, case):
        assert counted["host"] == counted["state"] > 0
        assert counted["device"] == 2 * 4 * MODEL.parameters


def where_weights_lie(world: Any, case: Case) -> list[tuple[bool, bool]]:
    """By what this rank steps, whether the weights count as offloaded, and whether they lie on the device."""
    trainer = build_trainer(world, case)
    device = trainer.storage.weights
    places = range(device.data_ptr(), device.data_ptr() + device.nbytes)
    return [(run.weight_is_offloaded, run.weight.data_ptr() in places) for run in trainer.optimizer.runs]


@pytest.mark.parametrize("zero", [1, 3])
def test_norms_stay_on_the_device_and_are_stepped_there(zero: int) -> None:
    """Over the copies' stream nobody would wait for a norm that was stepped."""
    case = Case(name="norms", precision="bf16", stages=pair(zero, offload=["parameters"]))
    for found in run_ranks(2, where_weights_lie, case):
        assert {True, False} == {is_offloaded for is_offloaded, _ in found}
        assert all(is_offloaded != on_device for is_offloaded, on_device in found)


def train_measuring(world: Any, case: Case) -> tuple[list[float], Shards, int, int, int, int]:
    """Losses, weights, the meter's peak and what it holds at the end, the arena's peak and what it holds then."""
    trainer = build_trainer(world, case)
    losses = [trainer.run_step(step).loss for step in range(1, case.steps + 1)]
    gc.collect()
    meter, arena = trainer._meter, trainer.arena
    return losses, shards(trainer), meter.peak_bytes, meter.live_bytes, arena.peak_bytes, arena.live_bytes


DEEP = MODEL.replace(layers=8)
ACTIVATIONS: dict[str, tuple[list[dict[str, Any]], str, dict[str, Any]]] = {
    "gpipe": ([stage((0, 8), replica([0], 4, 1), replica([1], 4, 1))], "gpipe", {}),
    "layered, zero3": ([stage((0, 8), replica([0], 5, 1), replica([1], 3, 1), zero=3)], "layered", {}),
    "two stages": ([stage((0, 4), replica([0], 8, 1, in_flight=4)), stage((4, 8), replica([1], 8, 1))], "1f1b", {}),
    "selective": ([stage((0, 8), replica([0], 4, 1), replica([1], 4, 1), recompute="selective")], "gpipe", {}),
    "full": ([stage((0, 8), replica([0], 4, 1), replica([1], 4, 1), recompute="full")], "gpipe", {}),
    "documents": ([stage((0, 8), replica([0], 4, 1), replica([1], 4, 1))], "gpipe", {"document_mask": True}),
    "zero_bubble": ([stage((0, 4), replica([0], 8, 1)), stage((4, 8), replica([1], 8, 1))], "zero_bubble", {}),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_offloaded_activations_train_the_same_model_in_less_memory(name: str) -> None:
    stages, schedule, more = ACTIVATIONS[name]
    results = {}
    for offload in ([], ["activations"]):
        own = [{**each, "offload": offload} for each in stages]
        case = Case(name=name, stages=own, schedule=schedule, model=DEEP, steps=2, **more)
        results[bool(offload)] = run_ranks(2, train_measuring, case)
    for here, there in zip(results[False], results[True], strict=True):
        assert there[0] == pytest.approx(here[0], rel=1e-12)
        assert_alike(here[1], there[1], 1e-12)
        assert here[3] == there[3] == there[5] == here[4] == 0
    here, there = results[False][0], results[True][0]
    assert there[4] > 0.4 * here[2]  # the host holds what the device no longer does
    host = [entry.host_parts["activations"] for entry in rank_memory(case.layout())]
    within = 0.1 if name in ("selective", "documents") else 1e-6  # masks and scores are not counted
    assert [own[4] for own in results[True]] == pytest.approx(host, rel=within)
    assert there[2] < (0.9 if name in ("full", "documents") else 0.6) * here[2]


def test_masks_and_what_is_counted_elsewhere_stay_where_they_are() -> None:
    weight, mask = torch.randn(8, dtype=torch.float64), torch.arange(8) % 3 == 0
    x = torch.randn(8, dtype=torch.float64, requires_grad=True)
    arena = HostArena(choose_device(0, 1, kind="cpu"))
    meter = MemoryMeter([weight])
    layer = OffloadedLayer(arena, meter)
    with layer.saving():
        result = (x * weight).masked_fill(mask, 0.0).exp()
    assert arena.live_bytes == result.nbytes  # what exp keeps
    assert meter.peak_bytes == result.nbytes + mask.nbytes
    result.sum().backward()
    assert torch.equal(x.grad, torch.where(mask, 0.0, (x * weight).exp() * weight))


def test_what_a_layer_keeps_leaves_beside_the_next_one() -> None:
    """On a device nobody else waits for it: its memory would be had again only when the host sees that it has left."""
    x, left = torch.ones(8, requires_grad=True), list[Copy]()
    arena = HostArena(choose_device(0, 1, kind="cpu"))
    arena.leave = left.extend  # type: ignore[method-assign]
    with OffloadedLayer(arena, MemoryMeter([])).saving():
        result = x.exp()
    assert [copy.values.data_ptr() for copy in left] == [result.data_ptr()]


def on_the_way(world: Any, case: Case) -> list[bool]:
    """By microbatch, whether what its backward needs first is on its way to the device when that begins."""
    trainer, found, backward = build_trainer(world, case), list[bool](), MicrobatchPass.backward

    def watched(microbatch: MicrobatchPass, *args: Any, **named: Any) -> Any:
        last: Any = microbatch._through[-1]
        layer = last.offloaded if isinstance(last, _OffloadedGraph) else last.source._layer
        found.append(bool(layer._coming))
        return backward(microbatch, *args, **named)

    MicrobatchPass.backward = watched  # type: ignore[method-assign]
    trainer.run_step(1)
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_backwards_activations_are_fetched_beside_the_action_before_it(recompute: str) -> None:
    """Behind a forward of another microbatch and behind a backward; where its own forward is before it, there is none."""
    more = {"offload": ["activations"], "recompute": recompute}
    stages = [stage((0, 2), replica([0], 8, 2), **more), stage((2, 4), replica([1], 8, 2), **more)]
    first, last = run_ranks(2, on_the_way, Case(name="1f1b", stages=stages))
    assert first == [True] * 4
    assert last == [False] * 4
    assert run_ranks(2, on_the_way, Case(name="gpipe", stages=stages, schedule="gpipe")) == [[True] * 4] * 2
