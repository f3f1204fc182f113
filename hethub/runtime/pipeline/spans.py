"""When this rank's actions ran: the measured side of a trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from hethub.predictor.pipeline.timeline import Span, stream_of
from hethub.spec.layout.execution import Action


class SpanLog:
    """The spans of one step of one rank, in seconds of the monotonic clock.

    The host's clock: on a device, where work is only submitted, a span ends when the host is through with it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.spans: list[Span] = []

    def start_step(self) -> None:
        self.spans = []

    @contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        """Notes when the block ran, under the action's name."""
        start = monotonic()
        yield
        self.spans.append(Span(self._rank, stream_of(action.kind), action.name, start, monotonic()))
