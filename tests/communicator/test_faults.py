"""Faults: every surviving rank is told within seconds who failed at what, and no process is left behind."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import start_ranks

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


def stop_yourself(world, victim):
    if world.rank == victim:
        # A helper continues the stopped process after the others have given up, so that the test can end.
        if os.fork() == 0:
            time.sleep(6)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(200_000))


def test_a_stopped_rank_is_named():
    outcomes = start_ranks(4, stop_yourself, 1, connect={**TWO_ISLANDS, "timeout_seconds": 5}, timeout_seconds=40)
    for rank in (0, 2, 3):
        kind, message = outcomes[rank].error
        assert kind == "RunFailed"
        assert "rank 1 has stopped" in message


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


def close_with_a_straggler(world):
    world.watch(grace_seconds=0.1)
    time.sleep(0.5 * world.rank)
    return world.rank


def test_a_clean_end_is_not_taken_for_a_death():
    outcomes = start_ranks(4, close_with_a_straggler, connect=TWO_ISLANDS, timeout_seconds=30)
    assert [(outcome.value, outcome.exit_code, outcome.stderr) for outcome in outcomes] == [
        (rank, 0, "") for rank in range(4)
    ]
