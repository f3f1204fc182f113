"""Faults: every surviving rank is told within seconds who failed at what, and no process is left behind."""

import gc
import json
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import Rendezvous, connect
from hethub.communicator.joining.liveness import Liveness
from hethub.spec.errors import RunFailed
from tests.support.ranks import meet, start_ranks, values, wait_for

TWO_ISLANDS = {"islands": [[0, 2], [1, 3]], "timeout_seconds": 60}


def reduce_until_rank_dies(world, victim, how):
    for step in range(1000):
        if world.rank == victim and step == 3:
            os.kill(os.getpid(), how)
        dist.all_reduce(torch.ones(200_000))
    return "never failed"


def receive_from_the_dead(world, victim):
    if world.rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    world.receive(torch.ones(4), (world.rank + 1) % world.size, 7).wait()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("function", [reduce_until_rank_dies, receive_from_the_dead])
def test_a_killed_rank_is_named_on_all_others(function, victim):
    args = (victim, signal.SIGKILL) if function is reduce_until_rank_dies else (victim,)
    outcomes = start_ranks(4, function, *args, connect=TWO_ISLANDS, timeout_seconds=30)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank in set(range(4)) - {victim}:
        kind, message = outcomes[rank].error
        assert kind == "RunFailed"
        assert f"rank {victim} is gone" in message
        assert f"on rank {rank}" in message
        if function is reduce_until_rank_dies:
            assert "all_reduce in group '0' (ranks 0-3)" in message
        else:
            assert f"receive from rank {(rank + 1) % 4} (tag 7) in the world of 4 ranks" in message


def stop_yourself(world, victim):
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(200_000))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named(victim):
    outcomes = start_ranks(4, stop_yourself, victim, connect={**TWO_ISLANDS, "timeout_seconds": 5}, timeout_seconds=120)
    for rank in set(range(4)) - {victim}:
        kind, message = outcomes[rank].error
        assert kind == "RunFailed"
        assert f"rank {victim} has stopped" in message
        assert f"all_reduce in group '0' (ranks 0-3) failed on rank {rank}" in message


def fail_with_own_error(world):
    world.watch()
    if world.rank == 1:
        world.abort("KeyError: 'no such tensor'")
        raise KeyError("no such tensor")
    dist.all_reduce(torch.ones(10))


def test_a_rank_that_fails_tells_the_others_why():
    outcomes = start_ranks(4, fail_with_own_error, connect=TWO_ISLANDS, timeout_seconds=30)
    assert outcomes[1].error[0] == "KeyError"
    for rank in (0, 2, 3):
        assert "rank 1 failed: KeyError: 'no such tensor'" in outcomes[rank].error[1]


def ignore_the_failure(world):
    world.watch(grace_seconds=0.5)
    world.barrier()
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_the_watchdog_ends_a_process_that_does_not():
    outcomes = start_ranks(3, ignore_the_failure, connect={"timeout_seconds": 60}, timeout_seconds=30)
    for outcome in outcomes[1:]:
        assert outcome.exit_code == 1
        assert not outcome.timed_out
        assert "ends because rank 0 is gone" in outcome.stderr


def native_group_of_the_dead(world):
    group = world.group([0, 1, 2])
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with world.guard("sum the gradients"):
        dist.all_reduce(torch.ones(1000), group=group)


def test_a_native_groups_failure_is_told_in_our_words():
    outcomes = start_ranks(3, native_group_of_the_dead, connect={"timeout_seconds": 60}, timeout_seconds=30)
    for rank in (0, 2):
        kind, message = outcomes[rank].error
        assert kind == "RunFailed"
        assert "sum the gradients" in message
        assert "rank 1 is gone" in message


def wait_in_a_group_beside(world):
    """Ranks 0 and 2 wait for each other in a group that torch made, whose connections to the dead are not theirs."""
    group = world.gloo_group(timedelta(hours=1))
    if world.rank == 1:
        for peer in (0, 2):  # which have connected, then
            dist.recv(torch.empty(1), peer, group=group)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(torch.ones(1), 1, group=group)
    with world.guard("checkpoint"):
        dist.recv(torch.empty(1), 2 - world.rank, group=group)


def test_a_group_for_another_thread_fails_with_the_world():
    outcomes = start_ranks(3, wait_in_a_group_beside, connect={"timeout_seconds": 60}, timeout_seconds=30)
    for rank in (0, 2):
        kind, message = outcomes[rank].error
        assert kind == "RunFailed"
        assert f"checkpoint in the world of 3 ranks failed on rank {rank}: rank 1 is gone" in message


def wait_in_a_group_behind_one_that_is_gone(world, folder):
    """Rank 1 fails, and stays until that has been felt in a native group, of which there was another before."""
    gone, group = (dist.new_group([0, 1], backend="hethub") for _ in range(2))
    dist.all_reduce(torch.ones(3), group=gone)
    dist.destroy_process_group(gone)
    del gone
    gc.collect()
    if world.rank == 1:
        world.abort("on purpose")
        wait_for(folder / "felt")
        return
    try:
        with world.guard("sum"):
            dist.all_reduce(torch.ones(3), group=group)
    finally:
        (folder / "felt").touch()


