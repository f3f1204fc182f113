"""Training on devices: alone, several of one maker, and as islands beside CPUs. Run with `pytest -m gpu`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hethub.communicator import Rendezvous, connect
from hethub.kernels.device import Device, choose_device
from tests.support.device_cases import CASES
from tests.support.layouts import Case, train
from tests.support.ranks import run_ranks, start_ranks, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs where torch finds a CUDA or ROCm device"),
]

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
