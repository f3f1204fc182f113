"""Ordinary PyTorch programs over two emulated islands train as one process does."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import start_ranks, values

ISLANDS = {"HETHUB_ISLANDS": "0,2|1,3"}
TWO_ISLANDS = {"HETHUB_ISLANDS": "0|1"}


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).double()


def make_batch():
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(8, 16, generator=generator, dtype=torch.float64) for _ in range(2))


def steps(model, x, y, count=3):
    """Losses of `count` steps of plain SGD on the mean over the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def reference_losses(count=3):
    return torch.stack(steps(make_model(), *make_batch(), count))


def my_part(rank):
    return tuple(tensor[2 * rank : 2 * rank + 2] for tensor in make_batch())


def averaged(losses):
    stacked = torch.stack(losses)
    dist.all_reduce(stacked, op=dist.ReduceOp.AVG)
    return stacked


def train_fsdp2(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (4,))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return averaged(steps(model, *my_part(rank)))


def train_hsdp(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    fully_shard(model, mesh=mesh)
    return averaged(steps(model, *my_part(rank)))


def train_tensor_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (4,))
    model = parallelize_module(make_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return torch.stack(steps(model, *make_batch()))


def train_pipeline(rank):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    layers = [nn.Identity(), *make_model()]
    module = layers[rank]
    stage = PipelineStage(module, rank, 4, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.MSELoss())
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    x, y = make_batch()
    losses = []
    for _ in range(3):
        of_micro_batches = []
        if optimizer is not None:
            optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == 3:
            schedule.step(target=y, losses=of_micro_batches)
            losses.append(torch.stack(of_micro_batches).mean().detach())
        else:
            schedule.step()
        if optimizer is not None:
            optimizer.step()
    found = torch.stack(losses) if losses else torch.zeros(3, dtype=torch.float64)
    dist.all_reduce(found)
    return found


def train_functional(rank):
    """Data parallelism by hand with functional collectives."""
    from torch.distributed._functional_collectives import all_reduce

    model, (x, y) = make_model(), my_part(rank)
    losses = []
    for _ in range(3):
        loss = nn.functional.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * all_reduce(gradient, "avg", group=dist.group.WORLD)
        losses.append(loss.detach())
    return averaged(losses)


def train_2d(rank):
    """Tensor parallelism inside pairs of ranks, FSDP2 across them; the pairs of one dimension span the islands."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make_model(), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    x, y = make_batch()
    half = slice(4 * mesh.get_local_rank("data"), 4 * mesh.get_local_rank("data") + 4)
    return averaged(steps(model, x[half], y[half]))


def train_compiled(rank, backend):
    """Data parallelism by hand, model and update compiled; the update holds the functional collectives."""
    from torch.distributed._functional_collectives import all_reduce

    model = make_model()
    x, y = (part.chunk(dist.get_world_size())[rank] for part in make_batch())

    def updated(values, gradients):
        return [
            value - 0.1 * all_reduce(gradient, "avg", group=dist.group.WORLD)
            for value, gradient in zip(values, gradients, strict=True)
        ]

    forward = torch.compile(model, backend=backend)
    update = torch.compile(updated, backend=backend, fullgraph=True)
    losses = []
    for _ in range(3):
        loss = nn.functional.mse_loss(forward(x), y)
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, value in zip(parameters, update(parameters, list(gradients)), strict=True):
                parameter.copy_(value)
        losses.append(loss.detach())
    return averaged(losses)


PROGRAMS = {
    function.__name__: function
    for function in (
        train_fsdp2,
        train_hsdp,
        train_tensor_parallel,
        train_pipeline,
        train_functional,
        train_2d,
    )
}


def run_program(rank, store, name):
    dist.init_process_group("hethub", store=store, rank=rank, world_size=4)
    losses = PROGRAMS[name](rank)
    dist.barrier()
    dist.destroy_process_group()
    return losses


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_one_process(name):
    for losses in values(start_ranks(4, run_program, name, environment=ISLANDS, timeout_seconds=120)):
        torch.testing.assert_close(losses, reference_losses(), rtol=1e-9, atol=1e-12)


def run_compiled(rank, store, backend):
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    losses = train_compiled(rank, backend)
    dist.barrier()
    dist.destroy_process_group()
    return losses


@pytest.mark.slow
def test_a_compiled_program_equals_one_process():
    for losses in values(start_ranks(2, run_compiled, "aot_eager", environment=TWO_ISLANDS, timeout_seconds=120)):
        torch.testing.assert_close(losses, reference_losses(), rtol=1e-9, atol=1e-12)


def train_compiled_ddp(rank, store):
    """DDP whose forward copies rank 0's buffers: Dynamo meets the group itself there."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    model = make_model()
    model.register_buffer("copied", torch.full((3,), float(rank)))
    x, y = (part.chunk(2)[rank] for part in make_batch())
    compiled = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    losses = averaged(steps(compiled, x, y))
    copied = model.copied.tolist()
    dist.barrier()
    dist.destroy_process_group()
    return losses, copied


def test_compiled_ddp_equals_one_process():
    for losses, copied in values(start_ranks(2, train_compiled_ddp, environment=TWO_ISLANDS, timeout_seconds=120)):
        torch.testing.assert_close(losses, reference_losses(), rtol=1e-9, atol=1e-12)
        assert copied == [0.0] * 3


POWER_SGD_STEPS = 8


def train_with_power_sgd(rank, store):
    """The losses, and how much smaller its gradients were when they were sent.

    A batch of 8 gives gradients of rank 8 at most, which an approximation of rank 8 holds whole.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    dist.init_process_group("hethub", store=store, rank=rank, world_size=4)
    model = nn.parallel.DistributedDataParallel(make_model())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = averaged(steps(model, *my_part(rank), POWER_SGD_STEPS))
    dist.barrier()
    dist.destroy_process_group()
    return losses, state.compression_stats()[0]


def test_ddp_with_power_sgd_equals_one_process():
    for losses, times_smaller in values(start_ranks(4, train_with_power_sgd, environment=ISLANDS)):
        assert times_smaller > 1
        torch.testing.assert_close(losses, reference_losses(POWER_SGD_STEPS), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler (g++): Inductor compiles for the CPU")
def test_inductor_compiles_functional_collectives(tmp_path):
    environment = {
        **TWO_ISLANDS,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    for losses in values(start_ranks(2, run_compiled, "inductor", environment=environment, timeout_seconds=240)):
        torch.testing.assert_close(losses, reference_losses(), rtol=1e-9, atol=1e-12)
