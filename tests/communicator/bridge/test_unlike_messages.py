"""A message that is shorter or longer than its receiver's tensor: whatever carries it, both ranks are told, and keep their data."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import start_ranks, values

SIZES = [(4, 6), (6, 4), (300_000, 400_000), (400_000, 300_000)]
OF_PROGRAMS = [
    *(("", False, sizes) for sizes in SIZES),
    *(("0,1", False, sizes) for sizes in SIZES),
    ("", True, (4, 6)),
    ("1", False, (6, 4)),
]


def pass_unlike(rank, store, sizes, from_any):
    """What rank 0's send and rank 1's receive say, what their tensors hold then, and what a sum behind them gives or says."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=5))
    tensor = torch.full((sizes[rank],), float(rank))
    with pytest.raises(RuntimeError) as raised:
        dist.recv(tensor, None if from_any else 0, tag=3) if rank else dist.send(tensor, 1, tag=3)
    total = torch.ones(3)
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        return str(raised.value), tensor.unique().tolist(), str(error)
    return str(raised.value), tensor.unique().tolist(), total.tolist()


@pytest.mark.parametrize(("staged", "from_any", "sizes"), OF_PROGRAMS)
def test_a_programs_messages_of_unlike_sizes_do_not_meet(staged, from_any, sizes):
    """Gloo took a shorter one without a word, staged with what lay behind it, and ended the process at a longer one."""
    environment = {"HETHUB_ISLANDS": "0|1", "HETHUB_RELAY": "shm", "HETHUB_STAGED_RANKS": staged}
    ended = values(start_ranks(2, pass_unlike, sizes, from_any, timeout_seconds=50, environment=environment))
    for rank, (said, kept, total) in enumerate(ended):
        name = ("send", "recv from any rank" if from_any else "recv")[rank]
        assert f"{name} in group '0' (ranks 0, 1) failed on rank {rank}" in said
        assert kept == [float(rank)]
        assert total == [2.0] * 3 or (
            "0" in staged and f"failed on rank {rank}" in total
        )  # a staged send ends the world


def pass_unlike_in_the_world(world, sizes):
    """A message of a pipeline."""
    tensor = torch.full((sizes[world.rank],), float(world.rank))
    move = world.receive if world.rank else world.send
    move(tensor, 1 - world.rank, tag=3).wait()
    world.barrier()  # over shared memory a sender is through at once


# In Gloo's words or not; where one rank's timeout closes the other's connections before its own, that is what both say.
NO_ANSWER = "no answer within the timeout|Timed out waiting|connection closed"
IN_THE_WORLD = [
    ("shm", [], NO_ANSWER),
    ("shm", [0, 1], "has sent {} bytes, and {} were expected"),
    ("shm", [1], "has sent {} bytes, and {} were expected"),
    ("gloo", [0, 1], NO_ANSWER),
]


@pytest.mark.parametrize("sizes", SIZES[:2])
@pytest.mark.parametrize(("relay", "staged", "why"), IN_THE_WORLD)
def test_messages_of_unlike_sizes_are_told(relay, staged, why, sizes):
    connect = {"islands": [[0], [1]], "relay": relay, "staged_ranks": staged, "timeout_seconds": 5}
    ended = start_ranks(2, pass_unlike_in_the_world, sizes, connect=connect, timeout_seconds=50)
    assert [outcome.error[0] for outcome in ended] == ["RunFailed"] * 2
    assert "receive from rank 0 (tag 3) in the world of 2 ranks failed on rank 1 with rank 0: " in ended[1].error[1]
    said = [outcome.error[1] for outcome in ended]
    assert any(re.search(why.format(*(4 * size for size in sizes)), each) for each in said), said
