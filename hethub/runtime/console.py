"""The terminal, or what stands in its place: where a command's output ends and how wide it may be."""

import os
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from hethub.runtime.launch.launcher_environment import is_under_open_mpi

_PLAIN_WIDTH = 140  # of tables in a file or a pipe


def shows_on_terminal() -> bool:
    """Whether what this process prints ends on a terminal.

    mpirun gives its ranks a pseudo-terminal whatever its own output is, so there its own decides; a rank that cannot
    see it (another node's daemon started it) takes it for none.
    """
    if not sys.stdout.isatty():
        return False
    if not is_under_open_mpi():
        return True
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def make_console() -> Console:
    """A console that prints text as it is: colours only on a terminal, no markup in the names people choose.

    A file or a pipe has no width, unless COLUMNS gives it one.
    """
    on_terminal = shows_on_terminal()
    has_width = on_terminal or os.environ.get("COLUMNS", "").isdigit()
    return Console(
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not has_width,  # a terminal would break lines inside words
        force_terminal=on_terminal,
        width=None if has_width else _PLAIN_WIDTH,
    )


def make_table(*headers: str) -> Table:
    """An empty table as narrow as its words are: where a terminal has 80 columns, nine columns still fit."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for header in headers:
        longest = max(map(len, header.split()), default=0)
        table.add_column(header, overflow="fold", min_width=longest)
    return table
