"""When a rank's process ends and what it says, by a watch whose liveness is known and whose process goes on."""

import contextlib
import os
import resource
import threading
import time

import pytest
import torch.distributed as dist

from hethub.communicator.joining import watch as watch_module
from hethub.communicator.joining.connection import Failure
from hethub.communicator.joining.watch import Watch, deadline, watch_over


class KnownLiveness:
    """What the watch has asked of it; the failure is what a test says."""

    def __init__(self, failure=None):
        self.failure, self.asked = failure, []

    def when_failed(self, callback):
        self.fail = callback

    def wait_for_failure(self, seconds):
        self.asked.append(("waits", seconds))
        return self.failure

    def report(self, reason):
        self.asked.append(("reports", reason))

    def goodbye(self):
        self.asked.append("goodbye")

    def close(self):
        self.asked.append("closes")


@pytest.fixture
def ended(monkeypatch):
    """How often, and with which words and code, the process would have ended."""
    ends = []
    monkeypatch.setattr(watch_module, "end_process", lambda *given: ends.append(given))
    return ends


@pytest.fixture
def timers(monkeypatch):
    """The interpreter's own, which end the process where no thread can."""
    calls, names = [], ("dump_traceback_later", "cancel_dump_traceback_later")
    for name in names:
        monkeypatch.setattr(
            watch_module.faulthandler, name, lambda *given, name=name, **more: calls.append((name, *given, more))
        )
    return calls


GONE = Failure(rank=1, reason="is gone")


def test_a_process_that_goes_on_behind_a_failure_is_ended(ended, timers):
    liveness = KnownLiveness()
    watch = Watch(3, None, liveness, 60)
    watch.end_with_the_job(0.01)
    liveness.fail(GONE)
    assert ended == [(3, "rank 1 is gone")]
    assert timers == [("dump_traceback_later", 10.01, {"exit": True})]


def test_one_that_leaves_within_its_grace_is_not_and_one_that_has_spoken_neither(ended, timers):
    liveness = KnownLiveness()
    watch = Watch(3, None, liveness, 60)
    watch.end_with_the_job(20)
    threading.Timer(0.05, watch.close).start()
    liveness.fail(GONE)
    assert [name for name, *_ in timers] == ["dump_traceback_later", "cancel_dump_traceback_later"]
    other = Watch(3, None, liveness, 60)
    other.end_with_the_job(0.01)
    other.tell("KeyError")
    liveness.fail(GONE)
    assert ended == []
    assert liveness.asked[-2:] == [("reports", "failed: KeyError"), ("waits", 5.0)]


def test_the_grace_is_a_quarter_of_a_short_timeout(ended, timers):
    liveness = KnownLiveness()
    watch = Watch(0, None, liveness, 0.04)
    watch.end_with_the_job()
    liveness.fail(GONE)
    watch.tell("KeyError")
    assert timers[0][1] == 10.01
    assert liveness.asked[-1] == ("waits", 0.01)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (Failure(rank=1, reason="ends because its user says so"), None),
        (Failure(rank=0, reason="ends because its user says so"), "its user says so"),
        (GONE, "its user says so"),
        (None, "its user says so"),
    ],
)
def test_of_several_that_end_for_one_reason_one_speaks(ended, monkeypatch, failure, said):
    monkeypatch.setattr(watch_module, "failed_code", 9)
    liveness = KnownLiveness(failure)
    Watch(0, None, liveness, 60).end_with_one_voice("its user says so", 2.5)
    assert ended == [(0, said, 1)]
    assert liveness.asked == [("reports", "ends because its user says so"), ("waits", 2.5)]


def test_who_leaves_says_so_once_before_the_hub_does(ended):
    liveness, hub = KnownLiveness(), KnownLiveness()
    watch = Watch(0, hub, liveness, 60)
    hub.close = lambda: liveness.asked.append("hub closes")
    assert not watch.is_closed
    watch.close()
    watch.close()
    assert watch.is_closed
    assert liveness.asked == ["goodbye", "closes", "hub closes"]


def test_a_process_ends_with_its_launcher_unless_it_has_left(ended, monkeypatch):
    monkeypatch.setattr(watch_module, "_LAUNCHER_SECONDS", 0.01)
    watch, left = (Watch(2, None, KnownLiveness(), 60) for _ in range(2))
    monkeypatch.setattr(watch, "end_process", lambda reason: (ended.append(reason), watch.close()))
    left.close()
    left.end_with_the_launcher(-1)
    watch.end_with_the_launcher(launcher := os.getppid())
    time.sleep(0.05)
    assert ended == []
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert watch._closed.wait(20)
    assert ended == [f"its launcher (process {launcher}) is gone"]


class Ended(BaseException):
    pass


@pytest.mark.parametrize(("code", "found"), [(None, 9), (0, 0)])
@pytest.mark.parametrize("launcher", ["mpirun", "another"])
def test_the_end_is_one_line_and_a_code(monkeypatch, code, found, launcher):
    ends, written, slept = [], [], []

    def end(code):
        ends.append(code)
        raise Ended

    def write(where, line):
        written.append((where, line))
        raise BrokenPipeError

    monkeypatch.setattr(watch_module, "failed_code", 9)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    if launcher != "mpirun":
        monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    for reason in ("rank 1 is gone", None):
        with contextlib.suppress(Ended):
            watch_module.end_process(3, reason, code)
    assert ends == [found, found]
    assert written == [(2, b"hethub: rank 3 ends because rank 1 is gone.\n")]
    assert slept == ([2.0, 2.0] if launcher == "mpirun" else [])


def test_a_block_that_is_done_in_time_ends_nothing(ended):
    with deadline(0.02, 3, "it took too long"):
        pass
    time.sleep(0.05)
    assert ended == []


@pytest.mark.parametrize(("seconds", "silence"), [(1.0, 2.0), (30.0, 15.0), (1000.0, 60.0)])
def test_the_hub_is_told_how_long_it_waits(monkeypatch, seconds, silence):
    hubs, lives, limits = [], [], []
    monkeypatch.setattr(watch_module, "Hub", lambda **given: hubs.append(given) or type("Hub", (), {"port": 7}))
    monkeypatch.setattr(watch_module, "Liveness", lambda **given: lives.append(given))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: limits.append(limit))
    store, given = dist.HashStore(), {"size": 2, "address": "here", "token": "t", "timeout_seconds": seconds}
    for rank in range(2):
        watch_over(store, rank=rank, **given, place=str)
    assert hubs == [
        {
            "address": "here",
            "size": 2,
            "token": "t",
            "silence_seconds": silence,
            "meeting_seconds": seconds,
            "place": str,
        }
    ]
    assert [(life["rank"], life["hub_address"], life["silence_seconds"]) for life in lives] == [
        (rank, ("here", 7), silence) for rank in range(2)
    ]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert limits == [(hard, hard)] * 2
