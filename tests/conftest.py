"""Settings of all tests."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# `python -m pytest` puts the repository root on sys.path, where the link `kernels` would answer for another package.
_ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]

# As the ranks that tests start: one thread each, however many cores there are and tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# pytest imports readline, which tells the processes it starts, and so xdist's workers, that lines have 80 columns.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
    os.unsetenv(_name)

# What runs keep between them (tokens of texts, measurements) goes with the tests.
_CACHE = tempfile.TemporaryDirectory(prefix="hethub-tests-")
os.environ["HETHUB_CACHE"] = _CACHE.name

# The same examples at every run and no clock: a shared machine may stall. `--hypothesis-profile=explore` looks further.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Rests Python's collector while tests are collected, and keeps what is there then out of its later rounds.

    Modules and tests stay to the end, so there is no garbage to find among them: looking takes a third of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
