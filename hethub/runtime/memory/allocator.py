"""How the C library's allocator treats the large blocks of a rank's tensors in host memory."""

import ctypes
import sys
from functools import cache

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
MAPPED_FROM_BYTES = 1 << 20


@cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def map_large_blocks() -> bool:
    """Has malloc map every block of 1 MiB and more by itself, so that freeing it gives its memory back at once; False
    where the C library is not glibc.

    Left alone, glibc raises that threshold to the largest block ever freed (up to 32 MiB): layers' weights and
    gradients that come and go then lie in its heap, whose holes it keeps.
    """
    library = _glibc()
    return library is not None and bool(library.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES))


def return_free_pages() -> None:
    """Has malloc return the pages of freed blocks that it did not map by themselves."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)
