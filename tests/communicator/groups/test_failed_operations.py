"""An operation that fails on one rank alone: no later one is taken for it, and every rank is told."""

import os
import re
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.spec.errors import BadInput, RunFailed
from tests.support.rank_server import wait_for_all
from tests.support.ranks import start_ranks, values, wait_for

SIZES = [3, 200_000]  # sums of few numbers go the short way


def fail(*args):
    raise MemoryError("no memory for it")


def sums_around_a_failure(rank, store, part, size, async_op):
    """What three sums of rank + 1 give or say on each rank, where rank 0's own `part` of the first fails."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    found, group = [], dist.group.WORLD
    if rank == 0:
        whole, group.__dict__[part] = getattr(group, part), fail
    tensors = [torch.full((size,), 10.0**step * (rank + 1)) for step in range(3)]
    for step, tensor in enumerate(tensors):
        try:
            work = dist.all_reduce(tensor, async_op=async_op)
            if async_op:
                work.wait()
            found.append(tensor[0].item())
        except RuntimeError as error:
            found.append(str(error))
        if rank == 0 and step == 0:
            group.__dict__[part] = whole
            time.sleep(0.2)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", ["_load_whole", "_store"])
def test_no_sum_holds_another_ones_numbers(part, size, async_op):
    """`_load_whole` fails before the rank has sent anything, `_store` when its peers have all they need."""
    islands = {"HETHUB_ISLANDS": "0|1,2"}
    outcomes = start_ranks(3, sums_around_a_failure, part, size, async_op, timeout_seconds=60, environment=islands)
    own, *others = values(outcomes)
    cause = "all_reduce in group '0' (ranks 0-2) failed on rank 0: MemoryError: no memory for it"
    assert own[0] == cause
    assert all(f"cannot run on rank 0, behind an operation that failed: {cause}" in said for said in own[1:])
    for rank, found in enumerate(others, start=1):
        for step, each in enumerate(found):
            right = part == "_store" and step == 0 and each == 6.0
            assert right or (f"on rank {rank}" in each and "MemoryError" in each), (rank, found)


def wait_for_a_late_rank(rank, store, folder):
    """Rank 1 enters a group's sum when rank 0 has given it up at the group's own timeout."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    create = torch_private.create_gloo_group  # for which a second may be short, on a loaded machine
    torch_private.create_gloo_group = lambda store, rank, size, _, *where: create(store, rank, size, 60, *where)
    group, found = dist.new_group([0, 1], timeout=timedelta(seconds=1)), []
    for step in range(2):
        if rank == 1 and step == 0:
            wait_for(folder / "given up")
        try:
            tensor = torch.full((10,), 10.0**step * (rank + 1))
            dist.all_reduce(tensor, group=group)
            found.append(tensor[0].item())
        except RuntimeError as error:
            found.append(str(error))
        if rank == 0:
            (folder / "given up").touch()
    dist.destroy_process_group()
    return found


def test_a_group_given_up_at_its_timeout_is_not_used_again(tmp_path):
    islands = {"HETHUB_ISLANDS": "0|1"}
    early, late = values(start_ranks(2, wait_for_a_late_rank, tmp_path, timeout_seconds=60, environment=islands))
    assert "Timed out after 1 s" in early[0]
    assert "cannot run on rank 0" in early[1]
    told = "rank 0 failed: all_reduce in group '1' (ranks 0, 1) failed on rank 0: TimeoutError: Timed out after 1 s"
    assert late[0] == 3.0 or told in late[0]
    assert told in late[1]