def test_a_native_group_fails_with_the_world_when_another_is_gone(tmp_path):
    own = {"connect": {"timeout_seconds": 3600}, "timeout_seconds": 40}
    found, _ = start_ranks(2, wait_in_a_group_behind_one_that_is_gone, tmp_path, **own)
    assert found.error is not None, "it waits on"
    assert found.error[0] == "RunFailed"
    assert "sum in the world of 2 ranks failed on rank 0: rank 1 failed: on purpose" in found.error[1]


def wait_in_a_group_that_nobody_joins(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.gloo_group(timedelta(hours=1))


def test_a_rank_that_is_gone_when_a_group_for_another_thread_connects_is_named():
    outcomes = start_ranks(3, wait_in_a_group_that_nobody_joins, connect={"timeout_seconds": 60}, timeout_seconds=30)
    for rank in (0, 2):
        kind, message = outcomes[rank].error
        assert kind == "RunFailed"
        assert "rank 1 is gone" in message


def speak_behind_the_watchdog(world):
    """Rank 1's main thread finds its own words while the process, which has been given up, waits for the others'."""
    world.watch(grace_seconds=0.1)
    world.barrier()
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while "ends because" not in Path("stderr-1").read_text():
        time.sleep(0.01)
    world.abort("found out late")
    os.write(2, b"hethub: said again\n")


def test_a_rank_that_has_said_why_it_ends_does_not_say_it_again():
    under_mpirun = {"OMPI_COMM_WORLD_RANK": "1"}
    connect = {"timeout_seconds": 60}
    outcomes = start_ranks(2, speak_behind_the_watchdog, connect=connect, timeout_seconds=30, environment=under_mpirun)
    assert "ends because rank 0 is gone" in outcomes[1].stderr
    assert "said again" not in outcomes[1].stderr


def close_with_a_straggler(world):
    world.watch(grace_seconds=0.1)
    time.sleep(0.5 * world.rank)
    return world.rank


def test_a_clean_end_is_not_taken_for_a_death():
    outcomes = start_ranks(4, close_with_a_straggler, connect=TWO_ISLANDS, timeout_seconds=30)
    assert [(outcome.value, outcome.exit_code, outcome.stderr) for outcome in outcomes] == [
        (rank, 0, "") for rank in range(4)
    ]


def sum_in_a_second_world(rank, store, islands):
    """What the ranks below 3 find when they meet again and add up their numbers."""
    second = connect(Rendezvous.on_one_host(dist.PrefixStore("second", store), rank, 3), islands=islands)
    tensor = torch.full((200_000,), float(rank))
    dist.all_reduce(tensor)
    second.close()
    return tensor[0].item()


def rebuild_after_a_fault(rank, store, how, message):
    """Survivors learn of the fault of rank 3, leave the broken world and build one of their own."""
    meeting = Rendezvous.on_one_host(dist.PrefixStore("first", store), rank, 4)
    first = connect(meeting, islands=[[0, 1], [2, 3]], timeout_seconds=120 if how == signal.SIGKILL else 5)
    meet(first)
    if rank == 3:
        os.kill(os.getpid(), how)
    with pytest.raises(RunFailed, match=message):
        dist.all_reduce(torch.ones(200_000))
    first.close()
    return sum_in_a_second_world(rank, store, [[0, 1], [2]])


@pytest.mark.parametrize(
    ("how", "message"), [(signal.SIGKILL, "rank 3 is gone"), (signal.SIGSTOP, "rank 3 has stopped")]
)
def test_survivors_rebuild_a_world(how, message):
    outcomes = start_ranks(4, rebuild_after_a_fault, how, message, timeout_seconds=60)
    assert [outcome.value for outcome in outcomes[:3]] == [3.0] * 3, [o.traceback for o in outcomes]


def rebuild_after_a_mismatch(rank, store):
    meeting, islands = Rendezvous.on_one_host(dist.PrefixStore("first", store), rank, 3), [[0, 2], [1]]
    first = connect(meeting, islands=islands, debug=True, timeout_seconds=60)
    with pytest.raises(RunFailed, match="enters all_reduce"):
        dist.all_reduce(torch.ones(6 if rank == 1 else 5))
    first.close()
    return sum_in_a_second_world(rank, store, islands)


def test_a_world_is_rebuilt_after_a_mismatch():
    assert values(start_ranks(3, rebuild_after_a_mismatch, timeout_seconds=60)) == [3.0] * 3


def init_plainly(name, rank, size, store):
    dist.init_process_group("hethub", store=dist.PrefixStore(name, store), rank=rank, world_size=size)


def abort_what_is_pending(rank, store):
    """An all-reduce that rank 2 never enters, given up by another thread; then a new world."""
    init_plainly("first", rank, 3, store)
    group = dist.group.WORLD
    if rank < 2:
        pending = dist.all_reduce(torch.ones(500_000), async_op=True)
        threading.Timer(0.5, group.abort).start()
        with pytest.raises(RunFailed, match=r"all_reduce in group '0' \(ranks 0-2\)"):
            pending.wait()
    else:
        group.abort()
    dist.destroy_process_group()
    init_plainly("second", rank, 3, store)
    tensor = torch.full((500_000,), float(rank))
    dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return tensor[0].item()


@pytest.mark.parametrize("relay", ["shm", "gloo"])
def test_what_is_pending_can_be_aborted_and_the_group_rebuilt(relay):
    """The default timeout is 30 minutes: the test's own shows that nothing waits for it."""
    environment = {"HETHUB_ISLANDS": "0|1|2", "HETHUB_RELAY": relay}
    outcomes = start_ranks(3, abort_what_is_pending, timeout_seconds=60, environment=environment)
    assert values(outcomes) == [3.0] * 3


def leave_early(rank, store, leaver):
    """One rank leaves, and its process ends, while the two others go on."""
    init_plainly("plain", rank, 3, store)
    left = [other for other in range(3) if other != leaver]
    group = dist.new_group(left)
    tensor = torch.ones(500_000)
    dist.all_reduce(tensor)
    if rank == leaver:
        dist.destroy_process_group()
        return [tensor[0].item()] * 2
    time.sleep(1.5)  # a death would be known by now
    again = torch.ones(500_000)
    for _ in range(10):
        dist.all_reduce(again.fill_(1), group=group)
    dist.destroy_process_group()
    return [tensor[0].item(), again[0].item() + 1]


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_leaves_early_fails_nobody(leaver):
    outcomes = start_ranks(3, leave_early, leaver, timeout_seconds=60, environment={"HETHUB_ISLANDS": "0|1|2"})
    assert values(outcomes) == [[3.0, 3.0]] * 3


def knock_without_the_token(rank, store):
    world = connect(Rendezvous.on_one_host(store, rank, 2), islands=[[0], [1]])
    if rank == 1:
        host, port = json.loads(store.get("liveness"))
        with pytest.raises(RunFailed, match="refused"):
            Liveness(hub_address=(host, port), rank=0, token="guessed", silence_seconds=10)
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(b"not even json\n" * 1000)
            time.sleep(0.2)
    world.barrier()
    failure = world.failure
    world.barrier()
    if rank == 1:
        world.abort("on purpose")
    learned = world._context.watch.liveness.wait_for_failure(10)
    world.close()
    return failure, learned.reason


def test_a_stranger_neither_joins_nor_ends_a_world():
    for failure, learned in values(start_ranks(2, knock_without_the_token, timeout_seconds=60)):
        assert failure is None
        assert learned == "failed: on purpose"


def receive_from_anyone(rank, store):
    """How many receives are counted after one from any rank."""
    init_plainly("plain", rank, 2, store)
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.empty(3))
    rows = dist.group.WORLD.context.counters.to_dict()["operations"]
    dist.barrier()
    dist.destroy_process_group()
    return sum(row["calls"] for row in rows if row["operation"] == "receive")


