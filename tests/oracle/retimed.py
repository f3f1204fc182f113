"""One order of actions timed for many plans at once: plans that cut the samples alike differ in seconds only."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from hethub.spec.layout.bind import Layout
from hethub.spec.schedule.actions import Kind
from hethub.spec.schedule.microbatches import MicrobatchRange
from tests.oracle.execution_order import dependencies, execution_order

Place = tuple[int, int]  # stage and replica


class Work(NamedTuple):
    """What a replica does with a microbatch of so many samples; none in a round without one."""

    place: Place
    kind: Kind
    samples: int


class Need(NamedTuple):
    """A node to wait for, and what of its microbatch has to come over: the samples shared, between which places."""

    node: int
    source: Place
    target: Place
    samples: int


class Node(NamedTuple):
    """One action, or in a stage that goes in rounds those of all its replicas; `actor` does its nodes in order."""

    actor: tuple[int, int]
    works: tuple[Work, ...]
    needs: tuple[Need, ...]


def nodes_of(layout: Layout) -> list[Node]:
    """The compute actions of a layout in an order in which they can run."""
    found: list[Node] = []
    done: dict[tuple[Kind, int, MicrobatchRange], int] = {}
    for actor, entries in _rounds(layout):
        works, needs = [], []
        for stage, replica, action in entries:
            if action.microbatch is None:
                continue
            microbatch = action.microbatch.samples
            works.append(Work((stage, replica), action.kind, microbatch.stop - microbatch.start))
            for need in dependencies(layout, action):
                assert need.microbatch is not None
                other = need.microbatch.samples
                shared = min(microbatch.stop, other.stop) - max(microbatch.start, other.start)
                source = (need.stage, need.microbatch.replica)
                needs.append(Need(done[action.kind, need.stage, need.microbatch], source, (stage, replica), shared))
            done[action.kind, stage, action.microbatch] = len(found)
        found.append(Node(actor, tuple(works), tuple(needs)))
    return found


def _rounds(layout: Layout) -> Iterator[tuple[tuple[int, int], list]]:
    """Entries of `execution_order`, those of one round together."""
    order = execution_order(layout)
    index = 0
    while index < len(order):
        stage, replica, _ = order[index]
        groups = len(layout.stages[stage].replicas) if layout.plan.runs_in_rounds(stage) else 1
        yield (stage, layout.actor_of(stage, replica)), order[index : index + groups]
        index += groups


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
    """Per stage, the end of its compute in every plan; a stage's actors begin at `begins`."""
    clock: dict[tuple[int, int], np.ndarray] = {}
    last: dict[tuple[int, int], np.ndarray] = {}
    stops: list[np.ndarray] = []
    for actor, works, needs in nodes:
        start = clock.get(actor, begins[actor[0]])
        for need in needs:
            start = np.maximum(start, stops[need.node] + crossing(need))
        stop = start + np.maximum.reduce([seconds[work] for work in works])
        stops.append(stop)
        clock[actor], last[actor] = stop, start
    return [
        Ends(
            np.maximum.reduce([clock[actor] for actor in clock if actor[0] == stage]),
            np.maximum.reduce([last[actor] for actor in last if actor[0] == stage]),
        )
        for stage in range(len(begins))
    ]
