"""Training on devices: alone, several of one maker, and as islands beside CPUs. Run with `pytest -m gpu`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hethub.communicator import Rendezvous, connect
from hethub.kernels.device import Device, choose_device
from tests.support.layouts import Case, chunked, replica, stage, train
from tests.support.ranks import run_ranks, start_ranks, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs where torch finds a CUDA or ROCm device"),
]

ALL = (0, 4)
CHUNKS = [chunked([(0, 1), (2, 3)], replica([0], 8, 2)), chunked([(1, 2), (3, 4)], replica([1], 8, 2))]
TWO_STAGES = [stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 2))]
UNLIKE = replica([0], 6, 3), replica([1], 2)
OFFLOADED = ["parameters", "optimizer", "activations"]

# A device's ranks are "g", of one maker; those on CPUs "c".
CASES = [
    Case(name="alone", vendors="g", stages=[stage(ALL, replica([0], 8, 4))]),
    Case(name="documents", vendors="g", document_mask=True, stages=[stage(ALL, replica([0], 8, 4))]),
    Case(name="recompute full", vendors="g", stages=[stage(ALL, replica([0], 8, 4), recompute="full")]),
    Case(name="recompute selective", vendors="g", stages=[stage(ALL, replica([0], 8, 4), recompute="selective")]),
    *(Case(name=f"offload {what}", vendors="g", stages=[stage(ALL, replica([0], 8, 2), offload=[what])]) for what in OFFLOADED),
    Case(name="pipeline", vendors="gc", stages=TWO_STAGES),
    Case(name="replicas", vendors="gc", stages=[stage(ALL, *UNLIKE, zero=1)]),
    Case(name="ministages", vendors="gc", stages=CHUNKS, schedule="ministages"),
    Case(name="zero_bubble", vendors="gc", stages=TWO_STAGES, schedule="zero_bubble"),
    Case(name="layered, zero3", vendors="gc", stages=[stage(ALL, *UNLIKE, zero=3)], schedule="layered"),
    Case(name="tensor parallel", vendors="gg", stages=[stage(ALL, replica([0, 1], 8, 2))]),
    Case(name="pipeline over their link", vendors="gg", stages=TWO_STAGES),
    Case(name="ministages over their link", vendors="gg", stages=CHUNKS, schedule="ministages"),
    Case(name="zero3 of two", vendors="gg", stages=[stage(ALL, *UNLIKE, zero=3)]),
    Case(name="two beside a CPU", vendors="ggc", stages=[stage(ALL, replica([0], 4, 2), replica([1], 2), replica([2], 2), zero=2)]),
    Case(name="degrees 2 and 1", vendors="ggc", stages=[stage(ALL, replica([0, 1], 6, 3), replica([2], 2), zero=1)]),
]  # fmt: skip
# Losses of two steps, by how far they may lie from those of one CPU in the same precision.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


def train_on_devices(rank: int, store: Any, case: Case) -> list[float]:
    """Losses of the case, its ranks "g" on a device each and the others on CPUs."""
    number = case.vendors.count("g")
    device = choose_device(rank, number) if rank < number else Device(vendor="cpu")
    device.activate()
    world = connect(Rendezvous.on_one_host(store, rank, case.size), device=device, islands=case.islands)
    losses, _, _ = train(world, case)
    world.close()
    return losses


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_with_devices_equals_one_cpu(case: Case, precision: Any) -> None:
    if (number := case.vendors.count("g")) > torch.cuda.device_count():
        pytest.skip(f"runs where torch finds {number} devices")
    if precision == "bf16" and not choose_device(
        0,
        1,
    ).supports(torch.bfloat16):
        pytest.skip("runs where the device computes in bfloat16")
    case = replace(case, precision=precision)
    reference = run_ranks(1, train, case.alone(), device=Device(vendor="cpu"))[0][0]
    for losses in values(start_ranks(case.size, train_on_devices, case, timeout_seconds=240)):
        assert losses == pytest.approx(reference, rel=TOLERANCE[precision])
