"""Chunks of one collective under way at the same time, in an order that is the same on every rank."""

from collections import deque
from collections.abc import Iterable, Iterator

Stages = Iterator[None]
"""One chunk's work as a generator: it yields before it waits for what other ranks send."""

_FINISHED = object()


def run_pipelined(chunks: Iterable[Stages], lag: int) -> None:
    """Runs all chunks to the end, each stage of a chunk `lag` steps after the one before it.

    A step starts one chunk, so a stage waits for messages that were sent while `lag` other chunks were begun. The order
    depends on the count of chunks and stages only, never on timing: every rank posts its messages in the same order.
    """
    active: deque[tuple[int, Stages]] = deque()
    step = 0
    for step, chunk in enumerate(chunks):
        active.append((step, chunk))
        _advance(active, step, lag)
    while active:
        step += 1
        _advance(active, step, lag)


def _advance(active: deque[tuple[int, Stages]], step: int, lag: int) -> None:
    """Runs the next stage of every chunk that is due, oldest first, and drops the finished ones."""
    for _ in range(len(active)):
        start, chunk = active.popleft()
        if (step - start) % lag or next(chunk, _FINISHED) is not _FINISHED:
            active.append((start, chunk))
