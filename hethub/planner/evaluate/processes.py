"""Runs parts of a search in parallel, in processes forked from this one, and without pauses for Python's garbage collector."""

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

NICE = 5  # of forked processes: two of them on two processors leave the caller one processor
WORTH_FORKING = 0.1  # seconds of work for which a process is forked; the fork takes about a tenth of it

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def forked(function: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[Callable[[], list[R]]]:
    """Start `function` for each of at most 256 items in so many forked processes; yield a function that returns the results.

    That function computes here what no process has begun, and waits for the rest. Where no processes are asked for, or the
    system does not fork safely, it computes everything here. It raises BadInput, OSError or MemoryError where `function` did,
    and RuntimeError where a process ended without an answer. No threads are started, so that several of these may be nested.
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
    """Return the function of each item, computed by up to so many processes. The time of the first item decides how many
    processes are worth forking."""
    started = time.perf_counter()
    first = [function(item) for item in items[:1]]
    left = (time.perf_counter() - started) * len(items[1:])
    with forked(function, items[1:], min(processes - 1, int(left / WORTH_FORKING))) as results:
        return first + results()


def _results(function: Callable[[T], R], items: Sequence[T], todo: int) -> dict[int, R]:
    """Compute the items that no other process has taken; return the results by the items' numbers."""
    found = {}
    while number := os.read(todo, 1):
        found[number[0]] = function(items[number[0]])
    return found


def _send_results(function: Callable[[T], R], items: Sequence[T], todo: int, to: Connection) -> None:
    os.nice(NICE)  # the caller's own work takes longest
    try:
        to.send(_results(function, items, todo))
    except KeyboardInterrupt:
        return  # the caller reports it
    except (BadInput, OSError, MemoryError) as error:  # any other exception prints a traceback in this process
        to.send(error)


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch Python's collector of cycles off, here and in forked processes. A search makes millions of objects, of which hardly
    any form cycles, and a collection in a forked process would copy all pages that it shares."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # then unfreeze: all live objects now count as old, and are not scanned at the next allocation
            gc.unfreeze()
            gc.enable()