def test_a_receive_from_any_rank_is_counted():
    outcomes = start_ranks(2, receive_from_anyone, timeout_seconds=40, environment={"HETHUB_ISLANDS": "0|1"})
    assert values(outcomes) == [0, 1]


def receive_after_abort(rank, store):
    """What a receive from any rank says in a group that was given up, the default one or another."""
    init_plainly("plain", rank, 2, store)
    said = []
    groups = dist.new_group([0, 1]), dist.group.WORLD
    store.set(f"made/{rank}", "")
    store.wait(["made/0", "made/1"])
    for group in groups:
        group.abort()
        with pytest.raises(RunFailed) as refused:
            dist.recv(torch.empty(3), group=group)
        said.append(str(refused.value))
    return said


def test_nothing_is_received_from_any_rank_of_a_group_given_up():
    for said in values(start_ranks(2, receive_after_abort, timeout_seconds=60, environment={"HETHUB_ISLANDS": "0|1"})):
        assert all(text.startswith("recv from any rank in group") for text in said)


def meet_one_that_ends(rank, store, where, ending):
    from hethub.communicator.groups import backend
    from hethub.communicator.joining import rendezvous, watch

    def end(*_, **more):
        os._exit(9)

    if rank == ending:
        setattr({"agree_on_token": backend, "Hub": watch, "_leave": rendezvous}[where], where, end)
    store.set_timeout(timedelta(seconds=5))
    dist.init_process_group("hethub", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=5))


@pytest.mark.parametrize(("where", "ending"), [("agree_on_token", 0), ("Hub", 0), ("_leave", 1)])
def test_a_rank_that_ends_while_the_ranks_meet_is_no_raw_error_of_the_store(where, ending):
    """It was a DistNetworkError, or a DistStoreError with the names of keys."""
    other = start_ranks(2, meet_one_that_ends, where, ending, timeout_seconds=60)[1 - ending]
    kind, text = other.error
    assert kind == "RunFailed"
    assert text.startswith(f"rank {1 - ending} could not")
    assert "keys" not in text
