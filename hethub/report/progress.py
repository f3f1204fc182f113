"""A progress bar over counted points, for commands that measure; plain lines where there is no terminal."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hethub.runtime.loop.console import make_console


@contextmanager
def counted(title: str, only_on_terminal: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A function to call with (done, total, what is next); only the first rank of a launcher shows anything.

    Where there is no terminal it prints a line for each, unless `only_on_terminal`.
    """
    console = make_console()
    rank = next(
        (
            os.environ[name]
            for name in ("OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID", "PMI_RANK")
            if name in os.environ
        ),
        "0",
    )
    bar = Progress(
        TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[what]}"), console=console,
        disable=not console.is_terminal or rank != "0",
    )  # fmt: skip
    task = bar.add_task(title, total=None, what="")

    def show(done: int, total: int, what: str) -> None:
        bar.update(task, completed=done, total=total, what=what)
        if not (console.is_terminal or only_on_terminal) and rank == "0":
            console.print(f"{title} {done + 1}/{total}: {what}")

    with bar:
        yield show
