"""Who is silent, and who only had no turn: ranks and the hub by each other's clocks."""

import contextlib
import threading
import time
from itertools import pairwise

from hethub.communicator.joining.hub import HEARTBEAT_SECONDS
from hethub.communicator.joining.liveness import Liveness
from tests.faults.hub_job import Job, check_alive


def test_a_hub_and_its_ranks_hear_each_other_without_news(job):
    ends = [*job.hub._ranks.values(), *(rank._connection for rank in job.ranks)]
    before, deadline = [end.heard for end in ends], time.monotonic() + 20
    while any(end.heard == was for end, was in zip(ends, before, strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_time_in_which_nobody_had_a_turn_is_nobodys_silence(job, monkeypatch):
    """A job that was stopped (Ctrl-Z) and went on, or whose hub's thread stood still, ended by an arbitrary rank's silence."""
    clock, beat, held_up, seconds = time.monotonic, job.hub._beat, threading.Event(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds[0])

    def beats_late():
        seconds[0] = 1000.0
        held_up.set()
        monkeypatch.delattr(job.hub, "_beat")
        beat()

    monkeypatch.setattr(job.hub, "_beat", beats_late)
    assert held_up.wait(20)
    ends = [*job.hub._ranks.values(), *(rank._connection for rank in job.ranks)]
    began, deadline = time.monotonic(), clock() + 20
    while any(end.heard < began for end in ends):
        assert clock() < deadline
        time.sleep(0.01)
    check_alive(job)


def test_a_rank_that_falls_silent_behind_a_stall_is_named_as_soon_as_any_other(job, monkeypatch):
    """What a stalled hub has heard before it is excused was heard in the future: it waited for as long as the stall."""
    clock, seconds = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds[0])
    job.hub._silence_seconds = 5.0
    job.ranks[1]._closed = True  # it beats no more
    seconds[0] = 1000.0
    assert "rank 1 has stopped: no sign of life" in str(job.ranks[0].wait_for_failure(20))


def test_a_rank_that_had_no_turn_does_not_call_the_hub_silent(job, monkeypatch):
    """What the hub has said meanwhile may not have come yet."""
    clock, seconds, connection, looked = time.monotonic, [0.0], job.ranks[1]._connection, threading.Event()
    monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds[0])
    quiet = iter([lambda: seconds.__setitem__(0, 1000.0), lambda: None, looked.set])

    def read():
        next(quiet, lambda: time.sleep(0.1))()
        return []

    with monkeypatch.context() as patch:
        patch.setattr(connection, "read", read)
        assert looked.wait(20)
        assert job.ranks[1].failure is None
    check_alive(job)


def test_a_rank_that_stood_still_as_it_joined_does_not_call_the_hub_silent(monkeypatch):
    """Its thread took the time between the hub's welcome and its own first turn for silence."""
    clock, introduce, seconds = time.monotonic, Liveness._introduce, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds[0])

    def stands_still(rank, token):
        introduce(rank, token)
        seconds[0] += 1000.0

    monkeypatch.setattr(Liveness, "_introduce", stands_still)
    with contextlib.closing(Job()) as job:
        ends, began, deadline = job.hub._ranks.values(), time.monotonic(), clock() + 20
        while any(end.heard < began for end in ends):
            assert clock() < deadline
            time.sleep(0.01)
        check_alive(job)


def test_a_rank_to_which_the_hub_speaks_beats_no_less(job, monkeypatch):
    """Its beats were up to two heartbeats apart, and under a short timeout silence is no longer than that."""
    seconds, beats, done = [time.monotonic()], [], threading.Event()
    connection = job.ranks[1]._connection
    passed = iter([0.95 * HEARTBEAT_SECONDS, connection.socket.gettimeout()] * 3)  # one message came, then none

    def read():
        if (more := next(passed, None)) is None:
            done.set()
            time.sleep(0.1)
        seconds[0] += more or 0.0
        return []

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: seconds[0])
        patch.setattr(connection, "send", lambda **_: beats.append(seconds[0]))
        patch.setattr(connection, "read", read)
        assert done.wait(20)
    assert len(beats) > 2
    assert max(later - beat for beat, later in pairwise(beats)) <= 1.5 * HEARTBEAT_SECONDS


def test_a_hub_that_leaves_says_so_and_one_that_falls_silent_is_named(job):
    job.ranks[1]._silence_seconds = -1.0
    assert "rank 0 has stopped: no sign of life" in str(job.ranks[1].wait_for_failure(20))
    job.hub.close()
    assert job.ranks[0].wait_for_failure(0.5) is None
