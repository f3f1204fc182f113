"""The wish to save and exit, as a signal."""

import signal
from types import FrameType, TracebackType
from typing import Self


class StopSignal:
    """Inside its `with` block, remembers that a signal asked this rank to save and exit.

    mpirun forwards SIGUSR1; torchrun and Slurm send SIGTERM. The ranks agree on it at the end of a step.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGUSR1, signal.SIGTERM)) -> None:
        self.requested = False
        self._signals = signals

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
