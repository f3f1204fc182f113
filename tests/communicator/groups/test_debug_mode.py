"""Debug mode: the rank that enters another operation, or the same one otherwise, is named before anything is sent."""

import re

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import all_gather_by_ranges, reduce_scatter_by_ranges
from hethub.communicator.groups import debug
from hethub.spec.ranges import from_sizes
from tests.support.ranks import start_ranks, values


def enter_another_operation(world):
    if world.rank == 2:
        dist.broadcast(torch.ones(5), 0)
    else:
        dist.all_reduce(torch.ones(5))


def use_another_shape(world):
    dist.all_reduce(torch.ones(6 if world.rank == 1 else 5))


def use_another_reduction(world):
    dist.all_reduce(torch.ones(5), dist.ReduceOp.MAX if world.rank == 1 else dist.ReduceOp.SUM)


def use_another_root(world):
    dist.broadcast(torch.ones(5), 2 if world.rank == 1 else 0)


def gather_at_another_root(world):
    at = 2 if world.rank == 1 else 0
    dist.gather(torch.ones(5), [torch.empty(5) for _ in range(3)] if world.rank == at else None, dst=at)


def scatter_from_another_root(world):
    source = 2 if world.rank == 1 else 0
    dist.scatter(torch.empty(5), [torch.ones(5) for _ in range(3)] if world.rank == source else None, src=source)


def reduce_lists_otherwise(world):
    op = dist.ReduceOp.MAX if world.rank == 1 else dist.ReduceOp.SUM
    dist.reduce_scatter(torch.empty(5), [torch.ones(5) for _ in range(3)], op=op)


def reduce_other_ranges(world):
    sizes = [1, 2, 6] if world.rank == 1 else [1, 3, 5]
    reduce_scatter_by_ranges(world.default_group, torch.ones(9), from_sizes(sizes)).wait()


def gather_other_ranges(world):
    sizes = [1, 2, 6] if world.rank == 1 else [1, 3, 5]
    all_gather_by_ranges(world.default_group, torch.ones(9), from_sizes(sizes)).wait()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (gather_at_another_root, "rank 0 enters gather .*root 0.* while rank 1 enters .*root 2"),
        (scatter_from_another_root, "rank 0 enters scatter .*root 0.* while rank 1 enters .*root 2"),
        (reduce_lists_otherwise, "rank 0 enters reduce_scatter .*SUM.* while rank 1 enters .*MAX"),
        (reduce_other_ranges, "rank 0 enters reduce_scatter_by_ranges .*sizes 1 3 5.* while rank 1 .*sizes 1 2 6"),
        (gather_other_ranges, "rank 0 enters all_gather_by_ranges .*sizes 1 3 5.* while rank 1 .*sizes 1 2 6"),
        (use_another_reduction, "rank 0 enters all_reduce .*SUM.* while rank 1 enters .*MAX"),
        (use_another_root, "rank 0 enters broadcast .*root 0.* while rank 1 enters .*root 2"),
        (enter_another_operation, "rank 0 enters all_reduce .* while rank 2 enters broadcast"),
        (use_another_shape, r"rank 0 enters all_reduce .*float32\[5\].* while rank 1 enters .*float32\[6\]"),
    ],
)
def test_debug_mode_names_the_rank_that_does_something_else(function, message):
    outcomes = start_ranks(3, function, connect={"islands": [[0, 2], [1]], "debug": True}, timeout_seconds=60)
    assert re.search(message, outcomes[0].error[1]), outcomes[0]
    assert all(outcome.error[0] == "RunFailed" for outcome in outcomes)


def test_a_difference_is_seen_behind_what_is_said():
    """Sizes of as many ranks are not all said: those of the last ones alone may differ."""
    sizes, others = [1_000_000] * 100, [*[1_000_000] * 98, 999_999, 1_000_001]
    told = [
        debug.describe("all_gather_by_ranges", 123_456, [], debug.range_words(from_sizes(each)))
        for each in (sizes, others)
    ]
    assert told[0] != told[1]
    assert max(len(each.encode()) for each in told) <= debug._BYTES


def reduce_to_each(world):
    tensors = [torch.ones(5) for _ in range(world.size)]
    for root, tensor in enumerate(tensors):
        dist.reduce(tensor, root)
    return tensors[world.rank][0].item()


def test_debug_mode_takes_the_ranks_of_a_device_for_alike():
    """Of a reduce on a device only the root's library writes a result."""
    connect = {"islands": [[0, 2], [1]], "debug": True, "staged_ranks": [0, 2]}
    assert values(start_ranks(3, reduce_to_each, connect=connect, timeout_seconds=60)) == [3.0, 3.0, 3.0]
