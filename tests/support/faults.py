"""A rank that is stopped for as long as the others need to give it up, and no longer."""

import os
import time
from pathlib import Path


def end_when_told(how, num_survivors):
    """A helper sends this process a signal when the others have given up (`tell`), so that the test can end."""
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            if len(list(Path().glob("told-*"))) == num_survivors:
                os.kill(parent, how)
                break
            time.sleep(0.05)
        os._exit(0)


def tell(rank):
    """All ranks share the folder they start in."""
    Path(f"told-{rank}").touch()
