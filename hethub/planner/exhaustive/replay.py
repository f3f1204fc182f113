"""Plans that cut the samples alike, replayed all at once: the order of their actions is one, only seconds differ."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hethub.predictor.pipeline.replay import NONE, TaskGraph, replay
from hethub.predictor.pipeline.wiring import Wiring
from hethub.spec.layout.bind import Layout
from hethub.spec.schedule.actions import Kind

PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)


class Work(NamedTuple):
    """A replica's part of an action: its microbatch's pass, of PASSES, and samples."""

    pass_index: int
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
    """An action of an actor, or a round's of all its replicas; `actor` (stage, number) does its nodes in order."""

    actor: tuple[int, int]
    works: tuple[Work, ...]
    needs: tuple[Need, ...]


class StageSeconds(NamedTuple):
    """What a stage of many plans costs: arrays over them."""

    seconds: np.ndarray  # [plan, pass, replica, samples]
    begins: np.ndarray  # [plan, replica]


class Ends(NamedTuple):
    """When a stage's last passes end, and when the last of them to start does: [plan]."""

    stop: np.ndarray
    start: np.ndarray


def nodes_of(layout: Layout) -> dict[int, Node]:
    """All passes of all microbatches by number, in an order in which they can run."""
    wiring = Wiring(layout, full=True)
    works, needs = _works(wiring), _needs(wiring)
    orders: list[Sequence[int]] = [[node for node in own if node in works] for own in wiring.orders]
    count = wiring.orders[-1].stop
    graph = TaskGraph([1.0] * count, [NONE] * count, [0.0] * count, orders=orders)
    for node, own in needs.items():
        graph.needs[node] = [(need.node, 0.0) for need in own]
    ends = replay(graph)  # each as long: what waits for another ends later
    actors = {run.actor: place for place, run in reversed(wiring.runs.items())}
    actor_of = {node: actors[actor] for actor, own in enumerate(orders) for node in own}
    return {
        node: Node(actor_of[node], tuple(dict.fromkeys(works[node])), tuple(needs[node]))
        for node in sorted(works, key=ends.__getitem__)
    }


def _works(wiring: Wiring) -> dict[int, list[Work]]:
    """Return what replicas do in each node."""
    found: dict[int, list[Work]] = defaultdict(list)
    for stage, (replicas, _, starts, stops) in enumerate(wiring.layout.microbatchings):
        for kind, chunk in wiring.runs[stage, 0].order.computing:
            own = [map(run.nodes.__getitem__, places) for run, places in wiring.turns(kind, stage, chunk)]
            for node, replica, start, stop in zip(
                wiring.by_microbatch(stage, own), replicas, starts, stops, strict=True
            ):
                found[node].append(Work(PASSES.index(kind), replica, stop - start))
    return found


def _needs(wiring: Wiring) -> dict[int, list[Need]]:
    """Return for each node the passes on neighbouring stages for which it waits, with what these send."""
    found: dict[int, list[Need]] = defaultdict(list)
    for boundary, _, overlap, ways in wiring.boundaries:
        for way in ways:
            for node, row in [*zip(way.waiting, way.firsts, strict=True), *way.others]:
                found[node].append(Need(way.sources[row], boundary, *overlap.pairs[overlap.pair_of[row]]))
    return found


def ends_of(nodes: Mapping[int, Node], stages: Sequence[StageSeconds], p2p_costs: Sequence[np.ndarray]) -> list[Ends]:
    """Per stage, when its compute ends in every plan. `p2p_costs` are, per boundary, the seconds
    [plan, replica above, replica below, samples]."""
    clock: dict[tuple[int, int], np.ndarray] = {}
    last: dict[tuple[int, int], np.ndarray] = {}
    stops: dict[int, np.ndarray] = {}
    for number, (actor, works, needs) in nodes.items():
        seconds, begins = stages[actor[0]]
        start = clock[actor] if actor in clock else begins[:, actor[1]]
        for node, boundary, above, below, samples in needs:
            start = np.maximum(start, stops[node] + p2p_costs[boundary][:, above, below, samples])
        spent = [seconds[:, index, replica, samples] for index, replica, samples in works]
        stops[number] = stop = start + (spent[0] if len(spent) == 1 else np.maximum.reduce(spent))
        clock[actor], last[actor] = stop, start
    return [
        Ends(*(np.maximum.reduce([ends[actor] for actor in clock if actor[0] == stage]) for ends in (clock, last)))
        for stage in range(len(stages))
    ]
