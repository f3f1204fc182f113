"""The by-ranges operations through a group's own library: on devices NCCL and RCCL, here Gloo with equal ranges."""

from typing import Any

import torch

from hethub.communicator.groups.uneven import native_all_gather, native_reduce_scatter
from hethub.spec.ranges import split
from tests.support.ranks import run_ranks


def scatter_and_gather(world: Any) -> tuple[list[float], list[float]]:
    group = world.group([0, 1])
    ranges = split(6, 2)
    flat = torch.arange(6.0) + 10 * world.rank
    mine = flat[ranges[world.rank].start : ranges[world.rank].stop]
    native_reduce_scatter(group, mine, flat, ranges, async_op=True).wait()
    scattered = flat.clone()
    native_all_gather(group, flat, ranges, async_op=True).wait()
    return scattered.tolist(), flat.tolist()


def test_sums_land_in_place_and_reach_all() -> None:
    (first, whole), (second, also_whole) = run_ranks(2, scatter_and_gather)
    total = [10.0, 12.0, 14.0, 16.0, 18.0, 20.0]
    assert first[:3] == total[:3]
    assert second[3:] == total[3:]
    assert whole == also_whole == total
