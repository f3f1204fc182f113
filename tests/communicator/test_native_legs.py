"""The path of device tensors, run on the CPU with Gloo in the place of NCCL: native legs, exchange on the host."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hethub.communicator import torch_private
from hethub.communicator.islands import island_index
from hethub.communicator.native_legs import NativeLegs
from hethub.communicator.reduction import make_reduction
from hethub.kernels.device import Event
from tests.support.ranks import run_ranks


def contribution(rank, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def reduce_with_native_legs(world, sizes, host_island):
    """Ranks of the islands but `host_island` use native legs; that one reduces host tensors as CPUs do."""
    group = world.default_group
    home = world.islands[island_index(world.islands, world.rank)]
    native = None
    if len(home) > 1:
        store = dist.PrefixStore(f"test/{home[0]}", world._context.rendezvous.store)
        native = torch_private.create_gloo_group(store, home.index(world.rank), len(home), 60, "127.0.0.1")
    legs = NativeLegs(group._bridge, native, world.device)
    errors = []
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        for size in sizes:
            inputs = torch.stack([contribution(rank, size) for rank in range(world.size)]).double()
            exact = {ReduceOp.SUM: inputs.sum(0), ReduceOp.AVG: inputs.mean(0), ReduceOp.MAX: inputs.amax(0)}[op]
            tensor = contribution(world.rank, size)
            reduction = make_reduction(op, torch.float32, world.size)
            assert legs.can_reduce(reduction)
            if world.island_of(world.rank) == host_island:
                group._bridge.all_reduce(tensor, reduction)
            else:
                legs.all_reduce(tensor, Event(None), reduction)
            errors.append((tensor - exact).abs().max().item())
            everybody = [torch.empty_like(tensor) for _ in range(world.size)]
            dist.all_gather(everybody, tensor)
            assert all(torch.equal(other, tensor) for other in everybody)
    return max(errors)


@pytest.mark.parametrize("host_island", [None, 1])
@pytest.mark.parametrize("islands", [[[0, 1], [2, 3]], [[0, 3, 1], [2]]], ids=["2+2", "3+1"])
@pytest.mark.parametrize("relay", ["gloo", "shm"])
def test_native_legs_reduce_and_agree(islands, relay, host_island):
    sizes = [100_003, 3_000_001]
    assert max(run_ranks(4, reduce_with_native_legs, sizes, host_island, islands=islands, relay=relay)) < 1e-5
