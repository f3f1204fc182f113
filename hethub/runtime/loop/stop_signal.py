"""The wish to save and exit, as a signal."""

import os
import signal
from types import FrameType, TracebackType
from typing import Self


class StopSignal:
    """Inside its `with` block, remembers that a signal asked this rank to save and exit.

    mpirun hands SIGUSR1 on, which `hethub launch` makes of a Ctrl-C; torchrun and Slurm send SIGTERM, also where another
    rank has failed; a terminal's Ctrl-C is SIGINT, and the second one ends the process at once. The ranks agree on it
    at the end of a step. Where `speaks`, whoever asked is answered. Behind the block nobody hears SIGUSR1: all is saved,
    or what has failed is about to be said.
    """

    def __init__(self, *, speaks: bool = False) -> None:
        self.requested = False
        self._speaks = speaks
        self._signals = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._speaks and not self.requested and number != signal.SIGTERM:
            os.write(2, _ANSWER)  # not by print: it may be what was interrupted
        self.requested = True


_ANSWER = b"\nhethub: stopping behind this step, with a checkpoint; Ctrl-C again ends at once, without one\n"
