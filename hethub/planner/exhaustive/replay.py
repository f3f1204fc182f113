"""Plans that cut the samples alike, replayed all at once: the order of their actions is one, only seconds differ."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import lane_order
from hethub.spec.schedule.actions import Kind
from hethub.spec.schedule.microbatches import overlaps
from hethub.spec.schedule.orders import NO_TILE

PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)


class Work(NamedTuple):
    """A replica's part of an action: its tile's pass, as an index of PASSES, and samples."""

    way: int
    replica: int
    samples: int


class Need(NamedTuple):
    """An action to wait for, and what comes over from it: between which replicas of a boundary, how many samples."""

    node: int
    boundary: int  # the stage above it
    above: int
    below: int
    samples: int


class Node(NamedTuple):
    """An action of a lane, or a round's of all its replicas; `lane` (stage, number) does its nodes in order."""

    lane: tuple[int, int]
    works: tuple[Work, ...]
    needs: tuple[Need, ...]


class Passed(NamedTuple):
    """What a stage of many plans costs: arrays over them."""

    seconds: np.ndarray  # [plan, pass, replica, samples]
    begins: np.ndarray  # [plan, replica]


class Ends(NamedTuple):
    """When a stage's last passes end, and when the last of them to start does: [plan]."""

    stop: np.ndarray
    start: np.ndarray


class _Tile(NamedTuple):
    """A tile on the sample axis, and its place among those of its lane."""

    lane: tuple[int, int]
    turn: int
    replica: int
    samples: int


def nodes_of(layout: Layout) -> list[Node]:
    """All passes of all tiles, in an order in which they can run."""
    tiles = [_tiles(layout, stage) for stage in range(layout.num_stages)]
    needs = _needs(layout, tiles)
    entries: dict[tuple[int, int], Iterator[tuple[int, int]]] = {
        lane: _passes(layout, *lane) for lane in dict.fromkeys(tile.lane for own in tiles for tile in own)
    }
    together: dict[tuple[tuple[int, int], int], list[_Tile]] = {}  # those of a round
    for own in tiles:
        for tile in own:
            together.setdefault((tile.lane, tile.turn), []).append(tile)
    heads = {lane: next(order) for lane, order in entries.items()}
    done: dict[tuple[tuple[int, int], int, int], int] = {}  # by lane, pass and index
    nodes: list[Node] = []
    while heads:
        before = len(nodes)
        for lane in list(heads):
            while lane in heads:
                way, index = heads[lane]
                wanted = needs.get((lane, way, index), [])
                if any(source not in done for source, *_ in wanted):
                    break
                works = tuple(dict.fromkeys(Work(way, t.replica, t.samples) for t in together[lane, index]))
                nodes.append(Node(lane, works, tuple(Need(done[source], *rest) for source, *rest in wanted)))
                done[lane, way, index] = len(nodes) - 1
                if (following := next(entries[lane], None)) is None:
                    del heads[lane]
                else:
                    heads[lane] = following
        assert len(nodes) > before, "these tiles wait for each other"
    return nodes


def _tiles(layout: Layout, stage: int) -> list[_Tile]:
    """A stage's tiles in order of the sample axis."""
    tiling, in_rounds = layout.tilings[stage], layout.plan.runs_in_rounds(stage)
    found = []
    for replica, index, start, stop in zip(*tiling, strict=True):
        own = layout.round_numbers(stage, replica)[index] if in_rounds else index
        found.append(_Tile((stage, layout.lane_of(stage, replica)), own, replica, stop - start))
    return found


def _passes(layout: Layout, stage: int, lane: int) -> Iterator[tuple[int, int]]:
    """What a lane does in order: pass and index."""
    for kind, _, index in lane_order(layout, stage, lane).passes:
        if index != NO_TILE:
            yield PASSES.index(kind), index


def _needs(layout: Layout, tiles: Sequence[Sequence[_Tile]]) -> dict[object, list[tuple]]:
    """By lane, pass and index, the passes on neighbouring stages to wait for, with what comes over."""
    found: dict[object, list[tuple]] = {}
    for stage in range(layout.num_stages - 1):
        for a, b, samples in zip(*overlaps(layout.tilings[stage], layout.tilings[stage + 1]), strict=True):
            above, below = tiles[stage][a], tiles[stage + 1][b]
            over = (stage, above.replica, below.replica, samples)
            found.setdefault((below.lane, 0, below.turn), []).append(((above.lane, 0, above.turn), *over))
            found.setdefault((above.lane, 1, above.turn), []).append(((below.lane, 1, below.turn), *over))
    return found


def ends_of(nodes: Sequence[Node], stages: Sequence[Passed], crossings: Sequence[np.ndarray]) -> list[Ends]:
    """Per stage, when its compute ends in every plan. `crossings` are, per boundary, the seconds
    [plan, replica above, replica below, samples]."""
    clock: dict[tuple[int, int], np.ndarray] = {}
    last: dict[tuple[int, int], np.ndarray] = {}
    stops: list[np.ndarray] = []
    for lane, works, needs in nodes:
        seconds, begins = stages[lane[0]]
        start = clock[lane] if lane in clock else begins[:, lane[1]]
        for node, boundary, above, below, samples in needs:
            start = np.maximum(start, stops[node] + crossings[boundary][:, above, below, samples])
        spent = [seconds[:, way, replica, samples] for way, replica, samples in works]
        stop = start + (spent[0] if len(spent) == 1 else np.maximum.reduce(spent))
        stops.append(stop)
        clock[lane], last[lane] = stop, start
    return [
        Ends(*(np.maximum.reduce([ends[lane] for lane in clock if lane[0] == stage]) for ends in (clock, last)))
        for stage in range(len(stages))
    ]
