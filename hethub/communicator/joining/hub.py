"""Rank 0's side of liveness: who has come, who is alive, and the first failure, spread to all.

A connection that closes, a heartbeat that stays away, a rank that never comes, or a rank's own report of what failed
becomes the failure of the world; only the first counts, since what follows are its consequences. Connections prove the
job's token (HMAC over the hub's nonce), so a stranger can neither join nor end a job: of those that have not proved it
there are few at a time and none for long, they say one short line, and what they say is only compared.
"""

import os
import secrets
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from hethub.communicator.joining.connection import Connection, Failure, proves

HEARTBEAT_SECONDS = 1.0
HELLO_SECONDS = 10.0
_SPARE_STRANGERS = 64  # beside one unproved connection for each rank, which may all come at once
_PAUSE_SECONDS = 0.05  # where no connection can be accepted: descriptors may be free again then


class Hub:
    """Listens, watches every connection and spreads the first failure.

    Ranks that have not come `meeting_seconds` after it began have failed; `place` says where a rank belongs.
    """

    def __init__(
        self,
        *,
        address: str,
        size: int,
        token: str,
        silence_seconds: float,
        meeting_seconds: float,
        place: Callable[[int], str] = lambda _: "",
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=size + _SPARE_STRANGERS)
        self._listener.setblocking(False)
        self._size = size
        self._token = token
        self._silence_seconds = silence_seconds
        self._meeting_seconds = meeting_seconds
        self._place = place
        self._began = self._looked = time.monotonic()
        self._nonces: dict[Connection, str] = {}  # of those that have proved nothing yet, the oldest first
        self._ranks: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._failure: Failure | None = None
        self._closed = False
        self._ending = threading.RLock()  # of two that end it none writes to what the other has closed
        self._wake = os.eventfd(0)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hethub-liveness-hub", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Returns when all ranks have been told goodbye: this process may end right after."""
        with self._ending:
            if not self._closed:
                self._closed = True
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:  # a garbage collection in that thread may call this
            self._thread.join()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # noqa: BLE001  nobody would know that nobody watches: this is a failure of rank 0
            traceback.print_exc()
            self._spread(Failure(rank=0, reason=f"failed: its liveness hub ended: {type(error).__name__}: {error}"))
        for connection in (*self._ranks.values(), *self._nonces):
            connection.send(type="goodbye")
            connection.close()
        self._listener.close()
        self._selector.close()
        with self._ending:
            self._closed = True
            os.close(self._wake)

    def _watch(self) -> None:
        is_closed, last_beat = False, self._looked
        while not is_closed:
            is_closed = self._closed  # what was said before that is heard: it may be why this rank leaves
            events = self._selector.select(0 if is_closed else HEARTBEAT_SECONDS / 2)
            self._now()
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None and not key.data.closed:
                    self._hear(key.data)
            if self._looked - last_beat >= HEARTBEAT_SECONDS:
                last_beat = self._looked
                self._beat()

    def _now(self) -> float:
        """The time. What has passed since this was asked last is nobody's silence if it is more than a heartbeat, of which
        looks take half: this process was stopped or without a turn, and did not listen."""
        now = time.monotonic()
        if (held_up := now - self._looked) > HEARTBEAT_SECONDS:
            self._began += held_up
            for connection in (*self._ranks.values(), *self._nonces):
                connection.excuse(held_up)
        self._looked = now
        return now

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError:  # this process has no descriptor left
            if self._nonces:
                self._drop(next(iter(self._nonces)))
            time.sleep(_PAUSE_SECONDS)
            return
        sock.setblocking(False)  # a peer that reads nothing must not hold up the others
        if len(self._nonces) >= self._size + _SPARE_STRANGERS:
            self._drop(next(iter(self._nonces)))
        connection = Connection(sock)
        self._nonces[connection] = secrets.token_hex(16)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        connection.send(nonce=self._nonces[connection])

    def _hear(self, connection: Connection) -> None:
        messages = connection.read()
        if messages is None:
            self._lose(connection)
            return
        for message in messages:
            if connection.rank is None:
                if not self._admit(connection, message):
                    self._drop(connection)
                    return
            elif message.get("type") == "failed":
                self._spread(Failure(rank=connection.rank, reason=str(message.get("reason"))))
            elif message.get("type") == "goodbye":
                connection.left = True
            elif message.get("type") == "who left":
                connection.send(type="left", ranks=[rank for rank, each in self._ranks.items() if each.left])
            elif message.get("type") == "ending" and self._missing():
                self._spread(self._absence("when the launcher ended the job"))

    def _lose(self, connection: Connection) -> None:
        self._drop(connection)
        if connection.rank is not None and not connection.left:
            reason = f"is gone: its process on {connection.host} ended without a goodbye"
            self._spread(Failure(rank=connection.rank, reason=reason))

    def _admit(self, connection: Connection, message: dict[str, Any]) -> bool:
        """Whether the connection has proved to be a rank of this job that was not here yet."""
        rank = message.get("rank")
        if type(rank) is not int or not 0 <= rank < self._size or rank in self._ranks:
            return False
        if not proves(message.get("proof"), self._token, self._nonces[connection], rank):
            return False
        del self._nonces[connection]
        connection.rank, connection.host, connection.trusted = rank, str(message.get("host", "")), True
        self._ranks[rank] = connection
        connection.send(type="welcome", host=socket.gethostname())
        if self._failure is not None:
            connection.send(**self._failure.to_dict())
        if not self._missing():
            for each in self._ranks.values():
                each.send(type="complete")
        return True

    def _drop(self, connection: Connection) -> None:
        """Ends a connection, whose later events in this round of the loop are passed over."""
        self._nonces.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.close()

    def _beat(self) -> None:
        now = self._now()
        for stranger in [one for one in self._nonces if now - one.since > HELLO_SECONDS]:
            self._drop(stranger)
        for rank, connection in self._ranks.items():
            silent = now - connection.heard
            if silent > self._silence_seconds and not connection.left:
                reason = f"has stopped: no sign of life from {connection.host} for {silent:.0f} s"
                self._spread(Failure(rank=rank, reason=reason))
            else:
                connection.send(type="alive")
        if now - self._began > self._meeting_seconds and self._missing():
            self._spread(self._absence(f"within {self._meeting_seconds:g} s of rank 0"))

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._ranks]

    def _absence(self, when: str) -> Failure:
        """The failure of the first rank that has not come, with what is known of it, and the others' numbers."""
        first, *others = self._missing()
        more = f"; nor did rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}" if others else ""
        return Failure(rank=first, reason=f"{self._place(first)} has not come: it did not join {when}{more}")

    def _spread(self, failure: Failure) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        # This process's own rank comes last: once it knows, all others have been told and the process may end.
        for _, connection in sorted(self._ranks.items(), reverse=True):
            connection.send(**failure.to_dict())
