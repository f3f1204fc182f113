"""Parts of a search beside each other, in processes forked from this one, which know all that is known here; and without
pauses."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

from hethub.spec.errors import BadInput

NICE = 5  # two processes of it leave the third one processor of two
WORTH_FORKING = 0.1  # seconds of work for a process: to fork it takes about a tenth of that

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def forked(function: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[Callable[[], list[R]]]:
    """The function of each of 256 items at most, begun in so many processes. What it gives waits for the results, and does
    here what none of them has begun: all of it where there are none, or where forks of a program with libraries are not
    sound. Raises what the function raised of which users are told, and RuntimeError where a process ended without an answer.

    No threads are started, so that processes may be forked while others are at work.
    """
    numbers = bytes(range(len(items)))
    todo, given = os.pipe()
    os.write(given, numbers)  # whoever is free reads the next one, until there is none
    os.close(given)
    started: list[tuple[BaseProcess, Connection]] = []

    def results() -> list[R]:
        found = _results(function, items, todo)
        for process, reader in started:
            try:
                part: dict[int, R] | Exception = reader.recv()
            except EOFError:
                process.join()
                raise RuntimeError(
                    f"a process of the search ended without an answer, exit code {process.exitcode}"
                ) from None
            if isinstance(part, Exception):
                raise part
            found |= part
        return [found[number] for number in range(len(items))]

    try:
        for _ in range(min(processes, len(items)) if sys.platform == "linux" else 0):
            context = get_context("fork")
            reader, writer = context.Pipe(duplex=False)
            begun = context.Process(target=_send_results, args=(function, items, todo, writer), daemon=True)
            begun.start()
            writer.close()
            started.append((begun, reader))
        yield results
    finally:
        os.close(todo)
        for process, reader in started:
            process.kill()
            process.join()
            reader.close()


def at_once(function: Callable[[T], R], items: Sequence[T], processes: int) -> list[R]:
    """The function of each item, by up to so many processes: as many as what the first item takes says are worth
    forking."""
    started = time.perf_counter()
    first = [function(item) for item in items[:1]]
    left = (time.perf_counter() - started) * len(items[1:])
    with forked(function, items[1:], min(processes - 1, int(left / WORTH_FORKING))) as results:
        return first + results()


def _results(function: Callable[[T], R], items: Sequence[T], todo: int) -> dict[int, R]:
    """By number, the results of what nobody else took."""
    found = {}
    while number := os.read(todo, 1):
        found[number[0]] = function(items[number[0]])
    return found


def _send_results(function: Callable[[T], R], items: Sequence[T], todo: int, to: Connection) -> None:
    os.nice(NICE)  # what the caller does beside it takes longest
    try:
        to.send(_results(function, items, todo))
    except KeyboardInterrupt:
        return  # the caller tells of it
    except (BadInput, OSError, MemoryError) as error:  # of all else it prints a traceback
        to.send(error)


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
            gc.freeze()  # and back: all that is alive counts as old, and is not looked through at the next allocation
            gc.unfreeze()
            gc.enable()
