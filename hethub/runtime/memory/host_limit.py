"""How much of its host's memory a process may use."""

import os
from collections.abc import Iterator
from pathlib import Path


def host_memory_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or the least limit of the control groups around this process where that is less.

    `root` is where /proc and /sys are looked for.
    """
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """The limits of this process's memory groups and all around them, version 1 and 2."""
    listed = root / "proc/self/cgroup"
    for line in listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            mounted, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mounted, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = mounted / group.lstrip("/")
        for folder in (own, *own.parents):
            file = folder / name
            if folder.is_relative_to(mounted) and file.is_file():
                text = file.read_text(encoding="utf-8").strip()
                if text != "max":
                    yield int(text)
