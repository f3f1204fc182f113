"""The order of one lane's passes under each schedule. A lane is a replica, or a stage whose replicas go in rounds."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hethub.spec.schedule.actions import UPDATE, Kind, Pass

NO_TILE = -1  # index of what is done once for all tiles

Way = tuple[Kind, int]  # what is done, and in which part of the stage


@dataclass(frozen=True, eq=False)
class LaneOrder:
    """What a lane does in a step, in order, as columns. All lanes that go the same way may share one."""

    computing: tuple[Way, ...]
    updating: tuple[Way, ...]
    way_of: list[int]  # by position; those of `updating` count behind those of `computing`
    index_of: list[int]  # by position, which of the lane's tiles

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The entries one by one."""
        ways = self.computing + self.updating
        return tuple(Pass(*ways[way], index) for way, index in zip(self.way_of, self.index_of, strict=True))

    @cached_property
    def positions(self) -> dict[Way, list[int]]:
        """By way of computing, where in the order each of the lane's tiles goes it."""
        found = [[0] * self.way_of.count(way) for way in range(len(self.computing))]
        for position, (way, index) in enumerate(zip(self.way_of, self.index_of, strict=True)):
            if index != NO_TILE:
                found[way][index] = position
        return dict(zip(self.computing, found, strict=True))

    @cached_property
    def updates(self) -> dict[Way, int]:
        """The position of each update."""
        first = len(self.computing)
        return {way: self.way_of.index(first + number) for number, way in enumerate(self.updating)}

    @cached_property
    def spans(self) -> dict[Way, tuple[int, int]]:
        """By way of computing, its first and last position."""
        return {way: (min(own), max(own)) for way, own in self.positions.items()}

    @cached_property
    def edges(self) -> list[int]:
        """The positions of updates, and of each way's first and last entry, in order."""
        return sorted({*self.updates.values(), *(edge for span in self.spans.values() for edge in span)})


@lru_cache(maxsize=256)
def pipelined(num_tiles: int, in_flight: int, put_off: int | None) -> LaneOrder:
    """1F1B: up to `in_flight` tiles forward, then a backward and a forward in turn, then the rest back. GPipe holds all.

    Where `put_off` is given, each backward's weight part comes behind it, up to so many of them later; those left fill
    the end. They wait for nobody but their own backward, so an order that runs without them runs with them.
    """
    computing = ((Kind.FORWARD, 0), (Kind.BACKWARD, 0)) + (((Kind.WEIGHT, 0),) if put_off is not None else ())
    way_of, index_of = [0] * min(in_flight, num_tiles), list(range(min(in_flight, num_tiles)))
    for index in range(num_tiles):
        way_of.append(1)
        index_of.append(index)
        if put_off is not None and index >= put_off:
            way_of.append(2)
            index_of.append(index - put_off)
        if index + in_flight < num_tiles:
            way_of.append(0)
            index_of.append(index + in_flight)
    if put_off is not None:
        left = range(max(0, num_tiles - put_off), num_tiles)
        way_of += [2] * len(left)
        index_of += left
    return updated_once(computing, way_of, index_of)


def updated_once(computing: tuple[Way, ...], way_of: list[int], index_of: list[int]) -> LaneOrder:
    """The order with one update of all parts behind it; takes both lists."""
    way_of += range(len(computing), len(computing) + len(UPDATE))
    index_of += [NO_TILE] * len(UPDATE)
    return LaneOrder(computing, tuple((kind, 0) for kind in UPDATE), way_of, index_of)


@lru_cache(maxsize=256)
def part_by_part(num_tiles: int, num_parts: int, steps_part_by_part: bool) -> LaneOrder:
    """Ministages, where each part is stepped behind its backward, and layered with a layer as a part: all tiles pass a part
    before the next, and back."""
    parts = [*range(num_parts), *reversed(range(num_parts))]
    kinds = [Kind.FORWARD] * num_parts + [Kind.BACKWARD] * num_parts
    computing = tuple(zip(kinds, parts, strict=True))
    tiles = list(range(num_tiles))
    if not steps_part_by_part:
        way_of = [way for way in range(2 * num_parts) for _ in tiles]
        return updated_once(computing, way_of, tiles * (2 * num_parts))
    updating = tuple((kind, part) for part in parts[num_parts:] for kind in UPDATE)
    way_of = [way for way in range(num_parts) for _ in tiles]
    index_of = tiles * num_parts
    for turn in range(num_parts):
        way_of += [num_parts + turn] * num_tiles
        way_of += range(2 * num_parts + turn * len(UPDATE), 2 * num_parts + (turn + 1) * len(UPDATE))
        index_of += tiles + [NO_TILE] * len(UPDATE)
    return LaneOrder(computing, updating, way_of, index_of)


def listed(passes: Iterable[Pass]) -> LaneOrder:
    """The passes as they are given, with one update behind them all."""
    passes = list(passes)
    computing = tuple(dict.fromkeys((kind, part) for kind, part, _ in passes))
    numbers = {way: number for number, way in enumerate(computing)}
    way_of = [numbers[kind, part] for kind, part, _ in passes]
    return updated_once(computing, way_of, [index for _, _, index in passes])
