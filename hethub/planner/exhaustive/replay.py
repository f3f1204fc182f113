"""Plans that cut the samples alike, replayed all at once: the order of their actions is one, only seconds differ."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import actor_order
from hethub.spec.schedule.actions import Kind
from hethub.spec.schedule.microbatches import overlaps
from hethub.spec.schedule.orders import NO_MICROBATCH

PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)


class Work(NamedTuple):
    """A replica's part of an action: its microbatch's pass, as an index of PASSES, and samples."""

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
    """An action of an actor, or a round's of all its replicas; `actor` (stage, number) does its nodes in order."""

    actor: tuple[int, int]
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


class _Microbatch(NamedTuple):
    """A microbatch on the sample axis, and its place among those of its actor."""

    actor: tuple[int, int]
    turn: int
    replica: int
    samples: int


def nodes_of(layout: Layout) -> list[Node]:
    """All passes of all microbatches, in an order in which they can run."""
    microbatches = [_microbatches(layout, stage) for stage in range(layout.num_stages)]
    needs = _needs(layout, microbatches)
    entries: dict[tuple[int, int], Iterator[tuple[int, int]]] = {
        actor: _passes(layout, *actor)
        for actor in dict.fromkeys(microbatch.actor for own in microbatches for microbatch in own)
    }
    of_round: dict[tuple[tuple[int, int], int], list[_Microbatch]] = {}  # those of a round
    for own in microbatches:
        for microbatch in own:
            of_round.setdefault((microbatch.actor, microbatch.turn), []).append(microbatch)
    heads = {actor: next(order) for actor, order in entries.items()}
    done: dict[tuple[tuple[int, int], int, int], int] = {}  # by actor, pass and index
    nodes: list[Node] = []
    while heads:
        before = len(nodes)
        for actor in list(heads):
            while actor in heads:
                way, index = heads[actor]
                wanted = needs.get((actor, way, index), [])
                if any(source not in done for source, *_ in wanted):
                    break
                works = tuple(dict.fromkeys(Work(way, t.replica, t.samples) for t in of_round[actor, index]))
                nodes.append(Node(actor, works, tuple(Need(done[source], *rest) for source, *rest in wanted)))
                done[actor, way, index] = len(nodes) - 1
                if (following := next(entries[actor], None)) is None:
                    del heads[actor]
                else:
                    heads[actor] = following
        assert len(nodes) > before, "these microbatches wait for each other"
    return nodes


def _microbatches(layout: Layout, stage: int) -> list[_Microbatch]:
    """A stage's microbatches in order of the sample axis."""
    microbatching, in_rounds = layout.microbatchings[stage], layout.plan.runs_in_rounds(stage)
    found = []
    for replica, index, start, stop in zip(*microbatching, strict=True):
        own = layout.round_numbers(stage, replica)[index] if in_rounds else index
        found.append(_Microbatch((stage, layout.actor_of(stage, replica)), own, replica, stop - start))
    return found


def _passes(layout: Layout, stage: int, actor: int) -> Iterator[tuple[int, int]]:
    """What an actor does in order: pass and index."""
    for kind, _, index in actor_order(layout, stage, actor).passes:
        if index != NO_MICROBATCH:
            yield PASSES.index(kind), index


def _needs(layout: Layout, microbatches: Sequence[Sequence[_Microbatch]]) -> dict[object, list[tuple]]:
    """By actor, pass and index, the passes on neighbouring stages to wait for, with what comes over."""
    found: dict[object, list[tuple]] = {}
    for stage in range(layout.num_stages - 1):
        for a, b, samples in zip(
            *overlaps(layout.microbatchings[stage], layout.microbatchings[stage + 1]), strict=True
        ):
            above, below = microbatches[stage][a], microbatches[stage + 1][b]
            over = (stage, above.replica, below.replica, samples)
            found.setdefault((below.actor, 0, below.turn), []).append(((above.actor, 0, above.turn), *over))
            found.setdefault((above.actor, 1, above.turn), []).append(((below.actor, 1, below.turn), *over))
    return found


def ends_of(nodes: Sequence[Node], stages: Sequence[Passed], p2p_costs: Sequence[np.ndarray]) -> list[Ends]:
    """Per stage, when its compute ends in every plan. `p2p_costs` are, per boundary, the seconds
    [plan, replica above, replica below, samples]."""
    clock: dict[tuple[int, int], np.ndarray] = {}
    last: dict[tuple[int, int], np.ndarray] = {}
    stops: list[np.ndarray] = []
    for actor, works, needs in nodes:
        seconds, begins = stages[actor[0]]
        start = clock[actor] if actor in clock else begins[:, actor[1]]
        for node, boundary, above, below, samples in needs:
            start = np.maximum(start, stops[node] + p2p_costs[boundary][:, above, below, samples])
        spent = [seconds[:, way, replica, samples] for way, replica, samples in works]
        stop = start + (spent[0] if len(spent) == 1 else np.maximum.reduce(spent))
        stops.append(stop)
        clock[actor], last[actor] = stop, start
    return [
        Ends(*(np.maximum.reduce([ends[actor] for actor in clock if actor[0] == stage]) for ends in (clock, last)))
        for stage in range(len(stages))
    ]
