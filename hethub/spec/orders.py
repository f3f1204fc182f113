"""The order of one lane's passes under each schedule. A lane is a replica, or a stage whose replicas go in rounds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hethub.spec.action import COMPUTE, UPDATE, Kind, Pass

NO_TILE = -1  # index of what is done once for all tiles


@dataclass(frozen=True, eq=False)
class LaneOrder:
    """What a lane does in a step, in order. All lanes that go the same way may share one."""

    passes: tuple[Pass, ...]  # updates among them with index NO_TILE

    @cached_property
    def ways(self) -> tuple[tuple[Kind, int], ...]:
        """The kinds of compute and the parts they run, as they first come."""
        return tuple(dict.fromkeys((kind, part) for kind, part, _ in self.passes if kind in COMPUTE))

    @cached_property
    def way_of(self) -> list[int]:
        """For each entry, which of `ways` it goes; -1 for updates."""
        numbers = {way: number for number, way in enumerate(self.ways)}
        return [numbers.get((kind, part), -1) for kind, part, _ in self.passes]

    @cached_property
    def positions(self) -> dict[tuple[Kind, int], list[int]]:
        """By way, where in the order each of the lane's tiles goes it."""
        found: dict[tuple[Kind, int], dict[int, int]] = {way: {} for way in self.ways}
        for position, (kind, part, index) in enumerate(self.passes):
            if index != NO_TILE:
                found[kind, part][index] = position
        return {way: [own[index] for index in range(len(own))] for way, own in found.items()}

    @cached_property
    def spans(self) -> dict[tuple[Kind, int], tuple[int, int]]:
        """By way, its first and last position."""
        return {way: (min(own), max(own)) for way, own in self.positions.items()}

    @cached_property
    def updates(self) -> dict[tuple[Kind, int], int]:
        """The position of each update, by kind and part."""
        return {(kind, part): position for position, (kind, part, index) in enumerate(self.passes) if index == NO_TILE}


@lru_cache(maxsize=256)
def pipelined(num_tiles: int, in_flight: int, put_off: int | None) -> LaneOrder:
    """1F1B or GPipe; with weight parts apart where `put_off` says how many of them may wait."""
    passes: Iterable[Pass] = one_forward_one_backward(num_tiles, in_flight)
    return ended(passes if put_off is None else with_weight_passes(passes, put_off))


@lru_cache(maxsize=256)
def in_parts(num_tiles: int, num_parts: int, steps_part_by_part: bool) -> LaneOrder:
    """Ministages, where each part is stepped behind its backward, or layered."""
    passes = list(part_by_part(num_tiles, num_parts))
    if not steps_part_by_part:
        return ended(passes)
    found, turn = passes[: num_tiles * num_parts], num_tiles * num_parts
    for part in reversed(range(num_parts)):
        found += passes[turn : turn + num_tiles]
        found += (Pass(kind, part, NO_TILE) for kind in UPDATE)
        turn += num_tiles
    return LaneOrder(tuple(found))


def ended(passes: Iterable[Pass]) -> LaneOrder:
    """The passes, with one update behind them all."""
    return LaneOrder((*passes, *(Pass(kind, 0, NO_TILE) for kind in UPDATE)))


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


def with_weight_passes(passes: Iterable[Pass], put_off: int) -> Iterator[Pass]:
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
