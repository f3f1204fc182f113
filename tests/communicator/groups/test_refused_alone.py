"""An operation that one rank refuses alone: what it calls next is not taken for its part, and every rank is told."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import reduce_scatter_by_ranges
from hethub.spec.errors import BadInput, RunFailed
from hethub.spec.ranges import from_sizes
from tests.support.ranks import start_ranks, values

SMALL, LARGE = 8, 200_000  # sums of few numbers go the short way
SHIFTED = {
    "all_reduce": (
        lambda tensor: dist.all_reduce(tensor),
        lambda size: dist.all_reduce(torch.zeros(1).expand(size)),
    ),
    "reduce": (
        lambda tensor: dist.reduce(tensor, 1),
        lambda size: dist.reduce(torch.zeros(size), 9),
    ),
    "broadcast": (
        lambda tensor: dist.broadcast(tensor, 0),
        lambda size: dist.broadcast(torch.zeros(size).to_sparse(), 0),
    ),
    "all_gather": (
        lambda tensor: dist.all_gather(list(tensor.tensor_split(2)), tensor[: tensor.numel() // 2].clone()),
        lambda size: dist.all_gather([torch.zeros(size // 2), torch.zeros(1)], torch.zeros(size)),
    ),
    "reduce_scatter_tensor": (
        lambda tensor: dist.reduce_scatter_tensor(tensor[: tensor.numel() // 2], tensor.clone()),
        lambda size: dist.reduce_scatter_tensor(torch.zeros(size), torch.zeros(size)),
    ),
    "all_to_all_single": (
        lambda tensor: dist.all_to_all_single(tensor, tensor.clone()),
        lambda size: dist.all_to_all_single(torch.zeros(size), torch.zeros(size), [1, 1], [1, 1]),
    ),
    "reduce_scatter_by_ranges": (
        lambda tensor: reduce_scatter_by_ranges(dist.group.WORLD, tensor, halves(tensor.numel())).wait(),
        lambda size: reduce_scatter_by_ranges(dist.group.WORLD, torch.zeros(size + 1), halves(size)),
    ),
}
"""What all ranks call, and what rank 0 alone gives it first."""


def halves(size):
    return from_sizes([size // 2] * 2)


def call_behind_a_refusal(rank, store, name, size, seconds):
    """What three calls give or say: rank 0 is refused the first, the others begin it."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=seconds))
    call, refused = SHIFTED[name]
    call(torch.ones(size))  # what connects at the first call is connected
    said = []
    for step in range(3):
        tensor = torch.full((size,), 10.0**step)
        try:
            if rank == step == 0:
                with pytest.raises((BadInput, ValueError, RuntimeError)):
                    refused(size)
            else:
                call(tensor)
                said.append(tensor.unique().tolist())
        except RuntimeError as error:
            said.append(str(error))
    return said


SHARED_MEMORY = [
    *((name, LARGE, "") for name in SHIFTED),
    ("all_reduce", SMALL, ""),
    ("all_reduce", LARGE, "0"),
    ("reduce_scatter_tensor", LARGE, "0,1"),
    ("all_to_all_single", LARGE, "0,1"),
]


@pytest.mark.parametrize(("name", "size", "staged"), SHARED_MEMORY)
def test_no_call_is_taken_for_the_one_before(name, size, staged):
    """Over shared memory every rank that waits for another is told at once, by rank, operation and peer."""
    environment = {"HETHUB_ISLANDS": "0|1", "HETHUB_STAGED_RANKS": staged, "HETHUB_RELAY": "shm"}
    own, other = values(
        start_ranks(2, call_behind_a_refusal, name, size, 60, timeout_seconds=50, environment=environment)
    )
    only_sends = name in ("reduce", "broadcast")  # rank 0 waits for nobody then, and keeps what it has
    kept = [each for each in own if not isinstance(each, str)]
    assert kept in ([], [[10.0]][:only_sends], [[10.0], [100.0]][: 2 * only_sends])
    assert all(f"{name} in group '0' (ranks 0, 1)" in each and "on rank 1" in each for each in other)
    assert "failed on rank 1 with rank 0: " in other[0]
    assert "in another operation of the group" in other[0] or "do not fit" in other[0]


UNMET = [
    ("0|1", "gloo", "all_reduce", SMALL),
    ("0|1", "gloo", "all_reduce", LARGE),
    ("0,1", "auto", "reduce_scatter_tensor", LARGE),
    ("0,1", "auto", "all_to_all_single", SMALL),
    ("0,1", "auto", "reduce_scatter_by_ranges", LARGE),
]


