"""Searches beside each other: in processes forked from this one, which know all that is known here."""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Map(Protocol):
    """`map` of one argument."""

    def __call__(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]: ...


@contextmanager
def forked(processes: int) -> Iterator[Map]:
    """A `map` whose calls run in so many processes at once, beside what the caller does before it asks for the results.
    With one process they run here and then; so they do where forks of a program with threads are not sound."""
    if processes == 1 or sys.platform != "linux":
        yield map
        return
    pool = ProcessPoolExecutor(processes, mp_context=get_context("fork"))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
