"""The by-ranges operations through a group's own library: on devices NCCL and RCCL, here Gloo."""

import time
import warnings
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import prepare_by_ranges, reduce_scatter_by_ranges, torch_private
from hethub.communicator.groups.uneven import native_all_gather, native_reduce_scatter
from hethub.spec.ranges import Range, from_sizes, nearly_equal, split
from tests.support.ranks import run_ranks, start_ranks, values


def scatter_and_gather(world: Any) -> tuple[list[float], list[float]]:
    warnings.simplefilter("error")  # torch 2.13 warns at the names that these operations had
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


def unequal(world: Any, sizes: list[int]) -> tuple[list[float], list[float], list[float]]:
    """This rank's share of the sum, the input after it, and the whole put together again."""
    group, ranges = world.default_group, from_sizes(sizes)
    mine = ranges[world.rank]
    flat = torch.arange(6.0) + 10 * world.rank
    own = torch.empty(mine.size)
    native_reduce_scatter(group, own, flat, ranges, async_op=False)
    gathered = torch.zeros(6)
    gathered[mine.start : mine.stop] = own
    native_all_gather(group, gathered, ranges, async_op=False)
    return own.tolist(), flat[mine.start : mine.stop].tolist(), gathered.tolist()


@pytest.mark.parametrize("sizes", [[2, 2, 2], [1, 1, 4], [1, 0, 5], [0, 6, 0], [3, 1, 2]])
def test_unequal_and_empty_shares_stay_with_the_library(sizes: list[int]) -> None:
    total = [30 + 3.0 * i for i in range(6)]
    for rank, (own, untouched, whole) in enumerate(run_ranks(3, unequal, sizes)):
        mine = from_sizes(sizes)[rank]
        assert own == total[mine.start : mine.stop]
        assert untouched == [i + 10.0 * rank for i in range(mine.start, mine.stop)]
        assert whole == total


@pytest.mark.parametrize(("size", "operations"), [(6, 1), (7, 2), (2, 1)])
def test_parts_of_a_bucket_take_two_operations_however_many_members_there_are(
    size: int, operations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one they would take as many as there are members: hundreds for a bucket."""
    called: list[str] = []
    singles = [(torch_private, name) for name in ("reduce_scatter_single", "all_gather_single")]
    for where, name in (*singles, (dist, "reduce"), (dist, "broadcast")):
        monkeypatch.setattr(where, name, lambda *args, name=name, **more: called.append(name))
    group, ranges = MagicMock(spec=dist.ProcessGroup), nearly_equal(size, 3)
    for rank in range(3):
        group.rank.return_value = rank
        flat = torch.zeros(size)
        native_reduce_scatter(group, flat[ranges[rank].start : ranges[rank].stop], flat, ranges, async_op=True)
        native_all_gather(group, flat, ranges, async_op=True)
    assert len(called) == 3 * 2 * operations


def refuse_outputs(world: Any) -> list[str]:
    said, flat, ranges = [], torch.ones(5), from_sizes([2, 3])
    for output in (torch.ones(4), torch.ones(ranges[world.rank].size, dtype=torch.float64)):
        with pytest.raises(ValueError, match="the output has") as raised:
            reduce_scatter_by_ranges(world.default_group, flat, ranges, output)
        said.append(str(raised.value))
    reduce_scatter_by_ranges(world.default_group, flat, ranges, async_op=False)
    assert flat[ranges[world.rank].start] == 2.0
    return said


@pytest.mark.parametrize("islands", [[[0], [1]], [[0, 1]]], ids=["bridged", "native"])
def test_an_output_that_is_not_as_this_ranks_range_is_refused(islands: list[list[int]]) -> None:
    """A longer one kept old numbers behind the sum."""
    for said, size in zip(run_ranks(2, refuse_outputs, islands=islands, timeout_seconds=60), (2, 3), strict=True):
        assert f"4 elements of torch.float32, but this rank's range {size} of torch.float32" in said[0]
        assert f"{size} elements of torch.float64" in said[1]


def leave_before_a_sum_is_there(rank: int, store: dist.Store) -> list[float]:
    """Rank 1 comes to the sum two seconds after rank 0 has asked to leave."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    group, tensor, ranges = torch_private.default_group(), torch.ones(10), [Range(0, 4), Range(4, 10)]
    prepare_by_ranges(group)
    if rank == 1:
        store.wait(["begun"])
        time.sleep(2)
    work = reduce_scatter_by_ranges(group, tensor, ranges)
    store.set("begun", "")
    del group
    dist.destroy_process_group()
    work.wait()
    return tensor.tolist()


@pytest.mark.parametrize("islands", ["0,1", "0|1"])
def test_a_sum_that_is_under_way_is_ended_before_a_rank_leaves(islands: str) -> None:
    outcomes = start_ranks(2, leave_before_a_sum_is_there, timeout_seconds=60, environment={"HETHUB_ISLANDS": islands})
    assert values(outcomes) == [[2.0] * 4 + [1.0] * 6, [1.0] * 4 + [2.0] * 6]
