"""Who is alive: every rank keeps a connection to rank 0, and its end without a goodbye is news within milliseconds.

Rank 0 runs the hub. A connection that closes, a heartbeat that stays away, or a rank's own report of what failed
becomes the failure of the world; only the first counts, since what follows are its consequences. The hub tells it to
all. Connections prove the job's token (HMAC over the hub's nonce), so a stranger can neither join nor end a job.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hethub.spec.errors import RunFailed

_HEARTBEAT_SECONDS = 1.0
_HELLO_SECONDS = 10.0
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first thing that went wrong in a world: on which rank, and what."""

    rank: int
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


def proof(token: str, nonce: str, rank: int) -> str:
    return hmac.new(token.encode(), f"{nonce}:{rank}".encode(), hashlib.sha256).hexdigest()


class Connection:
    """JSON lines over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.rank: int | None = None
        self.left = False
        self.heard = time.monotonic()
        self._unread = b""
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Best effort: a peer that is gone is noticed where its connection is read."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None when the connection has ended or does not speak our language."""
        try:
            block = self.socket.recv(65536)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        if not block:
            return None
        self.heard = time.monotonic()
        *lines, self._unread = (self._unread + block).split(b"\n")
        if len(self._unread) > _MAX_LINE_BYTES:
            return None
        try:
            messages = [json.loads(line) for line in lines if line]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Hub:
    """Rank 0's side: listens, watches every connection and spreads the first failure."""

    def __init__(self, *, address: str, size: int, token: str, silence_seconds: float) -> None:
        self._listener = socket.create_server((address, 0), family=_family(address), backlog=size)
        self._size = size
        self._token = token
        self._silence_seconds = silence_seconds
        self._nonces: dict[Connection, str] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._closed = False
        self._wake = os.eventfd(0)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hethub-liveness-hub", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Returns when all ranks have been told goodbye: this process may end right after."""
        if not self._closed:
            os.eventfd_write(self._wake, 1)  # first: the thread closes it as soon as it sees the flag
            self._closed = True
        if threading.current_thread() is not self._thread:  # a garbage collection in that thread may call this
            self._thread.join()

    def _connections(self) -> list[Connection]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _run(self) -> None:
        last_beat = time.monotonic()
        while not self._closed:
            for key, _ in self._selector.select(_HEARTBEAT_SECONDS / 2):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._hear(key.data)
            if time.monotonic() - last_beat >= _HEARTBEAT_SECONDS:
                last_beat = time.monotonic()
                self._beat()
        for connection in self._connections():
            connection.send(type="goodbye")
            connection.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(_HELLO_SECONDS)
        connection = Connection(sock)
        self._nonces[connection] = secrets.token_hex(16)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        connection.send(nonce=self._nonces[connection])

    def _hear(self, connection: Connection) -> None:
        messages = connection.read()
        if messages is None:
            self._drop(connection)
            if connection.rank is not None and not connection.left:
                self._spread(Failure(rank=connection.rank, reason="is gone: its process ended without a goodbye"))
            return
        for message in messages:
            if connection.rank is None:
                if not self._admit(connection, message):
                    return
            elif message["type"] == "failed":
                self._spread(Failure(rank=message["rank"], reason=message["reason"]))
            elif message["type"] == "goodbye":
                connection.left = True

    def _admit(self, connection: Connection, message: dict[str, Any]) -> bool:
        """Whether the connection has proved to be a rank of this job; it is dropped otherwise."""
        rank = message.get("rank")
        expected = proof(self._token, self._nonces.pop(connection, ""), rank if isinstance(rank, int) else -1)
        if not hmac.compare_digest(expected, str(message.get("proof"))):
            self._drop(connection)
            return False
        connection.rank = rank
        connection.send(type="welcome")
        if self._failure is not None:
            connection.send(type="failure", rank=self._failure.rank, reason=self._failure.reason)
        return True

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.close()

    def _beat(self) -> None:
        now = time.monotonic()
        for connection in self._connections():
            silent = now - connection.heard
            if connection.rank is None:
                if silent > _HELLO_SECONDS:
                    self._drop(connection)
            elif silent > self._silence_seconds and not connection.left:
                self._spread(Failure(rank=connection.rank, reason=f"has stopped: no sign of life for {silent:.0f} s"))
            else:
                connection.send(type="alive")

    def _spread(self, failure: Failure) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
        # This process's own rank comes last: once it knows, all others have been told and the process may end.
        for connection in sorted(self._connections(), key=lambda connection: connection.rank == 0):
            if connection.rank is not None:
                connection.send(type="failure", rank=failure.rank, reason=failure.reason)


class Liveness:
    """One rank's side: beats, listens, and knows the world's failure."""

    def __init__(self, *, hub_address: tuple[str, int], rank: int, token: str, silence_seconds: float) -> None:
        self._rank = rank
        self._silence_seconds = silence_seconds
        self._failed = threading.Event()
        self._callbacks: list[Callable[[Failure], None]] = []
        self._lock = threading.Lock()
        self._closed = False
        self.failure: Failure | None = None
        self._connection = Connection(socket.create_connection(hub_address, timeout=_HELLO_SECONDS))
        self._introduce(token)
        threading.Thread(target=self._run, name="hethub-liveness", daemon=True).start()

    def _introduce(self, token: str) -> None:
        nonce = self._next_message()["nonce"]
        self._connection.send(rank=self._rank, proof=proof(token, nonce, self._rank))
        self._next_message()
        self._connection.socket.settimeout(_HEARTBEAT_SECONDS)

    def _next_message(self) -> dict[str, Any]:
        """The hub sends one line and waits for ours, so a read holds exactly one message."""
        messages = self._connection.read()
        if not messages:
            raise RunFailed(f"rank {self._rank} could not join: rank 0's liveness hub refused it or did not answer.")
        return messages[0]

    def when_failed(self, callback: Callable[[Failure], None]) -> None:
        """`callback` runs once, in a thread of its own, when the world's failure is known."""
        with self._lock:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        threading.Thread(target=callback, args=(self.failure,), daemon=True).start()

    def report(self, reason: str) -> None:
        """Tells all ranks that this one has failed and why; the first report of the world counts."""
        self._connection.send(type="failed", rank=self._rank, reason=reason)

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
        last_beat = 0.0
        while not self._closed:
            if time.monotonic() - last_beat >= _HEARTBEAT_SECONDS:
                last_beat = time.monotonic()
                self._connection.send(type="alive")
            messages = self._connection.read()
            if messages is None:
                if not self._closed:
                    self._learn(Failure(rank=0, reason="is gone: its process ended without a goodbye"))
                return
            for message in messages:
                if message["type"] == "goodbye":
                    self._closed = True
                elif message["type"] == "failure":
                    self._learn(Failure(rank=message["rank"], reason=message["reason"]))
            silent = time.monotonic() - self._connection.heard
            if silent > self._silence_seconds:
                self._learn(Failure(rank=0, reason=f"has stopped: no sign of life for {silent:.0f} s"))

    def _learn(self, failure: Failure) -> None:
        with self._lock:
            if self.failure is not None or self._closed:
                return
            self.failure = failure
            callbacks, self._callbacks = self._callbacks, []
        self._failed.set()
        for callback in callbacks:
            threading.Thread(target=callback, args=(failure,), daemon=True).start()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
