"""Searches beside each other, in processes forked from this one, which know all that is known here; and without
pauses."""

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Protocol, TypeVar

NICE = 5  # two processes of it leave the third one processor of two

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
    # What the caller does beside them takes longest, so they leave it a processor.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("fork"), initializer=os.nice, initargs=(NICE,))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's collector of cycles, here and in what is forked: of the millions of objects that a search makes
    hardly any form cycles, and in a forked process looking for some copies all pages that were shared."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
