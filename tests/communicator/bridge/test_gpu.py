"""The bridge between a device and a CPU: one rank on a device, others on CPUs. Run with `pytest -m gpu`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from hethub.communicator import Rendezvous, connect
from hethub.kernels.device import Device, choose_device
from tests.support.ranks import start_ranks, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs where torch finds a CUDA or ROCm device"),
]


def meet(rank, store, size, wire):
    """A world in which rank 0 has the device and the others none; islands by what they are."""
    device = choose_device(0, 1) if rank == 0 else Device(vendor="cpu")
    device.activate()
    return connect(Rendezvous.on_one_host(store, rank, size), device=device, wire=wire)


def numbers(rank, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduce_with_a_device(rank, store, size, wire):
    """The bits of every result: all ranks must hold the same, whoever added them."""
    world = meet(rank, store, size, wire)
    place, found = world.device.torch_device, []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            for num_elements in (5, 100_003, 1_500_001):
                if op == ReduceOp.AVG and dtype == torch.int64:
                    continue
                tensor = (numbers(rank, num_elements, torch.float32) * 100).to(dtype).to(place)
                work = dist.all_reduce(tensor, op=op, async_op=True)
                work.block_current_stream()
                doubled = tensor * 2  # on the stream that waits
                work.wait()
                assert torch.equal(doubled, tensor * 2)
                found.append(hash(tensor.cpu().view(torch.uint8).numpy().tobytes()))
    world.close()
    return found


@pytest.mark.parametrize("wire", ["exact", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_has_the_same_bits_on_device_and_cpu(size, wire):
    environment = {"PYTHONHASHSEED": "0"}
    outcomes = start_ranks(size, reduce_with_a_device, size, wire, environment=environment, timeout_seconds=240)
    results = values(outcomes)
    assert all(result == results[0] for result in results)


def move_with_a_device(rank, store, size):
    world = meet(rank, store, size, "exact")
    place = world.device.torch_device
    own = [numbers(r, 12, torch.float32).to(place) for r in range(size)]
    gathered = [torch.empty(12, device=place) for _ in range(size)]
    dist.all_gather(gathered, own[rank])
    assert all(torch.equal(a, b) for a, b in zip(gathered, own, strict=True))
    part = torch.empty(12 // size, device=place)
    dist.reduce_scatter_tensor(part, own[rank].clone())
    torch.testing.assert_close(part, sum(own).view(size, -1)[rank])
    exchanged = torch.empty(12, device=place)
    dist.all_to_all_single(exchanged, own[rank])
    assert torch.equal(exchanged, torch.cat([tensor.view(size, -1)[rank] for tensor in own]))
    columns = own[rank].clone().view(3, 4).t()
    dist.broadcast(columns, 1)
    assert torch.equal(columns, own[1].view(3, 4).t())
    received = torch.empty(12, device=place)
    arrival = world.receive(received, (rank - 1) % size, 3)
    sending = world.send(own[rank], (rank + 1) % size, 3)
    arrival.wait()
    sending.wait()
    assert torch.equal(received, own[(rank - 1) % size])
    world.close()
    return True


def test_moves_between_device_and_cpu():
    assert all(values(start_ranks(2, move_with_a_device, 2, timeout_seconds=120)))


def make_problem():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    return model, torch.randn(8, 64), torch.randn(8, 4)


def trained(model, x, y):
    """All parameters after three steps of plain SGD on the mean over the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([parameter.detach().cpu().view(-1) for parameter in model.parameters()])


def train_ddp(rank, store):
    world = meet(rank, store, 2, "exact")
    place = world.device.torch_device
    model, x, y = make_problem()
    mine = slice(4 * rank, 4 * rank + 4)
    flat = trained(DistributedDataParallel(model.to(place)), x[mine].to(place), y[mine].to(place))
    world.close()
    return flat


def test_ddp_over_a_device_and_a_cpu_equals_one_process():
    device, cpu = values(start_ranks(2, train_ddp, timeout_seconds=120))
    torch.testing.assert_close(device, cpu, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cpu, trained(*make_problem()), rtol=1e-4, atol=1e-5)
