"""What is told of a rank's layers, and when."""

from hethub.runtime.pace import Pace
from hethub.runtime.pipeline.itinerary import Itinerary, Visit
from hethub.spec.layout.execution import Kind


class Told:
    """A ZeRO manager that notes what it is told."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *place: self.calls.append((name, *(each for each in place if isinstance(each, int))))


def test_the_first_layer_is_announced_before_anything_is_waited_for():
    """Its update and its weights came only when the first message was there."""
    told = Told()
    itinerary = Itinerary(told, [Visit(Kind.FORWARD, 0), Visit(Kind.FORWARD, 1)], Pace())
    itinerary.start_step()
    assert told.calls == [("prefetch", 0)]
    itinerary.enter(Kind.FORWARD, 0)
    assert told.calls == [("prefetch", 0), ("acquire", 0), ("prefetch", 1)]
