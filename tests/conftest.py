"""Settings of all tests."""

import os
import sys
from pathlib import Path

from hypothesis import settings

# `python -m pytest` puts the repository root on sys.path, where the link `kernels` would answer for another package.
_ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]

# As the ranks that tests start: one thread each, however many cores there are and tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples at every run and no clock: a shared machine may stall. `--hypothesis-profile=explore` looks further.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")