@pytest.mark.parametrize(("islands", "relay", "name", "size"), UNMET)
def test_what_matches_by_tags_waits_until_the_timeout(islands, relay, name, size):
    """Gloo between islands, and inside one: its own count of collectives goes on where one is refused."""
    environment = {"HETHUB_ISLANDS": islands, "HETHUB_RELAY": relay}
    said = values(start_ranks(2, call_behind_a_refusal, name, size, 5, timeout_seconds=50, environment=environment))
    assert all(isinstance(each, str) for each in [*said[0], *said[1]]), said


def call_unlike(rank, store, call, name="all_reduce"):
    """What a reduction says where rank 0's call differs from rank 1's."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=5))
    with pytest.raises(RunFailed) as raised:
        REDUCING[name](*UNLIKE[call][rank])
    return str(raised.value)


UNLIKE = {
    "type": [(torch.ones(8),), (torch.ones(8, dtype=torch.int32),)],
    "size, over as many bytes": [(torch.ones(8),), (torch.ones(16, dtype=torch.bfloat16),)],
    "reduction": [(torch.ones(8), dist.ReduceOp.SUM), (torch.ones(8), dist.ReduceOp.MAX)],
    "reduction of many": [(torch.ones(LARGE), dist.ReduceOp.SUM), (torch.ones(LARGE), dist.ReduceOp.MAX)],
}


@pytest.mark.parametrize("call", UNLIKE)
def test_calls_of_as_many_bytes_that_differ_otherwise_do_not_meet(call):
    environment = {"HETHUB_ISLANDS": "0|1", "HETHUB_RELAY": "shm"}
    for said in values(start_ranks(2, call_unlike, call, timeout_seconds=50, environment=environment)):
        assert "in another operation of the group" in said


REDUCING = {
    "all_reduce": dist.all_reduce,
    "reduce_scatter_tensor": lambda tensor, op: dist.reduce_scatter_tensor(tensor[: tensor.numel() // 2].clone(), tensor, op),
    "reduce_scatter_by_ranges": lambda tensor, op: reduce_scatter_by_ranges(
        dist.group.WORLD, tensor, halves(tensor.numel()), op=op
    ).wait(),
}  # fmt: skip


@pytest.mark.parametrize("staged", ["", "0,1"])
@pytest.mark.parametrize("name", REDUCING)
def test_no_sum_is_added_to_a_largest(name, staged):
    """All ranks had numbers, and no word."""
    environment = {"HETHUB_ISLANDS": "0|1", "HETHUB_RELAY": "shm", "HETHUB_STAGED_RANKS": staged}
    ended = start_ranks(2, call_unlike, "reduction of many", name, timeout_seconds=50, environment=environment)
    for said in values(ended):
        assert f"{name} in group '0' (ranks 0, 1)" in said
        assert "in another operation of the group" in said


def test_sum_and_largest_do_not_meet_by_tags():
    environment = {"HETHUB_ISLANDS": "0|1", "HETHUB_RELAY": "gloo"}
    for said in values(start_ranks(2, call_unlike, "reduction", timeout_seconds=50, environment=environment)):
        assert "no answer within the timeout" in said


def refuse_together(rank, store):
    """Sums around operations that both ranks refuse, a queued sum and a barrier of Gloo's before them."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    found = []
    for step in range(20):
        tensor = torch.full((SMALL,), float(step))
        works = [dist.all_reduce(tensor, async_op=True), dist.barrier(async_op=True)]
        with pytest.raises((BadInput, ValueError, RuntimeError)):
            SHIFTED["reduce_scatter_tensor"][1](SMALL)
        sparse = torch.full((SMALL,), float(step)).to_sparse()
        dist.all_reduce(sparse)
        for work in works:
            work.wait()
        found.append((tensor[0].item(), sparse.to_dense()[0].item()))
    return found


@pytest.mark.parametrize("islands", ["0|1", "0,1"])
def test_what_all_refuse_leaves_gloo_and_bridge_in_step(islands):
    for found in values(start_ranks(2, refuse_together, timeout_seconds=50, environment={"HETHUB_ISLANDS": islands})):
        assert found == [(2.0 * step, 2.0 * step) for step in range(20)]


def expect_more_than_is_sent(rank, store):
    """What an all-to-all says on a rank that expects six elements of rank 0, which sends it four."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=5))
    rows = [[4, 4], [6, 4]][rank]
    try:
        dist.all_to_all_single(torch.zeros(sum(rows)), torch.ones(8), rows, [4, 4])
    except RunFailed as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("relay", "why"), [("gloo", "no answer within the timeout"), ("shm", "16 bytes, and 24 were expected")]
)
def test_a_message_of_another_size_is_not_taken(relay, why):
    environment = {"HETHUB_ISLANDS": "0|1", "HETHUB_RELAY": relay}
    said = values(start_ranks(2, expect_more_than_is_sent, timeout_seconds=50, environment=environment))
    assert "all_to_all_single in group '0' (ranks 0, 1) failed on rank 1 with rank 0: " in said[1]
    assert why in said[1]
