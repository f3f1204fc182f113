"""Collectives beside plain arithmetic: one that its caller waits for, or large ones under way at the same time, whose chunks
use memory again while others need theirs."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import World, all_gather_by_ranges, reduce_scatter_by_ranges
from hethub.communicator.torch_private import all_gather_single, reduce_scatter_single
from hethub.runtime.acceptance.patterns import numbers, total
from hethub.spec.ranges import Range

# Ten of the bridge's chunks and a rest; CPUs of a host take one whatever it is.
DEVICE_NUMEL, CPU_NUMEL = 5_000_003, 500_003
AT_ONCE = 3  # of an operation: the third has the first one's memory

# A Work, None where the caller has waited, and whether the result is right.
Begun = tuple[Any, Callable[[], bool]]
# Starts an operation on so many numbers, of a repetition; whether it is asynchronous comes last.
Begin = Callable[[dist.ProcessGroup, World, int, int, bool], Begun]


def wrong_alone(group: dist.ProcessGroup, world: World, numel: int) -> list[str]:
    """The operations with a number that plain arithmetic does not give; all members call it."""
    return [name for name, begin in OPERATIONS if not begin(group, world, numel, 0, False)[1]()]


def wrong_at_once(group: dist.ProcessGroup, world: World, numel: int) -> list[str]:
    """Do what `wrong_alone` does, with several calls of each operation under way at once."""
    wrong = []
    for name, begin in OPERATIONS:
        begun = [begin(group, world, numel, step, True) for step in range(AT_ONCE)]
        for work, _ in begun:
            work.wait()
        if not all(is_right() for _, is_right in begun):
            wrong.append(name)
    return wrong


def _all_reduce(group: dist.ProcessGroup, world: World, numel: int, step: int, is_async: bool) -> Begun:
    found = numbers(world, world.rank, numel, step)
    work = dist.all_reduce(found, group=group, async_op=is_async)
    return work, lambda: torch.equal(found, total(world, group, numel, step))


def _mean_in_bf16(group: dist.ProcessGroup, world: World, numel: int, step: int, is_async: bool) -> Begun:
    """Sums of small numbers are exact in bf16; each member's own, divided before it is added, is rounded once more."""
    members = dist.get_process_group_ranks(group)
    found = (numbers(world, world.rank, numel, step) % 4).bfloat16()
    work = dist.all_reduce(found, op=dist.ReduceOp.AVG, group=group, async_op=is_async)

    def is_right() -> bool:
        mean = sum((numbers(world, rank, numel, step) % 4 for rank in members), torch.zeros_like(found.float()))
        error = (found.float() - mean / len(members)).abs().max().item()
        return error <= 3 * (len(members) + 1) * torch.finfo(torch.bfloat16).eps / 2

    return work, is_right


def _all_gather(group: dist.ProcessGroup, world: World, numel: int, step: int, is_async: bool) -> Begun:
    members = dist.get_process_group_ranks(group)
    own = numbers(world, world.rank, numel // len(members), step)
    found = torch.empty(own.numel() * len(members), device=own.device)
    work = all_gather_single(found, own, group=group, async_op=is_async)
    return work, lambda: torch.equal(found, torch.cat([numbers(world, rank, own.numel(), step) for rank in members]))


def _reduce_scatter(group: dist.ProcessGroup, world: World, numel: int, step: int, is_async: bool) -> Begun:
    size = numel // group.size()
    given = numbers(world, world.rank, size * group.size(), step)
    found = torch.empty(size, device=given.device)
    work = reduce_scatter_single(found, given, group=group, async_op=is_async)
    return work, lambda: torch.equal(found, total(world, group, given.numel(), step).split(size)[group.rank()])


def _broadcast(group: dist.ProcessGroup, world: World, numel: int, step: int, is_async: bool) -> Begun:
    source = dist.get_process_group_ranks(group)[-1]
    found = numbers(world, world.rank, numel, step)
    work = dist.broadcast(found, src=source, group=group, async_op=is_async)
    return work, lambda: torch.equal(found, numbers(world, source, numel, step))


def _all_to_all(group: dist.ProcessGroup, world: World, numel: int, step: int, is_async: bool) -> Begun:
    members, size = dist.get_process_group_ranks(group), numel // group.size()
    given = numbers(world, world.rank, size * len(members), step)
    found = torch.empty_like(given)
    work = dist.all_to_all_single(found, given, group=group, async_op=is_async)

    def is_right() -> bool:
        parts = [numbers(world, rank, given.numel(), step).split(size)[group.rank()] for rank in members]
        return torch.equal(found, torch.cat(parts))

    return work, is_right


def _scatter_unevenly(group: dist.ProcessGroup, world: World, numel: int, step: int, is_async: bool) -> Begun:
    ranges = uneven(numel, group.size())
    mine, flat = ranges[group.rank()], numbers(world, world.rank, numel, step)
    work = reduce_scatter_by_ranges(group, flat, ranges, async_op=is_async)
    return work, lambda: torch.equal(_part(flat, mine), _part(total(world, group, numel, step), mine))


def _gather_unevenly(group: dist.ProcessGroup, world: World, numel: int, step: int, is_async: bool) -> Begun:
    ranges, members = uneven(numel, group.size()), dist.get_process_group_ranks(group)
    flat = numbers(world, world.rank, numel, step)
    work = all_gather_by_ranges(group, flat, ranges, async_op=is_async)

    def is_right() -> bool:
        pairs = zip(members, ranges, strict=True)
        return all(torch.equal(_part(flat, own), _part(numbers(world, rank, numel, step), own)) for rank, own in pairs)

    return work, is_right


def uneven(numel: int, size: int) -> list[Range]:
    """Shares that are unlike, as training with uneven state shares takes them."""
    weights = [position + 1 for position in range(size)]
    cuts = [0, *(numel * sum(weights[: position + 1]) // sum(weights) for position in range(size))]
    return [Range(start, stop) for start, stop in pairwise(cuts)]


def _part(flat: Tensor, place: Range) -> Tensor:
    return flat[place.start : place.stop]


OPERATIONS: tuple[tuple[str, Begin], ...] = (
    ("all_reduce", _all_reduce),
    ("mean in bf16", _mean_in_bf16),
    ("all_gather", _all_gather),
    ("reduce_scatter", _reduce_scatter),
    ("broadcast", _broadcast),
    ("all_to_all", _all_to_all),
    ("uneven reduce_scatter", _scatter_unevenly),
    ("uneven all_gather", _gather_unevenly),
)
