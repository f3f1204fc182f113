"""A step of a plan as nodes to replay: every replica's actions, and what goes on beside them.

A stage whose tiles come in rounds (ZeRO-2/3) is one actor: its replicas meet in every layer's collectives, so a round
takes as long as its slowest tile. Collectives over a part are nodes of a stream of their own, beside compute.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from hethub.predictor.costs import Parts, PlanCosts
from hethub.predictor.lean import LeanCosts
from hethub.predictor.replay import Programme
from hethub.spec.layout import Layout
from hethub.spec.schedule import Action, Kind, schedule
from hethub.spec.tiling import Tile

Place = tuple[int, int]  # stage and replica
Unit = tuple[int, int]  # stage and part


class Entry(NamedTuple):
    """An action of a replica: its node, and how long before the node's end the replica is done."""

    action: Action
    node: int
    early_seconds: float


IDLE = Parts(0.0, 0.0, 0.0)


class Compute:
    """The compute actions of all replicas as nodes that wait for each other's tiles."""

    def __init__(self, layout: Layout, costs: PlanCosts | LeanCosts) -> None:
        self.layout, self.costs = layout, costs
        self.programme = Programme()
        self.actors: dict[Place, int] = {}
        self.entries: dict[Place, list[Entry]] = {}
        self.spent: dict[Place, Parts] = {}  # by each replica on all its tiles
        self.done: dict[tuple[Kind, Unit], dict[Tile, tuple[int, float]]] = {}  # a tile's node, and how early in it
        lists = schedule(layout)
        for stage, spec in enumerate(layout.stages):
            replicas = range(len(spec.replicas))
            if layout.plan.runs_in_rounds(stage):
                self._add_together(stage, {replica: lists[stage, replica] for replica in replicas})
            else:
                for replica in replicas:
                    self._add_alone((stage, replica), lists[stage, replica])
        self._wire()

    def _add_alone(self, place: Place, acts: list[Action]) -> None:
        """Nodes for the actions of a replica that goes its own way."""
        actor, first = self.programme.add_actor(), len(self.programme.seconds)
        price = self._price(place)
        spent = [price(act) for act in acts]
        nodes = range(first, first + len(acts))
        self.programme.orders[actor] += nodes
        self.programme.seconds += [parts.total for parts in spent]
        self.programme.needs += [[] for _ in acts]
        self._note(place, actor, [Entry(act, node, 0.0) for act, node in zip(acts, nodes, strict=True)], spent)

    def _add_together(self, stage: int, lists: dict[int, list[Action]]) -> None:
        """Nodes for the rounds of replicas that go through them in lockstep."""
        actor = self.programme.add_actor()
        spent = {replica: list(map(self._price((stage, replica)), acts)) for replica, acts in lists.items()}
        seconds = [max(parts.total for parts in own) for own in zip(*spent.values(), strict=True)]
        nodes = [self.programme.add(actor, longest) for longest in seconds]
        # Only gathers keep a replica from running ahead of the others inside a round.
        ahead = self.layout.stages[stage].zero < 3
        for replica, acts in lists.items():
            early = [
                longest - own.total if ahead else 0.0 for longest, own in zip(seconds, spent[replica], strict=True)
            ]
            entries = [Entry(*entry) for entry in zip(acts, nodes, early, strict=True)]
            self._note((stage, replica), actor, entries, spent[replica])

    def _note(self, place: Place, actor: int, entries: list[Entry], spent: list[Parts]) -> None:
        self.actors[place], self.entries[place] = actor, entries
        counts = Counter(spent)
        self.spent[place] = Parts(*(sum(n * parts[i] for parts, n in counts.items()) for i in range(3)))
        for act, node, early in entries:
            if act.tile is not None:
                key = (act.kind, (act.stage, act.part))
                if key not in self.done:
                    self.done[key] = {}
                self.done[key][act.tile] = (node, early)

    def _price(self, place: Place) -> Callable[[Action], Parts]:
        """What the replica spends on an action, by kind, part and samples."""
        known: dict[tuple[Kind, int, int], Parts] = {}
        portions = self.costs.state.portions[place[0]]

        def price(act: Action) -> Parts:
            if act.tile is None:
                return IDLE
            key = (act.kind, act.part, act.tile.samples.stop - act.tile.samples.start)
            if key not in known:
                cost = self.costs.tile(*place, key[2], portions[act.part] if len(portions) > 1 else None)
                passes = {Kind.FORWARD: cost.forward, Kind.BACKWARD: cost.backward, Kind.WEIGHT: cost.weight}
                known[key] = passes[act.kind]
            return known[key]

        return price

    def _wire(self) -> None:
        """A tile waits for those of the part before (backward: behind) that overlap it, where another stage ran them."""
        needs = self.programme.needs
        for above, below in pairwise((unit.stage, unit.part) for unit in self.layout.units):
            if above[0] == below[0]:
                continue  # handed over inside a rank, whose own order sees to it
            forward, backward = (
                [self.done[kind, unit] for unit in (above, below)] for kind in (Kind.FORWARD, Kind.BACKWARD)
            )
            for source, target, seconds in self._crossing(above[0], below[0]):
                node, early = forward[0][source]
                needs[forward[1][target][0]].append((node, seconds - early))
                node, early = backward[1][target]
                needs[backward[0][source][0]].append((node, seconds - early))

    def _crossing(self, above: int, below: int) -> Iterator[tuple[Tile, Tile, float]]:
        """Tiles of two stages that overlap, and the seconds that what they share is under way."""
        known: dict[tuple[int, int, int], float] = {}
        targets, first = self.layout.tiles[below], 0
        for source in self.layout.tiles[above]:
            while targets[first].samples.stop <= source.samples.start:
                first += 1
            for index in range(first, len(targets)):
                target = targets[index]
                if target.samples.start >= source.samples.stop:
                    break
                shared = min(source.samples.stop, target.samples.stop) - max(source.samples.start, target.samples.start)
                key = (source.replica, target.replica, shared)
                if key not in known:
                    known[key] = self.costs.boundary(above, source.replica, target.replica, shared, below)
                yield source, target, known[key]