def fail_when_rank_0_has_left(rank, store, folder):
    """What ranks 1 and 2 say of an operation that fails on rank 1, when nobody is left to pass that on."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    group = dist.new_group([1, 2])
    if rank == 0:
        dist.destroy_process_group()
        (folder / "left").touch()
        return ""
    wait_for(folder / "left")
    if rank == 1:
        group.__dict__["_load_whole"] = fail
    with pytest.raises(RunFailed) as raised:
        dist.all_reduce(torch.ones(200_000), group=group)
    if rank == 2:
        (folder / "felt").touch()
    wait_for(folder / "felt")  # it is not the end of rank 1's process that is felt
    dist.destroy_process_group()
    return str(raised.value)


def test_a_failure_is_felt_when_rank_0_has_left(tmp_path):
    """The timeout is half an hour."""
    own = {"timeout_seconds": 60, "environment": {"HETHUB_ISLANDS": "0|1|2"}}
    _, *said = values(start_ranks(3, fail_when_rank_0_has_left, tmp_path, **own))
    assert "all_reduce in group '1' (ranks 1, 2) failed on rank 1: MemoryError: no memory for it" in said[0]
    assert "all_reduce in group '1' (ranks 1, 2) failed on rank 2 with rank 1: " in said[1]


def submit_in_vain(world, size):
    """What an all-reduce says that could not be queued, or whose peer's could not, and the one behind it."""
    said, worker = [], world.default_group._worker
    if world.rank == 0:
        worker.__dict__["submit"] = refuse_a_thread
    for _ in range(2):
        with pytest.raises(RunFailed) as error:
            dist.all_reduce(torch.ones(size))
        said.append(str(error.value))
        worker.__dict__.pop("submit", None)
    return said


def refuse_a_thread(*args, **named):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("size", SIZES)
def test_what_cannot_be_queued_fails_on_all_ranks_and_holds_no_turn(size):
    options = {"islands": [[0, 1], [2]], "staged_ranks": [0, 1], "timeout_seconds": 30}
    for said in values(start_ranks(3, submit_in_vain, size, connect=options, timeout_seconds=25)):
        assert all("failed on rank 0: RuntimeError: can't start new thread" in each for each in said)


REFUSED = {
    "has no meaning": lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BXOR),
    "broadcast was given rank 9 of the group, whose ranks are 0 to 1": lambda: dist.broadcast(torch.ones(3), 9),
    "broadcast was given rank -1": lambda: dist.broadcast(torch.ones(3), -1),
    "reduce was given rank 9": lambda: dist.reduce(torch.ones(3), 9),
    "gather was given rank 9": lambda: dist.gather(torch.ones(3), None, 9),
    "scatter was given rank 9": lambda: dist.scatter(torch.ones(3), None, 9),
    "send was given rank 9": lambda: dist.send(torch.ones(3), 9),
    "recv was given rank 9": lambda: dist.recv(torch.ones(3), 9),
    "all_reduce was given .* several elements lie in one place": lambda: dist.all_reduce(torch.ones(1).expand(4)),
    "reduce was given .* several elements lie in one place": lambda: dist.reduce(torch.ones(1).expand(4), 0),
    "broadcast was given .* several elements lie in one place": lambda: dist.broadcast(torch.ones(1).expand(4), 0),
    "all_gather_into_tensor was given .* several": lambda: dist.all_gather_into_tensor(
        torch.ones(1).expand(4), torch.ones(2)
    ),
    "on device meta": lambda: dist.all_reduce(torch.empty(3, device="meta")),
    "broadcast was given .* torch.sparse_coo": lambda: dist.broadcast(torch.ones(3).to_sparse(), 0),
}


def refuse(rank, store):
    """What bad arguments say, and the sum behind them."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    for said, call in REFUSED.items():
        with pytest.raises(BadInput, match=said):
            call()
    tensor = torch.ones(3)
    dist.reduce(tensor, 0)
    dist.broadcast(tensor, 0)
    own = [torch.zeros(2), torch.zeros(2)] if rank == 1 else None
    dist.gather(torch.ones(1).expand(2), own, 1)  # what is only read may lie in one place
    dist.destroy_process_group()
    return tensor[0].item(), own and [float(each.sum()) for each in own]


def test_what_is_refused_at_submission_leaves_the_group_in_use():
    islands = {"HETHUB_ISLANDS": "0|1"}
    outcomes = start_ranks(2, refuse, timeout_seconds=60, environment=islands)
    assert values(outcomes) == [(2.0, None), (2.0, [2.0, 2.0])]


def wait_for_a_message(rank, store, waited):
    """What three operations say or give, once rank 0 has waited in vain for a message from rank 1."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=5))
    if rank == 0:
        message = dist.irecv(torch.zeros(3), 1)
        with pytest.raises(RunFailed, match=r"recv .* on rank 0 with rank 1: .*Timed out"):
            message.wait(waited)
        store.set("waited", "")
    store.wait(["waited"])
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    said = []
    for name, call in ("send", lambda: dist.send(torch.ones(1), 1 - rank)), ("barrier", dist.barrier):
        with pytest.raises(RunFailed, match=f"{name} in group '0' .* on rank {rank}") as raised:
            call()
        said.append(str(raised.value))
    dist.destroy_process_group()
    return tensor[0].item(), said


