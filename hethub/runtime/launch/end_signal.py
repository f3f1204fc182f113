"""SIGTERM or SIGUSR1 before there is anything to save: the rank says why it ends, even if its main thread is stuck."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from hethub.communicator.joining.watch import Watch

ASKED_TO_END = "it was asked to (SIGUSR1) before its first step: there is nothing to save, start it again"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_NEWS_SECONDS = 1.0  # for what has failed to be known here


class EndSignal:
    """Inside its `with` block, SIGTERM and SIGUSR1 end this rank at once, with the reason that is known.

    torchrun sends SIGTERM to the others as soon as one rank has ended; SIGUSR1 asks a run to save and exit, which here
    has nothing to save yet. Python's own handlers wait for the main thread, which
    may stand in a native call; so a thread waits for the signal's number on a pipe. Where another handler takes the
    signal over, as the training loop's does, that one counts.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        self._pipe_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, name="hethub-end-signal", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._pipe_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._write)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Nothing: the thread acts. But without a handler the signal would end the process unheard."""

    def _wait(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] not in _SIGNALS or signal.getsignal(number[0]) != self._note:
                continue
            if number[0] == signal.SIGUSR1:
                self._watch.end_with_one_voice(ASKED_TO_END, _NEWS_SECONDS)
            else:
                self._watch.liveness.report_end()
                failure = self._watch.liveness.wait_for_failure(_NEWS_SECONDS)
                self._watch.end_process(str(failure) if failure else "its launcher ended it (SIGTERM)")
        os.close(self._read)
