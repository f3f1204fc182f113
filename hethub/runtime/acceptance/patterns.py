"""Numbers by which a collective is checked: fp32 sums them exactly, in any order, and every rank has other ones."""

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import World


def numbers(world: World, rank: int, numel: int, step: int = 0) -> Tensor:
    """A rank's numbers, integers below 251, on this rank's device; other ones in each repetition, or to each receiver."""
    return ((torch.arange(numel, device=world.device.torch_device) * (rank + 3) + step) % 251).float()


def total(world: World, group: dist.ProcessGroup, numel: int, step: int) -> Tensor:
    """Their sum over a group's members."""
    members = dist.get_process_group_ranks(group)
    zeros = torch.zeros(numel, device=world.device.torch_device)
    return sum((numbers(world, rank, numel, step) for rank in members), zeros)
