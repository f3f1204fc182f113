"""Bridged operations appear in torch's profiler."""

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks


def profiled_names(world):
    with torch.autograd.profiler.profile() as profile:
        dist.all_reduce(torch.ones(1000))
        dist.broadcast(torch.ones(10), 0, async_op=True).wait()
    return {event.name: event.is_async for event in profile.function_events}


def test_operations_are_profiler_ranges():
    for names in run_ranks(2, profiled_names, islands=[[0], [1]]):
        assert "hethub:all_reduce" in names  # its caller waits: it runs in the caller's thread
        assert names["hethub:broadcast"] is True
