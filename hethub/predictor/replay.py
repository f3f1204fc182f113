"""Any schedule replayed: nodes with a length, done in each actor's order, each when what it needs has ended."""

from dataclasses import dataclass, field
from itertools import islice, pairwise

Needs = list[tuple[int, float]]  # a node and the seconds from its end to when it counts


@dataclass
class Programme:
    """Nodes numbered from 0. `orders[a]` are actor a's, in the order it does them; `needs[n]` is what node n waits for.

    An actor is a replica, a stage whose replicas go in lockstep, or a stream (a network, a host link) that works beside
    them. Seconds under way may be negative: what counts is then ready before its node has ended.
    """

    seconds: list[float] = field(default_factory=list)
    needs: list[Needs] = field(default_factory=list)
    orders: list[list[int]] = field(default_factory=list)

    def add(self, actor: int, seconds: float, needs: Needs | None = None) -> int:
        """The number of a new node at the end of an actor's order."""
        self.seconds.append(seconds)
        self.needs.append([] if needs is None else needs)
        node = len(self.seconds) - 1
        self.orders[actor].append(node)
        return node

    def add_actor(self) -> int:
        """The number of a new actor."""
        self.orders.append([])
        return len(self.orders) - 1


def replay(programme: Programme, starts: dict[int, float] | None = None) -> list[float]:
    """When each node ends; `starts` are the actors that begin later than at 0.

    Each actor runs its list in order; one that waits for a node not yet done is woken by it. Raises AssertionError
    where nodes wait for each other, which a bound layout's schedule never does.
    """
    seconds, needs = programme.seconds, programme.needs
    unknown = float("inf")
    ends = [unknown] * len(seconds)
    rest = [iter(order) for order in programme.orders]
    clock = [0.0] * len(rest)
    for actor, start in (starts or {}).items():
        clock[actor] = start
    runnable = [(actor, node) for actor, order in enumerate(rest) for node in islice(order, 1)]
    waiting: dict[int, list[tuple[int, int]]] = {}  # by what they wait for, actors and their next nodes
    while runnable:
        actor, node = runnable.pop()
        now, order = clock[actor], rest[actor]
        while node >= 0:
            for source, under_way in needs[node]:
                ready = ends[source] + under_way
                if ready > now:
                    if ready == unknown:
                        waiting.setdefault(source, []).append((actor, node))
                        break
                    now = ready
            else:
                ends[node] = now = now + seconds[node]
                if node in waiting:
                    runnable += waiting.pop(node)
                node = next(order, -1)
                continue
            break
        clock[actor] = now
    assert not waiting, f"{len(waiting)} nodes wait for each other"
    return ends


def idle_times(
    programme: Programme, ends: list[float], actor: int, begin: float = 0.0
) -> list[tuple[int, float, int, float]]:
    """Where an actor stood idle after `begin`: (node that waited, idle seconds, node it waited for, its seconds under way)."""
    found = []
    order = programme.orders[actor]
    for before, node in pairwise([None, *order]):
        assert node is not None
        free = begin if before is None else ends[before]
        idle = ends[node] - programme.seconds[node] - free
        if idle > 0.0 and programme.needs[node]:
            source, under_way = max(programme.needs[node], key=lambda need: ends[need[0]] + need[1])
            found.append((node, idle, source, under_way))
    return found
