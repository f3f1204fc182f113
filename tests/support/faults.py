"""A rank that is stopped for as long as the others need to give it up, ten seconds at most."""

import os
import time
from pathlib import Path

_LONGEST_SECONDS = 10.0  # what waits for the stopped rank itself, as a torn-down store may, goes on then


def end_when_told(how, num_survivors):
    """A helper sends this process a signal when the others have given up (`tell`), so that the test can end."""
    parent = os.getpid()
    deadline = time.monotonic() + _LONGEST_SECONDS
    if os.fork() == 0:
        while os.getppid() == parent:
            if len(list(Path().glob("told-*"))) == num_survivors or time.monotonic() > deadline:
                os.kill(parent, how)
                break
            time.sleep(0.05)
        os._exit(0)


def tell(rank):
    """All ranks share the folder they start in."""
    Path(f"told-{rank}").touch()
