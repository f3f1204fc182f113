"""What every rank does when: the replayed schedule as spans, with the names that the runtime's trace uses."""

from typing import NamedTuple

from hethub.predictor.step import StepTimes
from hethub.spec.layout import Layout
from hethub.spec.schedule import Action, Kind, schedule


class Span(NamedTuple):
    """One action of one rank on one stream (compute or communication), seconds from the step's start."""

    rank: int
    stream: str
    name: str
    start_seconds: float
    stop_seconds: float


def timeline(layout: Layout, times: StepTimes) -> tuple[Span, ...]:
    """All spans, rank by rank in the order of each rank's schedule. Needs times replayed in full."""
    assert times.replay.programme is not None
    spans = []
    for seat, acts in schedule(layout).items():
        timed = [(act, *_when(times, seat, act)) for act in acts]
        for rank in layout.replica(*seat).ranks:
            spans += [Span(rank, stream_of(act.kind), act.name, a, b) for act, a, b in timed]
    return tuple(sorted(spans, key=lambda span: span.rank))


def stream_of(kind: Kind) -> str:
    """The row of a trace that an action of this kind belongs to."""
    return "communication" if kind in (Kind.REDUCE, Kind.GATHER) else "compute"


def _when(times: StepTimes, seat: tuple[int, int], act: Action) -> tuple[float, float]:
    programme = times.replay.programme
    assert programme is not None
    if act.tile is not None:
        g = times.replay.numbers[act.tile]
        forward = act.kind is Kind.FORWARD
        end = (programme.forward_end if forward else programme.backward_end)[g]
        return end - (programme.forward if forward else programme.backward)[g], end
    if act.kind is Kind.REDUCE:
        return times.replay.ends[seat].last_backward_end, times.reduce_end[seat[0]]
    if act.kind is Kind.STEP:
        return times.step_start, times.step_end[seat]
    return times.step_end[seat], times.gather_end[seat]
