"""Training on a device: alone, and as an island of its own beside a CPU island. Run with `pytest -m gpu`."""

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

ONE = Case(name="one", stages=[stage((0, 4), replica([0], 8, 4))], precision="fp32")
PIPELINE = Case(
    name="pipeline", stages=[stage((0, 2), replica([0], 8, 2)), stage((2, 4), replica([1], 8, 2))],
    vendors="gc", precision="fp32",
)  # fmt: skip
REPLICAS = Case(
    name="replicas", stages=[stage((0, 4), replica([0], 6, 3), replica([1], 2), zero=1)], vendors="gc", precision="fp32"
)
CHUNKS = [chunked([(0, 1), (2, 3)], replica([0], 8, 2)), chunked([(1, 2), (3, 4)], replica([1], 8, 2))]
SCHEDULES = [
    Case(name="ministages", stages=CHUNKS, schedule="ministages", vendors="gc", precision="fp32"),
    Case(name="zero_bubble", stages=PIPELINE.stages, schedule="zero_bubble", vendors="gc", precision="fp32"),
    Case(
        name="layered, zero3", stages=[stage((0, 4), replica([0], 6, 3), replica([1], 2), zero=3)], schedule="layered",
        vendors="gc", precision="fp32",
    ),
]  # fmt: skip


def train_with_one_device(rank: int, store: Any, case: Case) -> list[float]:
    """Losses of the case with rank 0 on the device and the others on CPUs."""
    device = choose_device(0, 1) if rank == 0 else Device(vendor="cpu")
    world = connect(Rendezvous.on_one_host(store, rank, case.size), device=device, islands=case.islands)
    losses, _, _ = train(world, case)
    world.close()
    return losses


@pytest.mark.parametrize("case", [ONE, PIPELINE, REPLICAS, *SCHEDULES], ids=lambda case: case.name)
def test_training_with_a_device_equals_cpus(case: Case) -> None:
    reference = run_ranks(1, train, case.alone(), device=Device(vendor="cpu"))[0][0]
    for losses in values(start_ranks(case.size, train_with_one_device, case, timeout_seconds=240)):
        assert losses == pytest.approx(reference, rel=1e-4)
