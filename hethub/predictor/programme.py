"""A step of a plan as nodes to replay: every replica's actions, and what goes on beside them.

A stage whose tiles come in rounds (ZeRO-2/3) is one actor: its replicas meet in every layer's collectives, so a round
takes as long as its slowest tile. Collectives over a part are nodes of a stream of their own, beside compute.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from hethub.predictor.costs import Parts, PlanCosts
from hethub.predictor.replay import Programme
from hethub.spec.layout import Layout
from hethub.spec.schedule import Action, Kind, schedule
from hethub.spec.tiling import Tile

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
Place = tuple[int, int]  # stage and replica
Unit = tuple[int, int]  # stage and part


class Entry(NamedTuple):
    """An action of a replica: its node, what it spends there itself, and how long before the node's end it is done."""

    action: Action
    node: int
    spent: Parts
    early_seconds: float = 0.0


IDLE = Parts(0.0, 0.0, 0.0)


class Compute:
    """The compute actions of all replicas as nodes that wait for each other's tiles."""

    def __init__(self, layout: Layout, costs: PlanCosts) -> None:
        self.layout, self.costs = layout, costs
        self.programme = Programme()
        self.actors: dict[Place, int] = {}
        self.entries: dict[Place, list[Entry]] = {}
        self.done: dict[tuple[Kind, Unit], dict[Tile, tuple[int, float]]] = {}  # a tile's node, and how early in it
        lists = schedule(layout)
        for stage, spec in enumerate(layout.stages):
            replicas = range(len(spec.replicas))
            together = [list(replicas)] if costs.state.in_rounds(stage) else [[replica] for replica in replicas]
            for members in together:
                self._add_actor(stage, {replica: lists[stage, replica] for replica in members})
        self._wire()

    def _add_actor(self, stage: int, lists: dict[int, list[Action]]) -> None:
        """Nodes for the actions of replicas that go through them together."""
        actor = self.programme.add_actor()
        for replica in lists:
            self.actors[stage, replica], self.entries[stage, replica] = actor, []
        for acts in zip(*lists.values(), strict=True):
            spent = [self._spent(act, replica) for act, replica in zip(acts, lists, strict=True)]
            seconds = max(parts.total for parts in spent)
            node = self.programme.add(actor, seconds)
            for act, replica, own in zip(acts, lists, spent, strict=True):
                # Only gathers keep a replica from running ahead of the others inside a round.
                early = seconds - own.total if self.layout.stages[stage].zero < 3 else 0.0
                self.entries[stage, replica].append(Entry(act, node, own, early))
                if act.tile is not None:
                    self.done.setdefault((act.kind, (stage, act.part)), {})[act.tile] = (node, early)

    def _spent(self, act: Action, replica: int) -> Parts:
        if act.tile is None or act.kind not in COMPUTE:
            return IDLE
        portions = self.costs.state.portions[act.stage]
        portion = portions[act.part] if len(portions) > 1 else None
        cost = self.costs.tile(act.stage, replica, act.tile.samples.size, portion)
        return {Kind.FORWARD: cost.forward, Kind.BACKWARD: cost.backward, Kind.WEIGHT: cost.weight}[act.kind]

    def units(self) -> list[Unit]:
        """All parts of all stages in the order in which a sample passes them."""
        order = [
            (stage, part) for stage in range(self.layout.num_stages) for part in range(len(self.layout.parts(stage)))
        ]
        return sorted(order, key=lambda unit: self.layout.parts(unit[0])[unit[1]].start)

    def _wire(self) -> None:
        """A tile waits for those of the part before (backward: behind) that overlap it, where another stage ran them."""
        needs = self.programme.needs
        units = self.units()
        for above, below in pairwise(units):
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
