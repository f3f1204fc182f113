"""A member of a group that does not come while the group is made, or ends: the others say so."""

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from hethub.communicator.context import Context
from hethub.communicator.joining import liveness
from hethub.spec.errors import RunFailed
from tests.support.ranks import start_ranks, values


def make_a_group_in_vain(rank, store, ends):
    """What new_group says when rank 1 does not come; or comes and `ends`, before it has told the number that it draws."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    if rank == 1 and ends:
        Context._agree_on_number = lambda *_: os._exit(9)
        dist.new_group([1, 2])
    if rank == 2:
        with pytest.raises(RunFailed) as raised:
            dist.new_group([1, 2], timeout=timedelta(seconds=25 if ends else 1))
        store.set("said", str(raised.value))
    return store.get("said").decode()


@pytest.mark.parametrize(
    ("ends", "said"),
    [(False, "could not meet the other ranks: wait timeout after 1000ms"), (True, "ends because rank 1 is gone")],
)
def test_a_rank_that_is_missing_when_a_group_is_made_is_no_raw_error_of_the_store(ends, said):
    """It was a DistStoreError with the names of keys, of a rank that ended behind the store's timeout of minutes."""
    environment = {"HETHUB_ISLANDS": "0|1|2"}
    outcomes = start_ranks(3, make_a_group_in_vain, ends, timeout_seconds=60, environment=environment)
    assert outcomes[2].error is None, outcomes[2].traceback
    assert outcomes[2].value.startswith(f"rank 2 {said}")
    assert "keys" not in outcomes[2].value


def make_a_group_whose_number_nobody_tells(rank, store):
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    if rank == 1:
        Context._agree_on_number = lambda *_: store.get("said")
    if rank:
        with pytest.raises(RunFailed if rank == 2 else ValueError) as raised:
            dist.new_group([1, 2], timeout=timedelta(seconds=3))
        store.set("said", "no number")
        return str(raised.value)
    return None


def test_a_groups_number_is_waited_for_as_long_as_its_timeout_says():
    outcomes = start_ranks(
        3, make_a_group_whose_number_nobody_tells, timeout_seconds=60, environment={"HETHUB_ISLANDS": "0|1|2"}
    )
    assert "has not heard the number of group" in outcomes[2].value, outcomes[2].traceback
    assert outcomes[2].value.endswith("from rank 1 within 3 s.")


def make_a_group_with_one_that_left(rank, store):
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    if rank == 1:
        dist.destroy_process_group()
        return None
    with pytest.raises(RunFailed) as raised:
        dist.new_group()
    return str(raised.value)


@pytest.mark.parametrize("islands", ["0|1|2", "0,1,2"])
def test_a_group_with_a_rank_that_has_left_is_not_waited_for(islands):
    """It was, for the 30 minutes that torch gives a new group."""
    outcomes = start_ranks(
        3, make_a_group_with_one_that_left, timeout_seconds=60, environment={"HETHUB_ISLANDS": islands}
    )
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].traceback
        said = f"rank {rank} cannot make a group with rank 1: it has destroyed its default process group"
        assert outcomes[rank].value.startswith(said)


def make_a_group_for_another_thread_with_one_that_left(world):
    if world.rank == 1:
        dist.destroy_process_group()
        return None
    liveness._LEAVING_SECONDS = 0.2
    with pytest.raises(RunFailed) as raised:
        world.gloo_group(timedelta(minutes=30))
    return str(raised.value)


def test_a_group_for_another_thread_does_not_wait_for_a_rank_that_has_left():
    connect = {"islands": [[0], [1], [2]], "timeout_seconds": 60}
    function = make_a_group_for_another_thread_with_one_that_left
    outcomes = start_ranks(3, function, connect=connect, timeout_seconds=40)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].traceback
        assert outcomes[rank].value.startswith(f"rank {rank} cannot make a group with rank 1: it has destroyed")


def refuse_memory(*_):
    raise RuntimeError("out of memory")


def make_a_group_without_memory(rank, store):
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    Context.stager = refuse_memory
    with pytest.raises(RuntimeError) as raised:
        dist.new_group([0, 1])
    return str(raised.value)


def test_what_else_may_fail_when_a_group_is_made_is_no_failed_meeting():
    outcomes = start_ranks(2, make_a_group_without_memory, timeout_seconds=60, environment={"HETHUB_ISLANDS": "0|1"})
    assert values(outcomes) == ["out of memory"] * 2
