"""Who is alive: every rank keeps a connection to rank 0's hub, and its end without a goodbye is news at once."""

import atexit
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent import futures
from functools import partial
from typing import Any, TypeVar

from hethub.communicator.joining.connection import Connection, Failure, proof
from hethub.communicator.joining.hub import HEARTBEAT_SECONDS, HELLO_SECONDS
from hethub.spec.errors import RunFailed
from hethub.spec.ranges import show_ranks

T = TypeVar("T")

_LOOK_SECONDS = 0.2
_GIVING_UP_SECONDS = 5.0
_LEAVING_SECONDS = 5.0  # in which those who met a rank before it left are connected, too
_MAX_REASON_CHARACTERS = 4_000  # so that a report stays a line that the hub reads


class Liveness:
    """One rank's side: beats, listens, and knows the world's failure."""

    def __init__(self, *, hub_address: tuple[str, int], rank: int, token: str, silence_seconds: float) -> None:
        self._rank = rank
        self._silence_seconds = silence_seconds
        self._told = threading.Event()  # that all ranks have come, or what has failed
        self._failed = threading.Event()
        self._callbacks: list[Callable[[Failure], None]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._left: set[int] = set()  # as far as this rank has asked
        self.failure: Failure | None = None
        self._connection = Connection(socket.create_connection(hub_address, timeout=HELLO_SECONDS), trusted=True)
        self._early: list[dict[str, Any]] = []
        self._introduce(token)
        threading.Thread(target=self._run, name="hethub-liveness", daemon=True).start()

    def _introduce(self, token: str) -> None:
        nonce = self._next_message()["nonce"]
        self._connection.send(rank=self._rank, proof=proof(token, nonce, self._rank), host=socket.gethostname())
        self._connection.host = str(self._next_message().get("host"))
        self._connection.socket.settimeout(HEARTBEAT_SECONDS / 2)  # as often as the hub looks

    def _next_message(self) -> dict[str, Any]:
        """The hub's next line; what has come behind it is kept."""
        if not self._early:
            self._early = self._connection.read() or []
        if not self._early:
            raise RunFailed(f"rank {self._rank} could not join: rank 0's liveness hub refused it or did not answer.")
        return self._early.pop(0)

    def wait_for_all(self, seconds: float) -> None:
        """Returns when every rank has joined. Raises RunFailed naming the one that has not, or has failed since."""
        told = self._told.wait(seconds)
        self.require_whole()
        if not told:
            raise RunFailed(f"rank {self._rank} ends because rank 0 did not say within {seconds:g} s who has come.")

    def unless_failed(self, connect: Callable[[], T], members: Collection[int]) -> T:
        """What `connect` gives. Raises RunFailed as `look_for` does: a library that connects waits for a rank that is gone,
        several times its timeout; it does so in a thread that is left to itself then."""
        made: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                made.set_result(connect())
            except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
                made.set_exception(error)

        threading.Thread(target=run, name="hethub-connect", daemon=True).start()
        look = self.look_for(members)
        while not futures.wait([made], _LOOK_SECONDS).done:
            look(0.0)
        return made.result()

    def look_for(self, members: Collection[int]) -> Callable[[float], None]:
        """Return a check for whoever waits until these ranks have made a group. It is called again and again, with the seconds
        that it may take. It raises RunFailed as soon as a rank has failed, or some seconds after a member has left."""
        asked, gone_since = time.monotonic(), None

        def look(seconds: float) -> None:
            nonlocal asked, gone_since
            self.require_whole(seconds)
            now, gone = time.monotonic(), self._left.intersection(members)
            gone_since = gone_since or now if gone else None
            # A member may have left as soon as all had come and it was connected: then the others are about to be, too.
            if gone_since is not None and now - gone_since > _LEAVING_SECONDS:
                raise RunFailed(
                    f"rank {self._rank} cannot make a group with rank {show_ranks(sorted(gone))}: it has destroyed its"
                    " default process group, or its program has ended."
                )
            if now - asked > HEARTBEAT_SECONDS:
                asked = now
                self._connection.send(type="who left")

        return look

    def require_whole(self, seconds: float = 0.0) -> None:
        """Raises RunFailed where a rank has failed, or this one hears of it within so many seconds."""
        if self.wait_for_failure(seconds) is not None:
            raise RunFailed(f"rank {self._rank} ends because {self.failure}.") from None

    def when_failed(self, callback: Callable[[Failure], None]) -> None:
        """`callback` runs once, in a thread of its own, when the world's failure is known."""
        with self._lock:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        run_apart(partial(callback, self.failure))

    def report(self, reason: str) -> None:
        """Tells all ranks that this one has failed and why; the first report of the world counts."""
        self._connection.send(type="failed", reason=reason[:_MAX_REASON_CHARACTERS])

    def report_end(self) -> None:
        """Tells the hub that the launcher ends this rank: it will not wait for those that have not come."""
        self._connection.send(type="ending")

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """The world's failure, waited for at most `seconds`."""
        self._failed.wait(seconds)
        return self.failure

    def goodbye(self) -> None:
        """This rank leaves on purpose."""
        self._closed = True
        self._connection.send(type="goodbye")

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self._callbacks.clear()  # they hold the world, and the world this
        self._connection.close()

    def _run(self) -> None:
        last_beat, looked = 0.0, self._connection.heard
        messages: list[dict[str, Any]] | None = self._early
        while not self._closed:
            if messages is None:
                where = self._connection.host
                self._learn(Failure(rank=0, reason=f"is gone: its process on {where} ended without a goodbye"))
                return
            for message in messages:
                self._hear(message)
            now = time.monotonic()
            if now - looked > HEARTBEAT_SECONDS:  # a read takes half of one: this process did not listen
                self._connection.excuse(now - looked)
            looked = now
            silent = now - self._connection.heard
            if silent > self._silence_seconds:
                self._learn(Failure(rank=0, reason=self._silence(silent)))
            if now - last_beat >= HEARTBEAT_SECONDS:
                last_beat = now
                self._connection.send(type="alive")
            messages = self._connection.read()

    def _silence(self, seconds: float) -> str:
        return f"has stopped: no sign of life from {self._connection.host} for {seconds:.0f} s"

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "goodbye":
            self._closed = True
            self._left.add(0)
        elif kind == "left":
            self._left.update(message["ranks"])
        elif kind == "complete":
            self._told.set()
        elif kind == "failure":
            self._learn(Failure(rank=int(message["rank"]), reason=str(message["reason"])))

    def _learn(self, failure: Failure) -> None:
        with self._lock:
            if self.failure is not None or self._closed:
                return
            self.failure = failure
            callbacks, self._callbacks = self._callbacks, []
        self._failed.set()
        self._told.set()
        for callback in callbacks:
            run_apart(partial(callback, failure))


class _GivingUp:
    """Threads that give connections up, for which the end of the process waits a moment; behind that none begins.

    A thread that comes back from a native call while the interpreter is torn down aborts the process: a program that ends
    with the error of its operation would end by SIGABRT.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ended = False
        atexit.register(self._end)

    def begin(self, run: Callable[[], None]) -> None:
        with self._lock:
            if self._ended:
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=run, name="hethub-giving-up", daemon=True))
            self._threads[-1].start()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        for thread in self._threads:
            thread.join(_GIVING_UP_SECONDS)


run_apart = _GivingUp().begin