@pytest.mark.parametrize("waited", [timedelta(0), timedelta(milliseconds=100)], ids=["group's timeout", "own timeout"])
def test_sums_go_on_behind_a_message_that_nobody_answers(waited):
    """Messages and barriers do not: Gloo closes the connections of both."""
    islands = {"HETHUB_ISLANDS": "0|1"}
    for total, (sent, met) in values(
        start_ranks(2, wait_for_a_message, waited, timeout_seconds=60, environment=islands)
    ):
        assert total == 2.0
        assert "with rank" in sent
        assert "Application timeout caused pair closure" in met or "Connection closed by peer" in met


def name_the_peer_of_a_group(rank, store, folder):
    """What messages of groups say of a peer that does not answer; its place in them is 1 less than its rank. The last one
    cannot be sent any more: the one before has ended the world."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=3)
    groups = []
    for number in range(3 * (rank > 0)):
        wait_for_all(store, number, rank - 1, 2)  # to connect they have no more than the second
        groups.append(dist.new_group([1, 2], timeout=timedelta(seconds=1)))
    said = []
    if rank == 2:
        for group, start in zip(groups, (dist.irecv, dist.isend, dist.isend), strict=True):
            with pytest.raises(RunFailed) as raised:
                start(torch.zeros(3), 1, group=group).wait()
            said.append(str(raised.value))
        (folder / "said").touch()
    wait_for(folder / "said")
    dist.destroy_process_group()
    return said


def test_a_peer_is_named_by_its_rank_in_the_world(tmp_path):
    environment = {"HETHUB_ISLANDS": "0|1|2", "HETHUB_STAGED_RANKS": "2"}
    said = values(start_ranks(3, name_the_peer_of_a_group, tmp_path, timeout_seconds=60, environment=environment))[2]
    assert len(said) == 3
    for name, text in zip(("recv", "send", "send"), said, strict=True):
        assert re.search(rf"{name} .* \(ranks 1, 2\) failed on rank 2 with rank 1: ", text)


def use_a_destroyed_group(rank, store):
    """The world's sum behind those of a group that is gone; torch says of it by itself that it does not know it."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group(group)
    with pytest.raises(BadInput, match=f"all_reduce was asked of group '1' .* destroyed on rank {rank}"):
        group.allreduce([torch.ones(3)])
    for async_op in (False, True):
        with pytest.raises(ValueError, match="not initialized"):
            dist.all_reduce(torch.ones(3), group=group, async_op=async_op)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor[0].item()


@pytest.mark.parametrize("staged", ["", "0"])
def test_a_destroyed_group_refuses_operations(staged):
    environment = {"HETHUB_ISLANDS": "0|1", "HETHUB_STAGED_RANKS": staged}
    assert values(start_ranks(2, use_a_destroyed_group, timeout_seconds=30, environment=environment)) == [2.0, 2.0]


def unlike_tensors():
    """Calls whose own tensors do not fit, each by what the error says of them."""
    two, narrow = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    return {
        r"shape \(5,\) and no split sizes": lambda: dist.all_to_all_single(torch.ones(5), torch.ones(5)),
        r"split sizes \[1, 1\]": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], [1, 1]),
        r"split sizes \[2, 1, 1\]": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 1, 1], [2, 1, 1]),
        "all_to_all .* 3 elements .* one of 2": lambda: dist.all_to_all([torch.ones(3)] * 2, [two, two]),
        "a whole of 10": lambda: dist.all_gather_into_tensor(torch.ones(10), torch.ones(4)),
        "bfloat16 and a whole of": lambda: dist.all_gather_into_tensor(torch.ones(4), narrow),
        "all_gather .* 1 elements .* one of 2": lambda: dist.all_gather([two, two], torch.ones(1)),
        "a list of 3": lambda: dist.all_gather([two] * 3, two),
        "a whole of 6": lambda: dist.reduce_scatter_tensor(two, torch.ones(6)),
        "1 elements .* a whole of 1 ": lambda: dist.reduce_scatter_tensor(torch.tensor(0.0), torch.tensor(1.0)),
        "float32 and a whole of 4 elements of torch.bfloat16": lambda: dist.reduce_scatter_tensor(
            two, narrow.repeat(2)
        ),
        "reduce_scatter .* 3 elements .* one of 2": lambda: dist.reduce_scatter(torch.ones(3), [two, two]),
    }


