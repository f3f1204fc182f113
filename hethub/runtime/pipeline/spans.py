"""When this rank's actions ran: the measured side of a trace."""

from collections.abc import Iterator
from contextlib import contextmanager

from hethub.kernels.device import Clock, Device, Stamp
from hethub.predictor.pipeline.timeline import Span, stream_of
from hethub.spec.layout.execution import Action


class SpanLog:
    """The spans of one step of one rank, in seconds of the monotonic clock: from when the device came to an action until
    it was through with it."""

    def __init__(self, rank: int, device: Device) -> None:
        self._rank, self._clock = rank, Clock(device)
        self._stamped: list[tuple[Action, Stamp, Stamp]] = []

    def start_step(self) -> None:
        self._stamped = []

    @contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        """Notes when the block ran, under the action's name."""
        start = self._clock.stamp()
        yield
        self._stamped.append((action, start, self._clock.stamp()))

    @property
    def spans(self) -> Iterator[Span]:
        """Those of the step so far, once; who comes to one waits until the device is through with it, and nobody before:
        the next step is launched while it still updates."""
        return map(self._span, self._stamped)

    def _span(self, stamped: tuple[Action, Stamp, Stamp]) -> Span:
        action, start, end = stamped
        seconds = self._clock.seconds
        return Span(self._rank, stream_of(action.kind), action.name, seconds(start), seconds(end))
