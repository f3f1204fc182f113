"""transformers, for the tests that ask for it."""

from typing import Any

import pytest


def transformers() -> Any:
    """The module, imported where a test runs: at the head of a file it would take two seconds of each of pytest's
    workers, which all collect every file."""
    return pytest.importorskip("transformers", reason="needs transformers: pip install 'hethub[test]'")
