"""The order of one lane's passes under each schedule. A lane is a replica, or a stage whose replicas go in rounds."""

from collections.abc import Iterator, Sequence

from hethub.spec.action import Kind, Pass


def one_forward_one_backward(num_tiles: int, in_flight: int) -> Iterator[Pass]:
    """1F1B: fill up to `in_flight` tiles, then a backward and a forward in turn, then drain. GPipe is in_flight = all."""
    for index in range(num_tiles + in_flight):
        if index >= in_flight:
            yield Pass(Kind.BACKWARD, 0, index - in_flight)
        if index < num_tiles:
            yield Pass(Kind.FORWARD, 0, index)


def part_by_part(num_tiles: int, num_parts: int) -> Iterator[Pass]:
    """Ministages, and layered with a layer as a part: all tiles pass a part before the next, and back."""
    for part in range(num_parts):
        yield from (Pass(Kind.FORWARD, part, index) for index in range(num_tiles))
    for part in reversed(range(num_parts)):
        yield from (Pass(Kind.BACKWARD, part, index) for index in range(num_tiles))


def with_weight_passes(passes: Sequence[Pass], put_off: int) -> Iterator[Pass]:
    """The passes with every backward's weight part behind it, up to `put_off` of them later; those left fill the end.

    They wait for nobody but their own backward, so a list that runs without them runs with them.
    """
    waiting: list[Pass] = []
    for one in passes:
        yield one
        if one.kind is Kind.BACKWARD:
            waiting.append(Pass(Kind.WEIGHT, one.part, one.index))
            if len(waiting) > put_off:
                yield waiting.pop(0)
    yield from waiting
