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


WEIGHTS_MOVE = ("prefetch", "acquire", "release")


def told_in_a_forward(microbatches: int, *, chunk_by_chunk: bool) -> list[tuple[str, int]]:
    """What a manager is told of two layers that so many microbatches pass, of what a visit without one is told (0)."""
    told, turns = Told(), max(1, microbatches) if chunk_by_chunk else 1
    visits = [Visit(Kind.FORWARD, 0, turns, not chunk_by_chunk), Visit(Kind.FORWARD, 1, turns)]
    itinerary = Itinerary(told, visits, Pace())
    itinerary.start_step()
    for layer in (0, 1) if microbatches == 0 else ():
        itinerary.join(Kind.FORWARD, layer)
    for _ in range(microbatches):
        for layer in (0, 1):
            itinerary.enter(Kind.FORWARD, layer)
            itinerary.leave(Kind.FORWARD, layer)
    assert told.calls.count(("end_layer",)) == 2 * microbatches
    return [call for call in told.calls if call[0] in WEIGHTS_MOVE]


def test_in_a_round_a_layer_is_released_before_the_next_with_a_microbatch_or_without():
    wanted = [
        ("prefetch", 0),
        ("acquire", 0),
        ("prefetch", 1),
        ("release", 0),
        ("acquire", 1),
        ("release", 1),
    ]
    assert told_in_a_forward(1, chunk_by_chunk=False) == wanted
    assert told_in_a_forward(0, chunk_by_chunk=False) == wanted


def test_where_all_microbatches_pass_a_chunk_its_layers_go_once_all_are_entered_however_many_pass():
    """Released before the next was entered by one replica and after it by another, their collectives were in two orders."""
    wanted = [
        ("prefetch", 0),
        ("acquire", 0),
        ("prefetch", 1),
        ("acquire", 1),
        ("release", 0),
        ("release", 1),
    ]
    for microbatches in (1, 2, 3):
        assert told_in_a_forward(microbatches, chunk_by_chunk=True) == wanted


def test_a_layer_that_is_through_goes_when_the_pass_s_last_one_is_entered():
    """Not when that is through, too: its memory would lie there while another layer computes."""
    told = Told()
    itinerary = Itinerary(told, [Visit(Kind.FORWARD, 0, 1, False), Visit(Kind.FORWARD, 1)], Pace())
    itinerary.start_step()
    itinerary.enter(Kind.FORWARD, 0)
    itinerary.leave(Kind.FORWARD, 0)
    assert ("release", 0) not in told.calls
    itinerary.enter(Kind.FORWARD, 1)
    assert told.calls[-2:] == [("acquire", 1), ("release", 0)]
