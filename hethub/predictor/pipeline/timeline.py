"""The replayed schedule as spans: what each rank does when, under the names that the runtime's trace uses."""

from itertools import repeat
from typing import NamedTuple

from hethub.predictor.pipeline.step import StepTimes
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import COLLECTIVE, Kind


class Span(NamedTuple):
    """One action of one rank on one stream (compute or communication), seconds from the step's start."""

    rank: int
    stream: str
    name: str
    start_seconds: float
    stop_seconds: float


def timeline(layout: Layout, times: StepTimes) -> tuple[Span, ...]:
    """Return all spans, rank by rank, in the order of each rank's schedule. The times must have been replayed in full."""
    assert times.timed is not None
    by_rank: dict[int, list[Span]] = {}
    for place, timed in times.timed.items():
        acts, starts, stops = zip(*timed, strict=True)
        streams, names = [stream_of(action.kind) for action in acts], [action.name for action in acts]
        for rank in layout.replica(*place).ranks:
            by_rank[rank] = list(map(Span._make, zip(repeat(rank), streams, names, starts, stops)))
    return tuple([span for rank in sorted(by_rank) for span in by_rank[rank]])


def stream_of(kind: Kind) -> str:
    """Return the row of a trace to which an action of this kind belongs."""
    return "communication" if kind in COLLECTIVE else "compute"
