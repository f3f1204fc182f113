"""Root's rights: laid down, so that tests meet closed files whoever runs them, or used to mount."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="runs as root, which may mount a /dev/shm of its own"
)
SMALL_SHARED_MEMORY = (
    "unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"
)  # fmt: skip
"""What a command is put behind to find a /dev/shm of 64 KiB."""

_VERSION_3 = 0x20080522
_ANY_FILE = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


_Data = ctypes.c_uint32 * 6  # effective, permitted, inheritable; then the same for the higher bits


def lay_down(rank: int = 0) -> None:
    """This thread may open what file modes allow, until it ends."""
    _set_effective(_effective() & ~_ANY_FILE)


@contextmanager
def laid_down() -> Iterator[None]:
    """As `lay_down`, for the block."""
    before = _effective()
    _set_effective(before & ~_ANY_FILE)
    try:
        yield
    finally:
        _set_effective(before)


def _effective() -> int:
    return int(_get()[0])


def _get() -> "ctypes.Array[ctypes.c_uint32]":
    header, data = _Header(_VERSION_3, 0), _Data()
    if ctypes.CDLL(None, use_errno=True).capget(ctypes.byref(header), data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    return data


def _set_effective(value: int) -> None:
    header, data = _Header(_VERSION_3, 0), _get()
    data[0] = value
    if ctypes.CDLL(None, use_errno=True).capset(ctypes.byref(header), data) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
