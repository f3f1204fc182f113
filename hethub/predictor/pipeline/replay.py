"""Any schedule replayed: nodes with a length, done in each actor's order, each when what it needs has ended."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise

Needs = list[tuple[int, float]]  # nodes and the seconds from their end to when it counts
NONE = -1  # where a node waits for no other


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

    def add_stream(self, seconds: list[float], sources: list[int], under_way: list[float]) -> range:
        """The numbers of the nodes of a new actor: of each its seconds, the one it waits for, and the seconds from that
        one's end to when it counts."""
        added = self.extend(self.add_actor(), seconds)
        self.sources[added.start :], self.under_way[added.start :] = sources, under_way
        return added

    def needs_of(self, node: int) -> Needs:
        """All that a node waits for."""
        first = [] if self.sources[node] == NONE else [(self.sources[node], self.under_way[node])]
        return first + self.needs.get(node, [])


@dataclass
class Course:
    """The nodes in an order in which each comes behind all that it waits for, and by node the one that its actor does
    before it. Both follow from who waits for whom, whatever takes how long."""

    nodes: list[int]
    before: list[int]

    @staticmethod
    def of(graph: TaskGraph) -> "Course":
        """Each actor goes on until it waits for a node not yet there, which wakes it. Raises AssertionError where nodes
        wait for each other, which a bound layout's schedule never does."""
        sources, needs, nodes = graph.sources, graph.needs, list[int]()
        there = [False] * len(sources) + [True]  # the last one is that of NONE
        runnable = [(order, node) for order in map(iter, graph.orders) for node in islice(order, 1)]
        waiting: dict[int, list[tuple[Iterator[int], int]]] = {}  # by what they wait for, actors and their next nodes
        while runnable:
            order, node = runnable.pop()
            while node >= 0:
                source = sources[node]
                if node in needs and there[source]:
                    source = next((other for other, _ in needs[node] if not there[other]), NONE)
                if not there[source]:
                    waiting.setdefault(source, []).append((order, node))
                    break
                there[node] = True
                nodes.append(node)
                if node in waiting:
                    runnable += waiting.pop(node)
                node = next(order, NONE)
        assert not waiting, f"{len(waiting)} nodes wait for each other"
        course = Course(nodes, [NONE] * len(sources))
        course._note(graph.orders)
        return course

    def _note(self, orders: Sequence[Sequence[int]]) -> None:
        for order in orders:
            for before, node in pairwise(order):
                self.before[node] = before

    def of_first(self, number: int) -> "Course":
        """That of so many nodes, the first, if no others were."""
        return Course([node for node in self.nodes if node < number], self.before[:number])

    def with_added(self, graph: TaskGraph, actors: int) -> "Course":
        """With the nodes of a graph that are not in it yet, of other than its first `actors`: each comes right behind the
        last one that it waits for."""
        course = Course([], self.before + [NONE] * (len(graph.sources) - len(self.before)))
        course._note(graph.orders[actors:])
        places, added = [*self._places, -1], defaultdict[int, list[int]](list)  # the last one is that of NONE
        for node in range(len(self.nodes), len(graph.sources)):
            place = max(places[course.before[node]], places[graph.sources[node]])
            if node in graph.needs:
                place = max([place, *[places[source] for source, _ in graph.needs[node]]])
            places.insert(node, place)
            added[place].append(node)
        done = 0
        for place, nodes in sorted(added.items()):
            course.nodes += self.nodes[done : place + 1] + nodes
            done = place + 1
        course.nodes += self.nodes[done:]
        return course

    @cached_property
    def _places(self) -> list[int]:
        """By node, its place in the order."""
        found = [0] * len(self.nodes)
        for place, node in enumerate(self.nodes):
            found[node] = place
        return found


def replay(graph: TaskGraph, starts: dict[int, float] | None = None, course: Course | None = None) -> list[float]:
    """When each node ends; `starts` are the actors that begin later than at 0, `course` one that the graph is thought to
    have. Whatever the course, ends are the same."""
    seconds, sources, under_way, needs = graph.seconds, graph.sources, graph.under_way, dict(graph.needs)
    for actor, start in (starts or {}).items():
        for node in graph.orders[actor][:1]:
            needs[node] = [*needs.get(node, []), (NONE, start)]
    unknown = float("inf")
    ends = [unknown] * len(seconds) + [0.0]  # the last one is that of NONE
    own = course or Course.of(graph)
    before = own.before
    for node in own.nodes:
        now, ready = ends[before[node]], ends[sources[node]] + under_way[node]
        if node in needs:
            for other, seconds_under_way in needs[node]:
                if (known := ends[other] + seconds_under_way) > ready:
                    ready = known
        ends[node] = (ready if ready > now else now) + seconds[node]
    if course and unknown in ends:  # some node came before what it waits for
        return replay(graph, starts)
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
