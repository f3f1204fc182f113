"""What a rank holds of the messages that it sends, and of when its actions ran."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch

from hethub.kernels.device import choose_device
from hethub.runtime.pipeline.spans import SpanLog
from hethub.runtime.pipeline.transport import Transport
from hethub.spec.layout.execution import Action, Kind


def test_what_has_been_sent_is_let_go_with_the_next_message() -> None:
    """In their order; under GPipe a stage else held all its microbatches' results until the step was over."""
    transport: Any = Transport.__new__(Transport)
    place = Kind.FORWARD, 0, None
    transport._outgoing = {place: []}
    are_sent = True, True, False, True
    works = [SimpleNamespace(is_completed=lambda sent=sent: sent) for sent in are_sent]
    transport._sends = deque((work, torch.empty(1)) for work in works)
    transport._send(place, torch.empty(1))
    assert [work for work, _ in transport._sends] == works[2:]


def test_a_step_ends_with_what_it_has_sent() -> None:
    """Its last results else lay beside the next step's first ones."""
    transport: Any = Transport.__new__(Transport)
    transport._arrivals, transport._handed, transport._expected, transport._num_posted = {}, {}, {}, {}
    transport._num_loading, waited = 0, []
    transport._sends = deque((SimpleNamespace(wait=lambda n=n: waited.append(n)), torch.empty(1)) for n in range(3))
    transport.finish()
    assert waited == [0, 1, 2]
    assert not transport._sends


def test_a_log_of_spans_is_of_one_step() -> None:
    log = SpanLog(0, choose_device(0, 1, kind="cpu"))
    for stage in (1, 2):
        log.start_step()
        with log.timed(Action(Kind.REDUCE, stage)):
            pass
        assert [span.name for span in log.spans] == [Action(Kind.REDUCE, stage).name]
