"""What liveness speaks: JSON lines over a socket, bounded in all that a stranger could send."""

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

# Before a connection has proved the job's token it sends one short line; after it, a failure's reason at most.
_MAX_STRANGERS_LINE_BYTES = 1 << 9
_MAX_LINE_BYTES = 1 << 16
_MAX_REASON_CHARACTERS = 4_000


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first thing that went wrong in a world: on which rank, and what."""

    rank: int
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason.strip()}"

    def to_dict(self) -> dict[str, Any]:
        return {"type": "failure", "rank": self.rank, "reason": self.reason[:_MAX_REASON_CHARACTERS]}


def proof(token: str, nonce: str, rank: int) -> str:
    return hmac.new(token.encode(), f"{nonce}:{rank}".encode(), hashlib.sha256).hexdigest()


def proves(given: object, token: str, nonce: str, rank: int) -> bool:
    """Whether `given`, whatever a stranger has sent, is the rank's proof."""
    # Compared as bytes: compare_digest takes no text beyond ASCII.
    said = given.encode("utf-8", "surrogatepass") if isinstance(given, str) else b""
    return hmac.compare_digest(proof(token, nonce, rank).encode(), said)


class Connection:
    """JSON lines over a socket, an object each."""

    def __init__(self, sock: socket.socket, *, trusted: bool = False) -> None:
        self.socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # news does not wait until a beat is acknowledged
        self.trusted = trusted  # the other side has proved the token, or is whom this side must trust
        self.rank: int | None = None
        self.host = ""
        self.left = False
        self.closed = False
        self.since = self.heard = time.monotonic()
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
        longest = _MAX_LINE_BYTES if self.trusted else _MAX_STRANGERS_LINE_BYTES
        if any(len(line) > longest for line in (*lines, self._unread)):
            return None
        try:
            messages = [json.loads(line) for line in lines if line]
        except (ValueError, RecursionError):  # no JSON, or nested beyond all reason
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def excuse(self, seconds: float) -> None:
        """The other side may have spoken for so long while this one, stopped or without a turn, did not listen."""
        now = time.monotonic()
        self.since, self.heard = min(now, self.since + seconds), min(now, self.heard + seconds)

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
