"""Counts of what a world has communicated: per operation and group with the seconds of each leg, and per link."""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from hethub.communicator import torch_private

_DESTROYED = "groups that were destroyed"


class Leg(StrEnum):
    """What a bridged operation spends its time on, as its thread feels it: legs overlap, waiting counts once."""

    COPY = "copy"
    ISLAND_REDUCE = "island_reduce_scatter"
    WIRE = "wire"
    ADD = "add"
    ISLAND_GATHER = "island_all_gather"


class LegClock:
    """Seconds per leg of the operation that a group runs at present; one thread at a time uses it.

    `with clock(Leg.WIRE):` counts the block, and is a range of a running profiler.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def __call__(self, leg: Leg) -> "_Timed":
        return _Timed(self._seconds, leg)

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


class _Timed:
    __slots__ = ("_leg", "_range", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], leg: Leg) -> None:
        self._seconds = seconds
        self._leg = leg

    def __enter__(self) -> Self:
        self._range = torch_private.begin_range(f"hethub:{self._leg}")
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        elapsed = time.perf_counter() - self._start
        self._seconds[self._leg] = self._seconds.get(self._leg, 0.0) + elapsed
        if self._range is not None:
            self._range.__exit__(*error)


@dataclass
class OperationCount:
    """Calls of one operation in one group, the bytes of their tensors, the time from start to end and in each leg."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    legs: dict[str, float] = field(default_factory=dict)


@dataclass
class LinkCount:
    """Messages this rank sent to one peer for one group."""

    messages: int = 0
    bytes: int = 0


@dataclass
class Counters:
    """Thread-safe totals since the world was connected."""

    _operations: dict[tuple[str, str], OperationCount] = field(default_factory=lambda: defaultdict(OperationCount))
    _links: dict[tuple[str, int, str, str], LinkCount] = field(default_factory=lambda: defaultdict(LinkCount))
    _lock: Any = field(default_factory=threading.RLock)
    """A garbage collection in the thread that holds it may call `fold`."""

    def count_operation(
        self, group: str, operation: str, num_bytes: int, seconds: float, legs: dict[str, float] | None = None
    ) -> None:
        with self._lock:
            count = self._operations[group, operation]
            count.calls += 1
            count.bytes += num_bytes
            count.seconds += seconds
            for leg, spent in (legs or {}).items():
                count.legs[leg] = count.legs.get(leg, 0.0) + spent

    def count_sent(self, group: str, peer: int, relay: str, *, is_bridge: bool, num_bytes: int) -> None:
        with self._lock:
            count = self._links[group, peer, relay, "bridge" if is_bridge else "island"]
            count.messages += 1
            count.bytes += num_bytes

    def fold(self, group: str) -> None:
        """Adds the group's counts to those of all groups that were destroyed, so that totals stay and rows do not grow."""
        with self._lock:
            for key in [key for key in self._operations if key[0] == group]:
                past, count = self._operations[_DESTROYED, key[1]], self._operations.pop(key)
                past.calls += count.calls
                past.bytes += count.bytes
                past.seconds += count.seconds
                for leg, spent in count.legs.items():
                    past.legs[leg] = past.legs.get(leg, 0.0) + spent
            for link in [link for link in self._links if link[0] == group]:
                carried, sent = self._links[_DESTROYED, *link[1:]], self._links.pop(link)
                carried.messages += sent.messages
                carried.bytes += sent.bytes

    def bridge_bytes(self) -> int:
        """Payload bytes this rank sent to ranks of other islands."""
        with self._lock:
            return sum(count.bytes for (*_, level), count in self._links.items() if level == "bridge")

    def to_dict(self) -> dict[str, Any]:
        """{"operations": [{group, operation, calls, bytes, seconds, legs: {leg: seconds}}],
        "links": [{group, peer, relay, level, messages, bytes}]}."""
        with self._lock:
            operations = [
                {"group": group, "operation": operation, **vars(count), "legs": dict(count.legs)}
                for (group, operation), count in sorted(self._operations.items())
            ]
            links = [
                {"group": group, "peer": peer, "relay": relay, "level": level, **vars(count)}
                for (group, peer, relay, level), count in sorted(self._links.items())
            ]
        return {"operations": operations, "links": links}


def since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What `now` (of `Counters.to_dict`) counts that `before` did not; rows without any news are left out."""
    return {
        "operations": _news(before["operations"], now["operations"], ("group", "operation")),
        "links": _news(before["links"], now["links"], ("group", "peer", "relay", "level")),
    }


def _news(before: list[dict[str, Any]], now: list[dict[str, Any]], key: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = {tuple(row[name] for name in key): row for row in now}
    for old in before:
        place = tuple(old[name] for name in key)
        if place not in rows or _is_less(rows[place], old):  # another group has its name now
            place = (_DESTROYED, *place[1:])  # where `fold` has put it meanwhile
        if place in rows:
            rows[place] = _less(rows[place], old, key)
    return [row for row in rows.values() if row.get("calls", row.get("messages"))]


def _is_less(row: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether the row cannot hold the old one: totals only grow."""
    return any(row[name] < value for name, value in old.items() if isinstance(value, int | float))


def _less(row: dict[str, Any], old: dict[str, Any], key: tuple[str, ...]) -> dict[str, Any]:
    """The row's numbers without the old ones."""
    rest: dict[str, Any] = {}
    for name, value in row.items():
        if name in key:
            rest[name] = value
        elif isinstance(value, dict):
            rest[name] = {leg: spent - old[name].get(leg, 0.0) for leg, spent in value.items()}
        else:
            rest[name] = value - old[name]
    return rest
