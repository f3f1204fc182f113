"""Any schedule replayed: nodes with a length, done in each actor's order, each when what it needs has ended."""

from dataclasses import dataclass, field
from itertools import pairwise

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
    seconds, needs, orders = programme.seconds, programme.needs, programme.orders
    unknown = float("-inf")
    ends = [unknown] * len(seconds)
    position = [0] * len(orders)
    clock = [0.0] * len(orders)
    for actor, start in (starts or {}).items():
        clock[actor] = start
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(orders)))
    while runnable:
        actor = runnable.pop()
        order, now = orders[actor], clock[actor]
        index, blocked = position[actor], -1
        while index < len(order):
            node = order[index]
            ready = now
            for source, under_way in needs[node]:
                end = ends[source]
                if end == unknown:
                    blocked = source
                    break
                if end + under_way > ready:
                    ready = end + under_way
            if blocked >= 0:
                waiting.setdefault(blocked, []).append(actor)
                break
            ends[node] = now = ready + seconds[node]
            if node in waiting:
                runnable.extend(waiting.pop(node))
            index += 1
        clock[actor], position[actor] = now, index
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
