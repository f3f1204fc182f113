"""SIGTERM or SIGUSR1 before there is anything to save: the rank says why it ends, even if its main thread is stuck."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import NoReturn, Self

from hethub.communicator.joining.watch import Watch
from hethub.runtime.launch.launcher_environment import ASKED_TO_END

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_NEWS_SECONDS = 1.0  # for what has failed to be known here
_LAST_WORDS_SECONDS = 10.0  # for a rank that has failed to say so


class EndSignal:
    """Inside its `with` block, SIGTERM and SIGUSR1 end this rank at once, with the reason that is known.

    torchrun sends SIGTERM to the others as soon as one rank has ended; SIGUSR1 asks a run to save and exit, which here
    has nothing to save yet. Python's own handlers wait for the main thread, which may stand in a native call; so a
    thread waits for the signal's number on a pipe. Where another handler takes the signal over, as the training loop's
    does, that one counts. A rank that has failed, and so leaves the block, has time to say why; behind a block that
    ends well nobody hears SIGUSR1, since what is left is short.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._has_failed = False

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._before = signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGUSR1, self._note)
        self._pipe_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, name="hethub-end-signal", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is not None:
            self._has_failed = True
            return
        signal.set_wakeup_fd(self._pipe_before)
        signal.signal(signal.SIGTERM, self._before)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.close(self._write)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Nothing: the thread acts. But without a handler the signal would end the process unheard."""

    def _wait(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] in _SIGNALS and signal.getsignal(number[0]) == self._note:
                self._end(number[0])
        os.close(self._read)

    def _end(self, number: int) -> NoReturn:
        if not self._has_failed:
            if number == signal.SIGUSR1:
                self._watch.end_with_one_voice(ASKED_TO_END, _NEWS_SECONDS)
            self._watch.liveness.report_end()
            failure = self._watch.liveness.wait_for_failure(_NEWS_SECONDS)
            if not self._has_failed:
                if failure is None:
                    self._watch.end_process("its launcher ended it (SIGTERM)", 1)
                self._watch.end_process(str(failure))
        time.sleep(_LAST_WORDS_SECONDS)
        os._exit(1)
