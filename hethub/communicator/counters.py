"""Counts of what a world has communicated: per operation and group, and per link."""

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class OperationCount:
    """Calls of one operation in one group, the bytes of their tensors and the time from start to end."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class LinkCount:
    """Messages this rank sent over one kind of link."""

    messages: int = 0
    bytes: int = 0


@dataclass
class Counters:
    """Thread-safe totals since the world was connected."""

    _operations: dict[tuple[str, str], OperationCount] = field(default_factory=lambda: defaultdict(OperationCount))
    _links: dict[tuple[str, str], LinkCount] = field(default_factory=lambda: defaultdict(LinkCount))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_operation(self, group: str, operation: str, num_bytes: int, seconds: float) -> None:
        with self._lock:
            count = self._operations[group, operation]
            count.calls += 1
            count.bytes += num_bytes
            count.seconds += seconds

    def count_sent(self, relay: str, *, is_bridge: bool, num_bytes: int) -> None:
        with self._lock:
            count = self._links[relay, "bridge" if is_bridge else "island"]
            count.messages += 1
            count.bytes += num_bytes

    def bridge_bytes(self) -> int:
        """Payload bytes this rank sent to ranks of other islands."""
        with self._lock:
            return sum(count.bytes for (_, level), count in self._links.items() if level == "bridge")

    def to_dict(self) -> dict[str, Any]:
        """{"operations": [{group, operation, calls, bytes, seconds}], "links": [{relay, level, messages, bytes}]}."""
        with self._lock:
            operations = [
                {"group": group, "operation": operation, **vars(count)}
                for (group, operation), count in sorted(self._operations.items())
            ]
            links = [
                {"relay": relay, "level": level, **vars(count)} for (relay, level), count in sorted(self._links.items())
            ]
        return {"operations": operations, "links": links}
