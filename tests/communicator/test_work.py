"""Work objects and the threads that run them, by themselves."""

import gc
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from hethub.communicator.bridge.messages import PointToPoint
from hethub.communicator.counters import Counters
from hethub.communicator.relays.relay import PeerError
from hethub.communicator.work import AllOf, CallbackThreads, HethubWork, Job, NativeWork, Operation, Worker
from hethub.spec.errors import BadInput, RunFailed


class Nobody:
    def __init__(self):
        self.given_up = []

    def explain(self):
        return None

    def give_up(self, failure, *, is_known):
        self.given_up.append((str(failure), is_known))


class Callbacks:
    def __init__(self):
        self.given = []

    def run(self, callback):
        self.given.append(callback)


class LockLeftBeforeAnotherThreadAsks:
    """A lock; when it is left for the first time, `then` runs before anything else does."""

    def __init__(self, then):
        self._lock, self._then = threading.RLock(), [then]

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()
        if self._then:
            self._then.pop()()


def test_a_future_asked_for_at_the_very_end_is_ended_once():
    callbacks = Callbacks()
    operation = Operation(name="all_reduce", group="a group", rank=0, explainer=Nobody())
    work = HethubWork(operation, [torch.ones(1)], callbacks)
    work._lock = LockLeftBeforeAnotherThreadAsks(work.get_future)
    work.finish()
    assert work.get_future().done()
    assert callbacks.given == []


def refuse():
    raise RuntimeError("no such device")


def test_a_thread_that_cannot_be_prepared_is_an_error_of_who_asks_for_it():
    operation = Operation(name="all_reduce", group="a group", rank=0, explainer=Nobody())
    job = Job(run=refuse, work=HethubWork(operation, [], Callbacks()), count=lambda seconds: None)
    with pytest.raises(RuntimeError, match="no such device"):
        Worker("a worker", refuse).submit(job)
    with pytest.raises(RuntimeError, match="no such device"):
        CallbackThreads(refuse).run(job)


def interrupt():
    raise KeyboardInterrupt


