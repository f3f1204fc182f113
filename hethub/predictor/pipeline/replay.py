"""Any schedule replayed: nodes with a length, done in each actor's order, each when what it needs has ended."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple

from hethub.predictor.pipeline.overlap import LayerLink, Visit

Needs = list[tuple[int, float]]  # nodes and the seconds from their end to when it counts
NONE = -1  # where a node waits for no other


class LayeredPass(NamedTuple):
    """A node whose layers wait for weights and sums, on the link of its actor; without visits one that begins when the last
    sum does."""

    actor: int
    visits: Sequence[Visit] = ()

    def end(self, now: float, seconds: float, link: LayerLink) -> float:
        """When it ends that may begin now and takes so long beside what it waits for."""
        if self.visits:
            return link.through(now, self.visits)[0]
        return max(now, link.summing) + seconds


@dataclass
class TaskGraph:
    """Nodes numbered from 0. `orders[a]` are actor a's, in the order it does them.

    Most nodes wait for one other at most: `sources[n]`, `under_way[n]` seconds after its end. `needs[n]` are those
    that n waits for beside it. An actor is a replica, a stage whose replicas go in lockstep, or a stream (a network, a
    host link) that works beside them. Seconds under way may be negative: what counts is then ready before its node has
    ended.
    """

    seconds: list[float] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    under_way: list[float] = field(default_factory=list)
    needs: defaultdict[int, Needs] = field(default_factory=lambda: defaultdict(list))
    orders: list[Sequence[int]] = field(default_factory=list)
    layered: dict[int, LayeredPass] = field(default_factory=dict)

    def add(self, actor: int, seconds: float, needs: Needs | None = None) -> int:
        """The number of a new node at the end of an actor's order."""
        (node,) = self.extend(actor, [seconds])
        if needs:
            self.needs[node] += needs
        return node

    def extend(self, actor: int, seconds: list[float]) -> range:
        """The numbers of new nodes at the end of an actor's order, that wait for none yet."""
        added = range(len(self.seconds), len(self.seconds) + len(seconds))
        self.seconds += seconds
        self.sources += [NONE] * len(seconds)
        self.under_way += [0.0] * len(seconds)
        self.orders[actor] = [*self.orders[actor], *added]
        return added

    def add_actor(self) -> int:
        """The number of a new actor."""
        self.orders.append([])
        return len(self.orders) - 1

    def add_stream(self, seconds: list[float], sources: list[int], under_way: list[float]) -> None:
        """New nodes of a new actor: of each its seconds, the one it waits for, and the seconds from that one's end to when
        it counts."""
        added = self.extend(self.add_actor(), seconds)
        self.sources[added.start :], self.under_way[added.start :] = sources, under_way

    def delay(self, node: int, seconds: float) -> None:
        """Lets a node take so much longer; a layered pass when it begins its last layer, before that brings anything."""
        self.seconds[node] += seconds
        if own := self.layered.get(node):
            *before, last = own.visits
            last = last._replace(compute=last.compute + seconds, messages=last.messages + seconds)
            self.layered[node] = own._replace(visits=(*before, last))

    def needs_of(self, node: int) -> Needs:
        """All that a node waits for."""
        first = [] if self.sources[node] == NONE else [(self.sources[node], self.under_way[node])]
        return first + self.needs.get(node, [])


def replay(graph: TaskGraph, starts: dict[int, float] | None = None) -> list[float]:
    """When each node ends; `starts` are the actors that begin later than at 0.

    Each actor runs its list in order; one that waits for a node not yet done is woken by it. A layered pass takes what it
    waits for its layers, too, which its seconds have afterwards. Raises AssertionError
    where nodes wait for each other, which a bound layout's schedule never does.
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
    """Where an actor stood idle after `begin`: (node that waited, idle seconds, node it waited for, its seconds under
    way)."""
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
