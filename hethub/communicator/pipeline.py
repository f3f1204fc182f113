"""Chunks of one collective under way at the same time, in an order that is the same on every rank."""

from collections import deque
from collections.abc import Iterable, Iterator

_FINISHED = object()

Stages = Iterator[None]
"""One chunk's work as a generator: it yields wherever it would wait, so that the next chunk can start."""


def run_pipelined(chunks: Iterable[Stages], depth: int) -> None:
    """Runs all chunks to the end, at most `depth` begun and not finished.

    A step starts one chunk and advances every begun one by one stage, oldest first. That order depends on the count of
    chunks and stages only, never on timing, so every rank posts its messages in the same order.
    """
    active: deque[Stages] = deque()
    for chunk in chunks:
        active.append(chunk)
        while _advance(active) >= depth:
            pass
    while active:
        _advance(active)


def _advance(active: deque[Stages]) -> int:
    """Advances each chunk by one stage, drops the finished ones and returns how many are left."""
    for _ in range(len(active)):
        chunk = active.popleft()
        if next(chunk, _FINISHED) is not _FINISHED:
            active.append(chunk)
    return len(active)