def test_an_operation_that_ctrl_c_has_cut_short_is_given_up():
    """It ran in its caller's thread. What its program does next would be added to the half of it."""
    explainer, left = Nobody(), []
    operation = Operation(name="all_reduce", group="a group", rank=0, explainer=explainer)
    work = HethubWork(operation, [torch.ones(1)], Callbacks())
    job = Job(run=interrupt, work=work, count=lambda seconds: None, leave=lambda: left.append(True))
    worker = Worker("a worker", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        worker.submit(job, caller_waits=True)
    assert work.is_completed()
    with pytest.raises(RunFailed, match="all_reduce in a group failed on rank 0: KeyboardInterrupt"):
        work.wait()
    assert [known for _, known in explainer.given_up] == [False]
    assert left == [True]


def work_of(explainer=None, timeout_seconds=None, result=()):
    operation = Operation(name="all_reduce", group="a group", rank=0, explainer=explainer or Nobody())
    return HethubWork(operation, list(result), Callbacks(), timeout_seconds)


def job_of(run, **more):
    return Job(run=run, work=work_of(**more), count=lambda seconds: None)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_failure_names_the_peer_and_the_first_cause_that_is_known():
    explainer = Nobody()
    operation = Operation(name="all_reduce", group="a group", rank=0, explainer=explainer)
    error = PeerError(3, "connection closed")
    assert str(operation.failed(error)) == "all_reduce in a group failed on rank 0 with rank 3: connection closed"
    explainer.explain = lambda: "rank 2 is gone"
    assert str(operation.failed(error)) == "all_reduce in a group failed on rank 0 with rank 3: rank 2 is gone"
    known = RunFailed("the ranks call unlike operations")  # which all of them find
    assert operation.failed_for_good(known) is known
    assert explainer.given_up == [(str(known), True)]


def test_a_future_asked_for_before_the_end_is_ended_by_the_callbacks():
    work = work_of(result=[torch.ones(1)])
    future = work.get_future()
    work.finish()
    (callback,) = work._callbacks.given
    callback()
    assert future.value() == [torch.ones(1)]


def test_who_waits_with_patience_of_his_own_may_ask_again():
    explainer = Nobody()
    work = work_of(explainer, timeout_seconds=3600.0)
    with pytest.raises(RunFailed, match=r"Timed out after 0\.01 s"):
        work.wait(timedelta(seconds=0.01))
    assert explainer.given_up == []
    work.finish()
    assert work.wait(timedelta(seconds=0.01))


def test_the_groups_timeout_is_the_end():
    explainer = Nobody()
    with pytest.raises(RunFailed, match=r"Timed out after 0\.01 s"):
        work_of(explainer, timeout_seconds=0.01).wait()
    assert [known for _, known in explainer.given_up] == [False]


def test_a_work_says_whether_it_is_done_and_how_it_ended():
    pending, done, failed = work_of(), work_of(), work_of()
    done.finish()
    failed.fail(RunFailed("rank 1 is gone"))
    works = (pending, done, failed)
    assert [work.is_completed() for work in works] == [False, True, True]
    assert [work.is_success() for work in works] == [False, True, False]
    assert [str(work.exception()) for work in works] == ["None", "None", "rank 1 is gone"]


class Asked:
    """A library's Work, and how it was waited for."""

    def __init__(self, *, is_done=True):
        self.waits, self.is_done = [], is_done

    def wait(self, *timeout):
        self.waits.append(timeout)

    def is_completed(self):
        return self.is_done


def test_several_operations_are_done_when_all_are_and_waited_for_as_asked():
    works = [Asked(), Asked(is_done=False)]
    both = AllOf(works)
    assert not both.is_completed()
    works[1].is_done = True
    assert both.is_completed()
    assert both.wait()
    assert both.wait(timedelta(seconds=3))
    assert [work.waits for work in works] == [[(), (timedelta(seconds=3),)]] * 2


def test_a_librarys_operation_is_counted_once_however_often_it_is_waited_for():
    counted, inner = [], Asked()
    work = NativeWork(work_of().operation, inner, [], count=counted.append)
    for timeout in (None, timedelta(0), timedelta(seconds=3)):  # no timeout is the library's own
        assert work.wait(timeout)
    assert len(counted) == 1
    assert inner.waits == [(), (), (timedelta(seconds=3),)]


def test_a_thread_for_callbacks_serves_again_until_it_is_stopped():
    threads, ran = [], threading.Semaphore(0)
    callbacks = CallbackThreads(lambda: threads.append(threading.current_thread()))
    may_end = threading.Event()

    def run_and_wait_until_idle(callback):
        callbacks.run(lambda: (callback(), ran.release()))
        assert ran.acquire(timeout=20)
        until(lambda: callbacks._num_idle == 1)

    held = torch.ones(1)
    gone = weakref.ref(held)
    run_and_wait_until_idle(held.sum)
    del held
    gc.collect()
    assert gone() is None
    run_and_wait_until_idle(lambda: None)
    assert len(threads) == 1
    callbacks.run(may_end.wait)
    callbacks.run(lambda: None)  # the first is not idle
    assert len(threads) == 2
    until(lambda: callbacks._num_idle == 1)
    callbacks.stop()  # one thread is idle, one is not
    may_end.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_worker_ends_behind_the_jobs_that_it_was_given_and_holds_none():
    worker, may_go_on, order = Worker("a worker", lambda: None), threading.Event(), []
    held = torch.ones(1)
    gone = weakref.ref(held)
    worker.submit(job_of(may_go_on.wait))
    last = worker.submit(job_of(lambda: order.append("last"), result=[held]))
    may_go_on.set()
    last.wait(timedelta(seconds=20))
    del held, last
    until(lambda: gc.collect() is not None and gone() is None)
    worker.stop()
    assert not worker._thread.is_alive()
    assert order == ["last"]
    with pytest.raises(BadInput, match="all_reduce was asked of a group, which was destroyed on rank 0"):
        worker.submit(job_of(lambda: None))


class FreeButNotYetTaken:
    """The lock of who runs, as it is when a thread has been given a job and not yet begun: whoever tries may have it."""

    def __init__(self):
        self.begin = threading.Event()

    def acquire(self, *, blocking):
        return True

    def release(self):
        pass

    def __enter__(self):
        assert self.begin.wait(20)

    def __exit__(self, *error):
        pass


def test_no_job_overtakes_one_that_was_submitted_before():
    worker, order = Worker("a worker", lambda: None), []
    worker._running = FreeButNotYetTaken()
    worker.submit(job_of(lambda: order.append("first")))
    second = worker.submit(job_of(lambda: order.append("second")), caller_waits=True)
    worker._running.begin.set()
    second.wait(timedelta(seconds=20))
    assert order == ["first", "second"]
    caller = []
    worker.submit(job_of(lambda: caller.append(threading.current_thread())), caller_waits=True)
    assert caller == [threading.current_thread()]
    worker.stop()


def test_a_profilers_range_ends_before_the_operation():
    work = work_of()
    done = []
    work.end_profiled = lambda: done.append(work.is_completed())
    work.finish()
    assert done == [False]


def test_a_message_that_cannot_begin_names_its_peer():
    def closed(*given):
        raise RuntimeError("Connection closed by peer")

    process = SimpleNamespace(
        rank=4,
        islands=[[4], [7]],
        counters=Counters(),
        stager=lambda: SimpleNamespace(on_device=lambda tensor: False),
        device_ranks=frozenset(),
    )
    messages = PointToPoint(SimpleNamespace(recv=closed), process, [4, 7], "a group")
    operation = Operation(name="recv", group="a group", rank=4, explainer=Nobody(), peer=7)
    with pytest.raises(RunFailed, match="recv in a group failed on rank 4 with rank 7: "):
        messages.receive(torch.ones(1), 1, 0, operation)


def test_a_message_given_up_at_a_timeout_of_its_own_names_its_peer():
    operation = Operation(name="send", group="a group", rank=0, explainer=Nobody(), peer=3)
    said = r"send in a group failed on rank 0 with rank 3: TimeoutError: Timed out after 0\.01 s"
    with pytest.raises(RunFailed, match=said):
        HethubWork(operation, [], Callbacks()).wait(timedelta(seconds=0.01))
