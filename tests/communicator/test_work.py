"""Work objects by themselves: who ends a future, and that it is ended once."""

import threading

import pytest
import torch

from hethub.communicator.work import CallbackThreads, HethubWork, Job, Operation, Worker
from hethub.spec.errors import RunFailed


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
