"""How far something has come: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from hethub.runtime.console import make_console
from hethub.runtime.launch.launcher_environment import is_first_rank, is_under_open_mpi


class ProgressDisplay:
    """A bar where the console is a terminal that redraws, lines where it does not, and nothing unless this process `shows` it.

    A context manager around the work; `fields` are what `columns` name beside the counts.
    """

    def __init__(
        self,
        title: str,
        *columns: ProgressColumn,
        console: Console | None = None,
        total: int | None = None,
        done: int = 0,
        shows: bool = True,
        **fields: Any,
    ) -> None:
        self._console, self._shows = console or make_console(), shows
        # mpirun hands on what its ranks print by whole lines: a bar would stand still until the end.
        self._redraws = self._console.is_terminal and not is_under_open_mpi()
        disabled = not (shows and self._redraws)
        self._bar = Progress(TextColumn(title), BarColumn(), *columns, console=self._console, disable=disabled)
        self._task = self._bar.add_task(title, total=total, completed=done, **fields)

    def __enter__(self) -> Self:
        if not self._bar.disable:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._bar.disable:  # older versions of rich would print an empty line
            self._bar.stop()

    def update(self, done: int, line: str | None = None, *, total: int | None = None, **fields: Any) -> None:
        """Moves the bar; where there is none, prints the line if one is due."""
        self._bar.update(self._task, completed=done, total=total, **fields)
        if line is not None and not self._redraws:
            self.say(line)

    def say(self, text: str) -> None:
        if self._shows:
            self._console.print(text)


@contextmanager
def counted(title: str, only_on_terminal: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A function to call with (done, total, what is next); only the first rank of a launcher shows anything.

    Where there is no terminal it prints a line for each, unless `only_on_terminal`.
    """
    columns = MofNCompleteColumn(), TextColumn("{task.fields[what]}")
    with ProgressDisplay(title, *columns, shows=is_first_rank(), what="") as display:

        def show(done: int, total: int, what: str) -> None:
            line = None if only_on_terminal else f"{title} {done + 1}/{total}: {what}"
            display.update(done, line, total=total, what=what)

        yield show
