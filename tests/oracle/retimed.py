"""One order of actions timed for many plans at once: plans that cut the samples alike differ in seconds only."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import dependencies, execution_order
from hethub.spec.schedule.actions import Kind
from hethub.spec.schedule.microbatches import Tile

Place = tuple[int, int]  # stage and replica


class Work(NamedTuple):
    """What a replica does with a tile of so many samples; none in a round without one."""

    place: Place
    kind: Kind
    samples: int


class Need(NamedTuple):
    """A node to wait for, and what of its tile has to come over: the samples shared, between which places."""

    node: int
    source: Place
    target: Place
    samples: int


class Node(NamedTuple):
    """One action, or in a stage that goes in rounds those of all its replicas; `lane` does its nodes in order."""

    lane: tuple[int, int]
    works: tuple[Work, ...]
    needs: tuple[Need, ...]


def nodes_of(layout: Layout) -> list[Node]:
    """The compute actions of a layout in an order in which they can run."""
    found: list[Node] = []
    done: dict[tuple[Kind, int, Tile], int] = {}
    for lane, entries in _rounds(layout):
        works, needs = [], []
        for stage, replica, action in entries:
            if action.tile is None:
                continue
            tile = action.tile.samples
            works.append(Work((stage, replica), action.kind, tile.stop - tile.start))
            for need in dependencies(layout, action):
                assert need.tile is not None
                other = need.tile.samples
                shared = min(tile.stop, other.stop) - max(tile.start, other.start)
                source = (need.stage, need.tile.replica)
                needs.append(Need(done[action.kind, need.stage, need.tile], source, (stage, replica), shared))
            done[action.kind, stage, action.tile] = len(found)
        found.append(Node(lane, tuple(works), tuple(needs)))
    return found


def _rounds(layout: Layout) -> Iterator[tuple[tuple[int, int], list]]:
    """Entries of `execution_order`, those of one round together."""
    order = execution_order(layout)
    index = 0
    while index < len(order):
        stage, replica, _ = order[index]
        seats = len(layout.stages[stage].replicas) if layout.plan.runs_in_rounds(stage) else 1
        yield (stage, layout.lane_of(stage, replica)), order[index : index + seats]
        index += seats


class Ends(NamedTuple):
    """When a stage's last backwards end, and when the last of them to start does; arrays over plans."""

    stop: np.ndarray
    start: np.ndarray


def ends(
    nodes: list[Node],
    seconds: Mapping[Work, np.ndarray],
    crossing: Callable[[Need], float],
    begins: list[np.ndarray],
) -> list[Ends]:
    """Per stage, the end of its compute in every plan; a stage's lanes begin at `begins`."""
    clock: dict[tuple[int, int], np.ndarray] = {}
    last: dict[tuple[int, int], np.ndarray] = {}
    stops: list[np.ndarray] = []
    for lane, works, needs in nodes:
        start = clock.get(lane, begins[lane[0]])
        for need in needs:
            start = np.maximum(start, stops[need.node] + crossing(need))
        stop = start + np.maximum.reduce([seconds[work] for work in works])
        stops.append(stop)
        clock[lane], last[lane] = stop, start
    return [
        Ends(
            np.maximum.reduce([clock[lane] for lane in clock if lane[0] == stage]),
            np.maximum.reduce([last[lane] for lane in last if lane[0] == stage]),
        )
        for stage in range(len(begins))
    ]
