"""Operations under way: what c10d calls Work, with errors that name operation, group, rank and peer."""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch

from hethub.communicator import torch_private
from hethub.communicator.relays.relay import PeerError
from hethub.spec.errors import BadInput, RunFailed


class Explainer(Protocol):
    """Knows which rank failed first, if one did, and hears of what fails here."""

    def explain(self) -> str | None:
        """A sentence naming the rank that failed and how; None when no failure is known."""

    def give_up(self, failure: Exception, *, is_known: bool) -> None:
        """Nothing runs any more behind what has failed; the other ranks are told unless they know."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What is under way, for error messages: `all_reduce in group 'default' (ranks 0-3) on rank 1`."""

    name: str
    group: str
    rank: int
    explainer: Explainer
    peer: int | None = None
    """The rank in the world with which a message is exchanged."""

    def failed(self, error: BaseException) -> Exception:
        """The error to raise for `error`: RunFailed naming the rank behind it, or bad input as it is."""
        if isinstance(error, BadInput | RunFailed):
            return error
        where = f"{self.name} in {self.group} failed on rank {self.rank}"
        peer = error.peer if isinstance(error, PeerError) else self.peer
        cause = self.explainer.explain()
        reason = error.reason if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
        with_peer = f" with rank {peer}" if peer is not None else ""
        return RunFailed(f"{where}{with_peer}: {cause or reason}")

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """What goes wrong in the block is this operation's failure; what has been told as one stays as it is."""
        try:
            yield
        except RunFailed:
            raise
        except RuntimeError as error:
            raise self.failed(error) from error

    def failed_for_good(self, error: BaseException) -> Exception:
        """Do what `failed` does if this rank's part of an operation is missing now. A peer would take what comes next for it, and
        add it up, so nothing may come next. RunFailed is debug mode's: every member finds the difference, and none has begun.
        """
        failure = self.failed(error)
        self.explainer.give_up(failure, is_known=isinstance(error, RunFailed))
        return failure