def refuse_what_does_not_fit(rank, store):
    """The sum behind calls whose tensors do not fit. Gloo itself finds out most, in words of its own, and nothing of an
    all-to-all that has no equal parts; it looks at a reduce-scatter's shapes beyond their end."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    is_native = type(dist.group.WORLD) is dist.ProcessGroup
    for said, call in unlike_tensors().items():
        ours = not is_native or "split sizes" in said or re.search("a whole of (1 |6|4)", said)
        with pytest.raises(ValueError if ours else (ValueError, RuntimeError), match=said if ours else ""):
            call()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor[0].item()


@pytest.mark.parametrize(("islands", "staged"), [("0|1", ""), ("0|1", "0"), ("0,1", "")])
def test_tensors_that_do_not_fit_are_refused(islands, staged):
    environment = {"HETHUB_ISLANDS": islands, "HETHUB_STAGED_RANKS": staged}
    assert values(start_ranks(2, refuse_what_does_not_fit, timeout_seconds=60, environment=environment)) == [2.0, 2.0]


UNLIKE_SUMS = """
import sys, torch, torch.distributed as dist, hethub.communicator
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("hethub", store=store, rank=int(sys.argv[1]), world_size=2)
dist.all_reduce(torch.ones(5 + dist.get_rank()))
"""


@pytest.mark.parametrize("attempt", range(3))
def test_a_program_that_ends_with_an_operations_error_ends_with_1(tmp_path, attempt):
    """What gives the connections up is not met by the end of the interpreter in a native call, which would abort."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", UNLIKE_SUMS, str(rank), str(tmp_path / "store")],
            env={**os.environ, "HETHUB_ISLANDS": "0|1", "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for ended, (_, said) in [(rank, rank.communicate(timeout=60)) for rank in ranks]:
        assert "the two ranks' tensors do not fit each other" in said or "is gone" in said
        assert ended.returncode == 1, said


def leave_in_the_middle(rank, store, relay):
    """What a sum says in which one rank takes no part, since it has destroyed its process group."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group()
        store.wait(["said"])
        return None
    with pytest.raises(RunFailed) as failed:
        dist.all_reduce(torch.ones(200_000))
    store.set("said", "")
    return str(failed.value)


@pytest.mark.parametrize("relay", ["gloo", "shm"])
def test_a_rank_that_has_left_is_named_as_such(relay):
    environment = {"HETHUB_ISLANDS": "0|1", "HETHUB_RELAY": relay}
    said = values(start_ranks(2, leave_in_the_middle, relay, timeout_seconds=60, environment=environment))[1]
    assert "with rank 0: connection closed: that rank destroyed its process group, or its process ended" in said


def ask_whether_all_have_come(rank, store):
    """What a monitored barrier says without rank 1, which comes to the ones before it, called with and without a timeout."""
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    group.monitored_barrier()
    group.monitored_barrier(wait_all_ranks=True)
    group.monitored_barrier(timedelta(seconds=30), True)
    if rank == 1:
        store.wait(["said"])
        return None
    with pytest.raises(RuntimeError) as missed:
        group.monitored_barrier(timeout=timedelta(seconds=1))
    store.set("said", "")
    return str(missed.value)


@pytest.mark.parametrize("islands", ["0,1", "0|1"])
def test_a_monitored_barrier_has_the_group_s_timeout_and_names_who_is_missing(islands):
    outcomes = start_ranks(2, ask_whether_all_have_come, timeout_seconds=60, environment={"HETHUB_ISLANDS": islands})
    assert "Rank 1 failed to pass monitoredBarrier in 1000 ms" in values(outcomes)[0]


def gather_operations_by_device(rank, store):
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2)
    with pytest.raises(BadInput) as refused, dist._coalescing_manager(device=torch.device("cpu")):
        pass
    return str(refused.value)


def test_a_group_over_islands_says_how_it_gathers_operations():
    outcomes = start_ranks(2, gather_operations_by_device, environment={"HETHUB_ISLANDS": "0|1"}, timeout_seconds=60)
    assert all("call _coalescing_manager without a device" in said for said in values(outcomes))
