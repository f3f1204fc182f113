"""The harness itself: it must fail when a rank fails, and leave nothing behind."""

import os
import time

from hethub.kernels.device import HARDWARE_QUEUES
from tests.support.command import Running
from tests.support.ranks import start_ranks, values

QUEUES = [os.environ.get(variable) for variable, _ in HARDWARE_QUEUES.values()]  # as this module is loaded


def echo(rank, store, word):
    store.set(f"from-{rank}", word)
    if rank == 1:  # rank 0, which serves the store, has its value long since
        time.sleep(0.3)
    return store.get(f"from-{1 - rank}").decode() + str(rank)


def fail_or_sleep(rank, store):
    if rank == 0:
        raise KeyError("rank 0's own mistake")
    time.sleep(60)


def die(rank, store):
    os.kill(os.getpid(), 9)


def queues(rank, store):
    return QUEUES


def test_hardware_queues_are_asked_for_before_a_tests_module_asks_for_devices():
    wanted = [[os.environ.get(variable, str(number)) for variable, number in HARDWARE_QUEUES.values()]]
    assert values(start_ranks(1, queues)) == wanted


def test_values_come_back_in_rank_order():
    outcomes = start_ranks(2, echo, "x")
    assert [outcome.value for outcome in outcomes] == ["x0", "x1"]


def test_failures_and_timeouts_are_told_apart():
    first, second = start_ranks(2, fail_or_sleep, timeout_seconds=4)
    assert first.error == ("KeyError", '"rank 0\'s own mistake"')
    assert second.timed_out
    assert second.exit_code == -9


def test_a_killed_rank_has_its_signal_as_exit_code():
    assert [outcome.exit_code for outcome in start_ranks(1, die)] == [-9]


def sleep_or_fail(rank, store):
    if rank == 0:
        time.sleep(60)
    raise KeyError("rank 1's own mistake")


def test_a_rank_that_hangs_hides_no_later_ranks_failure():
    first, second = start_ranks(2, sleep_or_fail, timeout_seconds=4)
    assert first.timed_out
    assert second.error == ("KeyError", '"rank 1\'s own mistake"')


def test_a_helper_that_has_just_ended_is_no_rank(monkeypatch, tmp_path):
    """A compiler that a rank starts has the rank's environment, and may be gone when its parent is asked for."""
    running = Running(["true"], tmp_path, {})
    running.process.wait()
    ended, rank = running.process.pid, {"RANK": "2"}
    monkeypatch.setattr(running, "pids", lambda: {os.getpid(): rank, ended: rank})
    assert running.rank_pids(2) == [os.getpid()]
