"""What a rank holds of the messages that it sends."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch

from hethub.runtime.pipeline.transport import Transport
from hethub.spec.layout.execution import Kind


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
