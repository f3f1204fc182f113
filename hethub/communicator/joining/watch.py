"""The certainty that a rank's process ends when its job cannot go on: another rank has failed, or its launcher."""

import contextlib
import faulthandler
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch.distributed as dist

from hethub.communicator.joining.connection import Failure
from hethub.communicator.joining.hub import Hub
from hethub.communicator.joining.liveness import Liveness

_GRACE_SECONDS = 5.0
_LINGER_SECONDS = 2.0  # mpirun kills who is left when half of the ranks have gone: all speak at about the same time
_LAUNCHER_SECONDS = 1.0  # how often a rank looks after its launcher

failed_code = 1
"""What a process ends with that a failure ends here; a command sets its own, where the same command would go on."""


class Watch:
    """One rank's part in knowing who lives, and what ends its process."""

    def __init__(self, rank: int, hub: Hub | None, liveness: Liveness, timeout_seconds: float) -> None:
        self.liveness = liveness
        self._rank = rank
        self._hub = hub
        # A fault is to be named within the timeout, of which half may pass before it is known.
        self._grace_seconds = min(_GRACE_SECONDS, timeout_seconds / 4)
        self._speaking = threading.Lock()
        self._closed = threading.Event()
        self._told = False

    def end_with_the_job(self, grace_seconds: float | None = None) -> None:
        """From here on this process ends when any rank fails, even if its main thread is stuck in a native call.

        A process that has neither ended by itself after `grace_seconds` nor is about to (`tell`) prints the reason and
        exits with `failed_code`.
        """
        grace = self._grace_seconds if grace_seconds is None else grace_seconds

        def end(failure: Failure) -> None:
            # The C-level timer needs no interpreter lock: it ends the process even if this thread cannot run.
            faulthandler.dump_traceback_later(grace + 10, exit=True)
            if self._closed.wait(grace):
                faulthandler.cancel_dump_traceback_later()
            else:
                with self._speaking:
                    if not self._told:
                        end_process(self._rank, str(failure))

        self.liveness.when_failed(end)

    def end_with_the_launcher(self, launcher: int) -> None:
        """From here on this process ends when the one that started it, `launcher`, has: nobody else would end it."""

        def look() -> None:
            while not self._closed.wait(_LAUNCHER_SECONDS):
                if os.getppid() != launcher:
                    self.end_process(f"its launcher (process {launcher}) is gone")

        threading.Thread(target=look, name="hethub-launcher", daemon=True).start()

    def end_process(self, reason: str, code: int | None = None) -> NoReturn:
        """Says why this rank ends and ends it with `code`, else `failed_code`, whatever its other threads do."""
        with self._speaking:  # once
            end_process(self._rank, reason, code)

    def end_with_one_voice(self, reason: str, seconds: float) -> NoReturn:
        """End the process with 1, because it was asked for. If other ranks end for the same reason within `seconds`, only the
        first speaks."""
        self.liveness.report(f"ends because {reason}")
        failure = self.liveness.wait_for_failure(seconds)
        is_said = failure is not None and failure.rank != self._rank and reason in failure.reason
        with self._speaking:
            end_process(self._rank, None if is_said else reason, 1)

    def tell(self, reason: str) -> None:
        """Tells every rank that this one has failed and why; its own process is about to end by itself, and to say so. Does
        not return where another thread has said already why it ends."""
        self.liveness.report(f"failed: {reason}")
        self.liveness.wait_for_failure(self._grace_seconds)  # told to all: this process may end
        with self._speaking:
            self._told = True

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Leaves: the others may go on among themselves. When rank 0 goes, nobody watches any more."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.liveness.goodbye()
        self.liveness.close()
        if self._hub is not None:
            self._hub.close()


def watch_over(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    address: str,
    token: str,
    timeout_seconds: float,
    place: Callable[[int], str] = lambda _: "",
) -> Watch:
    """This rank's watch; rank 0's hub waits for the others for `timeout_seconds`, and `place` says where they belong.

    The process may open as many files from here on as the system lets it: every other rank takes some.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    silence_seconds = max(2.0, min(60.0, timeout_seconds / 2))
    hub = None
    if rank == 0:
        hub = Hub(
            address=address, size=size, token=token, silence_seconds=silence_seconds,
            meeting_seconds=timeout_seconds, place=place,
        )  # fmt: skip
        store.set("liveness", json.dumps([address, hub.port]))
    host, port = json.loads(store.get("liveness"))
    liveness = Liveness(hub_address=(host, port), rank=rank, token=token, silence_seconds=silence_seconds)
    return Watch(rank, hub, liveness, timeout_seconds)


@contextlib.contextmanager
def deadline(seconds: float, rank: int, reason: str) -> Iterator[None]:
    """The block, which may stand in native calls that nothing interrupts: the process ends if it takes longer."""

    timer = threading.Timer(seconds, end_process, (rank, reason))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_process(rank: int, reason: str | None, code: int | None = None) -> NoReturn:
    """Ends it with `code`, else `failed_code`, without a word where there is no reason; a handler of signals may call it."""
    if reason is not None:
        with contextlib.suppress(OSError):  # who read stderr may be gone too
            # One write with its line's end: the ranks share their launcher's pipe. Not by print, which may be what a
            # signal has interrupted.
            os.write(2, f"hethub: rank {rank} ends because {reason}.\n".encode())
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        time.sleep(_LINGER_SECONDS)
    os._exit(failed_code if code is None else code)