class WaitedWork(torch_private.WorkBase):
    """A Work whose every way of waiting is its `wait`.

    torch's own `block_current_stream`, a kernel that spins on the stream until the future ends, would let the thread go on,
    but on an H200 a kernel that is launched for the first time beside one that spins, as an operation's own may be, waits
    for its end, with CUDA_MODULE_LOADING=EAGER too.
    """

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class HethubWork(WaitedWork):
    """The result of an operation that another thread completes."""

    def __init__(
        self,
        operation: Operation,
        result: list[torch.Tensor],
        callbacks: "CallbackThreads",
        timeout_seconds: float | None = None,
    ) -> None:
        super().__init__()
        self.operation = operation
        self._result = result
        self._callbacks = callbacks
        self._timeout_seconds = timeout_seconds
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._end_future: Callable[[Exception | None], None] | None = None
        self._lock = threading.Lock()
        self.end_profiled: Callable[[], None] | None = None
        self.out_of_turn: Callable[[], None] | None = None
        """Ends it where its thread has yet to come to it: what is before it may wait for what its caller does next."""

    def finish(self) -> None:
        self._end()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        if self.end_profiled is not None:
            self.end_profiled()
        self.out_of_turn = None  # which holds this
        with self._lock:
            self._done.set()
            end_future = self._end_future  # from here on, get_future ends the one it makes itself
        if end_future is not None:
            self._callbacks.run(functools.partial(end_future, self._error))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns True when the tensors hold the result. Raises RunFailed, naming the peer, if they never will."""
        patience = timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
        seconds = patience or self._timeout_seconds
        if (out_of_turn := self.out_of_turn) is not None:
            self._callbacks.run(out_of_turn)
        if not self._done.wait(seconds):
            error = TimeoutError(f"Timed out after {seconds:g} s")
            # Who brings patience of its own may ask again; the group's timeout is the end.
            raise self.operation.failed(error) if patience else self.operation.failed_for_good(error)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        with self._lock:
            if self._future is None:
                self._future, self._end_future = torch_private.future_of(self._result)
                if self._done.is_set():
                    self._end_future(self._error)
            return self._future


class NativeWork(WaitedWork):
    """A native library's Work whose failure is told in our words; `count` hears how long it was first waited for."""

    def __init__(
        self,
        operation: Operation,
        inner: Any,
        result: list[torch.Tensor],
        count: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__()
        self._count = count
        self.operation = operation
        self._inner = inner
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        start = time.perf_counter()
        try:
            if timeout is not None and timeout.total_seconds() > 0:
                self._inner.wait(timeout)
            else:
                self._inner.wait()
        except RuntimeError as error:
            raise self.operation.failed(error) from error
        if self._count is not None:
            self._count(time.perf_counter() - start)
            self._count = None
        return True

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        return torch_private.succeeded(self._inner)

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._inner.get_future()

    def source_rank(self) -> int:
        return int(self._inner._source_rank())

    _source_rank = source_rank


class AllOf(WaitedWork):
    """Several operations of one call."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


_STOP_SECONDS = 1.0


def start_thread(name: str, prepare: Callable[[], None], serve: Callable[[], None]) -> threading.Thread:
    """A thread that serves, once it is prepared. Raises what `prepare` raised: work given to it would never end."""
    prepared: Future[None] = Future()

    def run() -> None:
        try:
            prepare()
        except Exception as error:  # noqa: BLE001  raised by who starts the thread
            prepared.set_exception(error)
            return
        prepared.set_result(None)
        serve()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    prepared.result()
    return thread


class CallbackThreads:
    """Threads that complete futures: a callback may start another operation and wait for it (PowerSGD does).

    So callbacks run neither in a worker, which must be free for that operation, nor one after another: a thread is
    started whenever none is idle. `prepare` runs at the start of each.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_idle = 0
        self._stopped = False
        self._lock = threading.Lock()

    def run(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._num_idle > 0:
                self._num_idle -= 1
            else:
                start_thread("hethub-callbacks", self._prepare, self._serve)
        self._waiting.put(callback)

    def stop(self) -> None:
        """Ends the threads that are idle, and each other one behind its callback."""
        with self._lock:
            self._stopped = True
            num_idle, self._num_idle = self._num_idle, 0
        for _ in range(num_idle):
            self._waiting.put(None)

    def _serve(self) -> None:
        while (callback := self._waiting.get()) is not None:
            callback()
            del callback  # what it holds is not to live until the next one comes
            with self._lock:
                if self._stopped:
                    return
                self._num_idle += 1


@contextlib.contextmanager
def writing(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """The block may write these tensors, parameters too, in any thread.

    Grad mode is per thread and on by default: a gradient made with create_graph requires grad itself. What was made under
    inference_mode is written under it alone, and only such: what else is made there would be bound to it for ever.
    """
    with torch.inference_mode(any(tensor.is_inference() for tensor in tensors)), torch.no_grad():
        yield


@dataclass(frozen=True, kw_only=True)
class Job:
    """An operation to run, the Work it ends, where its seconds are counted and what follows however it ends."""

    run: Callable[[], None]
    work: HethubWork
    count: Callable[[float], None]
    leave: Callable[[], None] | None = None

    def __call__(self) -> None:
        start = time.perf_counter()
        try:
            with writing(self.work.result()):
                self.run()
        except BaseException as error:  # every failure reaches the caller through its Work
            self.work.fail(self.work.operation.failed_for_good(error))
            if not isinstance(error, Exception):  # Ctrl-C, in the caller's own thread
                raise
        else:
            self.count(time.perf_counter() - start)
            self.work.finish()
        finally:
            if self.leave is not None:
                self.leave()


@dataclass(frozen=True, kw_only=True)
class OnceJob(Job):
    """A job that is called twice and runs once."""

    begun: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> None:
        if self.begun.acquire(blocking=False):
            super().__call__()


class Worker:
    """Runs a group's operations one at a time in the order they were submitted, in a thread of its own.

    `prepare` runs at the thread's start: it makes the rank's device the current one, which is device 0 otherwise.

    An operation whose caller waits anyway, submitted when nothing else is under way, runs in the caller's thread: two
    thread switches less, which is most of the latency of a small message.
    """

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        self._name = name
        self._prepare = prepare
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_queued = 0
        self._stopped = False
        self._lock = threading.Lock()
        self._running = threading.Lock()

    def submit(self, job: Job, *, caller_waits: bool = False) -> HethubWork:
        with self._lock:
            if self._stopped:  # nobody would run it
                operation = job.work.operation
                raise BadInput(
                    f"{operation.name} was asked of {operation.group}, which was destroyed on rank {operation.rank}."
                )
            runs_here = caller_waits and self._num_queued == 0 and self._running.acquire(blocking=False)
            if not runs_here:
                self._thread = self._thread or start_thread(self._name, self._prepare, self._serve)
                self._num_queued += 1
                self._jobs.put(job)
        if runs_here:
            try:
                job()
            finally:
                self._running.release()
        return job.work

    def stop(self, goes_on: Callable[[], bool] = lambda: False) -> None:
        """Ends the thread after the jobs already submitted, and waits for it while all `goes_on`, as torch's Gloo does for
        what is under way, and then a moment.

        A thread that comes back from a native call while the interpreter is torn down aborts the process. One that a
        failure has left stuck is not waited for longer.
        """
        with self._lock:
            self._stopped = True
            self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            while self._thread.is_alive() and goes_on():
                self._thread.join(_STOP_SECONDS)
            self._thread.join(_STOP_SECONDS)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._running:
                with self._lock:
                    self._num_queued -= 1
                job()
            del job
