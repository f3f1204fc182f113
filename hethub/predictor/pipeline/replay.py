"""Replay any schedule. Each actor runs its nodes in order, and each node begins when the nodes it needs have ended."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple

from hethub.predictor.pipeline.overlap import LayerLink, Visit

Needs = list[tuple[int, float]]  # nodes and the seconds from their end to when it counts
NONE = -1  # where a node waits for no other


class LayeredPass(NamedTuple):
    """A pass whose layers wait for weights and sums, which use the link of its actor. One without visits begins when the last
    sum does."""

    actor: int
    visits: Sequence[Visit] = ()

    def end(self, now: float, seconds: float, link: LayerLink) -> float:
        """Return when the pass ends if it may begin `now` and takes `seconds` without waits."""
        if self.visits:
            return link.through(now, self.visits)[0]
        return max(now, link.summing) + seconds


@dataclass
class TaskGraph:
    """Nodes numbered from 0, and actors. `orders[a]` are the nodes of actor a, in the order in which it runs them.

    An actor is a replica, a stage whose replicas work in lockstep, or a stream that works beside them (a network, a host
    link). Most nodes wait for one other node at most: node n begins no earlier than `under_way[n]` seconds after the end
    of `sources[n]`. `needs[n]` are further nodes that it waits for. Seconds under way may be negative, where what is
    waited for is ready before its node ends.
    """

    seconds: list[float] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    under_way: list[float] = field(default_factory=list)
    needs: defaultdict[int, Needs] = field(default_factory=lambda: defaultdict(list))
    orders: list[Sequence[int]] = field(default_factory=list)
    layered: dict[int, LayeredPass] = field(default_factory=dict)

    def add(self, actor: int, seconds: float, needs: Needs | None = None) -> int:
        """Add a node to the end of an actor's order, and return its number."""
        (node,) = self.extend(actor, [seconds])
        if needs:
            self.needs[node] += needs
        return node

    def extend(self, actor: int, seconds: list[float]) -> range:
        """Add nodes that wait for none yet to the end of an actor's order, and return their numbers."""
        added = range(len(self.seconds), len(self.seconds) + len(seconds))
        self.seconds += seconds
        self.sources += [NONE] * len(seconds)
        self.under_way += [0.0] * len(seconds)
        self.orders[actor] = [*self.orders[actor], *added]
        return added

    def add_actor(self) -> int:
        """Add an actor, and return its number."""
        self.orders.append([])
        return len(self.orders) - 1

    def add_stream(self, seconds: list[float], sources: list[int], under_way: list[float]) -> None:
        """Add an actor with nodes. Given for each node are its seconds, the node it waits for, and the seconds under way from
        that node's end."""
        added = self.extend(self.add_actor(), seconds)
        self.sources[added.start :], self.under_way[added.start :] = sources, under_way

    def delay(self, node: int, seconds: float) -> None:
        """Make a node longer. A layered pass gets longer where it begins its last layer, before that brings anything."""
        self.seconds[node] += seconds
        if own := self.layered.get(node):
            *before, last = own.visits
            last = last._replace(compute=last.compute + seconds, messages=last.messages + seconds)
            self.layered[node] = own._replace(visits=(*before, last))

    def needs_of(self, node: int) -> Needs:
        """Return everything that a node waits for."""
        first = [] if self.sources[node] == NONE else [(self.sources[node], self.under_way[node])]
        return first + self.needs.get(node, [])


def replay(graph: TaskGraph, starts: dict[int, float] | None = None) -> list[float]:
    """Return when each node ends. `starts` are the times at which actors begin, 0 for those not named.

    An actor that waits for a node is woken when this ends. The seconds of a layered pass grow by its waits for layers. Raises
    AssertionError if nodes wait for each other in a circle, which the schedule of a bound layout never makes them do.
    """
    seconds, sources, under_way, needs, layered = (
        graph.seconds, graph.sources, graph.under_way, graph.needs, graph.layered,
    )  # fmt: skip
    links = {own.actor: LayerLink() for own in layered.values()}
    unknown = float("inf")
    ends = [unknown] * len(seconds) + [-unknown]  # the last one is that of NONE
    begun = [((starts or {}).get(actor, 0.0), iter(order)) for actor, order in enumerate(graph.orders)]
    runnable = [(now, node, order) for now, order in begun for node in islice(order, 1)]
    waiting: dict[int, list[tuple[float, int, Iterator[int]]]] = {}  # by what they wait for
    while runnable:
        now, node, order = runnable.pop()  # when an actor is free, its next node, and the rest of its order
        while node >= 0:
            source = sources[node]
            if source >= 0 or node in needs:
                ready = ends[source] + under_way[node]
                if node in needs:
                    for other, seconds_under_way in needs[node]:
                        if (known := ends[other] + seconds_under_way) > ready:
                            source, ready = other, known
                if ready > now:
                    if ready == unknown:
                        waiting.setdefault(source, []).append((now, node, order))
                        break
                    now = ready
            if node in layered:
                own = layered[node]
                seconds[node] = own.end(now, seconds[node], links[own.actor]) - now
            ends[node] = now = now + seconds[node]
            if node in waiting:
                runnable += waiting.pop(node)
            node = next(order, NONE)
    assert not waiting, f"{len(waiting)} nodes wait for each other"
    return ends[:-1]


def idle_times(
    graph: TaskGraph, ends: list[float], actor: int, begin: float = 0.0
) -> list[tuple[int, float, int, float]]:
    """Return where an actor stood idle after `begin`: the node that waited, its idle seconds, the node it waited for, and for
    how many seconds that one's message was under way."""
    found = []
    order = graph.orders[actor]
    for before, node in pairwise([None, *order]):
        assert node is not None
        free = begin if before is None else ends[before]
        idle = ends[node] - graph.seconds[node] - free
        if idle > 0.0 and (needs := graph.needs_of(node)):
            source, under_way = max(needs, key=lambda need: ends[need[0]] + need[1])
            found.append((node, idle, source, under_way))
    return found
