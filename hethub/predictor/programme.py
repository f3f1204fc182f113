"""A step of a plan as nodes to replay: every replica's actions, and what goes on beside them.

A stage whose tiles come in rounds (ZeRO-2/3) is one actor: its replicas meet in every layer's collectives, so a round
takes as long as its slowest tile. Collectives over a part are nodes of a stream of their own, beside compute.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from hethub.predictor.costs import Parts, PlanCosts
from hethub.predictor.lean import LeanCosts
from hethub.predictor.replay import Programme
from hethub.spec.layout import Layout
from hethub.spec.orders import LaneOrder
from hethub.spec.schedule import Kind, lane_order
from hethub.spec.tiling import load_alone

Place = tuple[int, int]  # stage and replica
Way = tuple[Kind, int]  # a kind of compute and the part it runs


class Run(NamedTuple):
    """A replica's step: an actor's nodes from `first` on, one per entry of the order."""

    actor: int
    first: int
    order: LaneOrder
    early_seconds: Sequence[float] | None  # how long before each node's end the replica is done; None: never

    def early(self, position: int) -> float:
        return self.early_seconds[position] if self.early_seconds else 0.0


class Compute:
    """The compute actions of all replicas as nodes that wait for each other's tiles."""

    def __init__(self, layout: Layout, costs: PlanCosts | LeanCosts) -> None:
        self.layout, self.costs = layout, costs
        self.programme = Programme()
        self.runs: dict[Place, Run] = {}
        self.spent: dict[Place, Parts] = {}  # by each replica on all its tiles
        for stage, spec in enumerate(layout.stages):
            if layout.plan.runs_in_rounds(stage):
                self._add_together(stage)
            else:
                for replica in range(len(spec.replicas)):
                    self._add_alone((stage, replica))
        self._wire()

    def _add_alone(self, place: Place) -> None:
        """Nodes for the actions of a replica that goes its own way."""
        order, first = lane_order(self.layout, *place), len(self.programme.seconds)
        full, last = self._prices(place, order)
        seconds = [parts.total for parts in full] + [0.0]  # the last one is that of updates
        spent = [seconds[way] for way in order.way_of]
        for way, parts in zip(order.ways, last, strict=True):
            spent[order.positions[way][-1]] = parts.total
        self.programme.seconds += spent
        self._add_run(place, Run(self.programme.add_actor(), first, order, None))

    def _add_together(self, stage: int) -> None:
        """Nodes for the rounds of replicas that go through them in lockstep."""
        order, first = lane_order(self.layout, stage, 0), len(self.programme.seconds)
        actor, replicas = self.programme.add_actor(), range(len(self.layout.stages[stage].replicas))
        taken = [self._taken((stage, replica), order) for replica in replicas]
        longest = [max(own) for own in zip(*taken, strict=True)]
        self.programme.seconds += longest
        # Only gathers keep a replica from running ahead of the others inside a round.
        ahead = self.layout.stages[stage].zero < 3
        for replica, own in enumerate(taken):
            early = [most - mine for most, mine in zip(longest, own, strict=True)] if ahead else None
            self._add_run((stage, replica), Run(actor, first, order, early))

    def _taken(self, place: Place, order: LaneOrder) -> list[float]:
        """Seconds that a replica needs for its own tile of each entry of its lane's order."""
        full, last = self._prices(place, order)
        found, numbers = [0.0] * len(order.passes), self.layout.round_numbers(*place)
        for way, whole, short in zip(order.ways, full, last, strict=True):
            positions, seconds = order.positions[way], whole.total
            for number in numbers:
                found[positions[number]] = seconds
            found[positions[numbers[-1]]] = short.total
        return found

    def _add_run(self, place: Place, run: Run) -> None:
        self.runs[place] = run
        nodes = range(run.first, run.first + len(run.order.passes))
        if not self.programme.orders[run.actor]:
            self.programme.orders[run.actor] += nodes
            self.programme.needs += [[] for _ in nodes]

    def _prices(self, place: Place, order: LaneOrder) -> tuple[list[Parts], list[Parts]]:
        """What the replica spends on a whole tile and on its last one, by way; notes what it spends in all."""
        spec, portions = self.layout.replica(*place), self.costs.state.portions[place[0]]
        num_tiles = load_alone(spec).num_tiles
        short = spec.samples - spec.micro_batch * (num_tiles - 1)

        def price(way: Way, samples: int) -> Parts:
            cost = self.costs.tile(*place, samples, portions[way[1]] if len(portions) > 1 else None)
            return {Kind.FORWARD: cost.forward, Kind.BACKWARD: cost.backward, Kind.WEIGHT: cost.weight}[way[0]]

        last = [price(way, short) for way in order.ways]
        full = last if short == spec.micro_batch else [price(way, spec.micro_batch) for way in order.ways]
        sums = [
            sum((num_tiles - 1) * whole[part] + own[part] for whole, own in zip(full, last, strict=True))
            for part in range(3)
        ]
        self.spent[place] = Parts(*sums)
        return full, last

    def _wire(self) -> None:
        """A tile waits for those of the part before (backward: behind) that overlap it, where another stage ran them."""
        needs = self.programme.needs
        for above, below in pairwise((unit.stage, unit.part) for unit in self.layout.units):
            if above[0] == below[0]:
                continue  # handed over inside a rank, whose own order sees to it
            sources, targets = self._nodes(Kind.FORWARD, *above), self._nodes(Kind.FORWARD, *below)
            back_sources, back_targets = self._nodes(Kind.BACKWARD, *below), self._nodes(Kind.BACKWARD, *above)
            for source, target, seconds in self._crossing(above[0], below[0]):
                node, early = sources[source]
                needs[targets[target][0]].append((node, seconds - early))
                node, early = back_sources[target]
                needs[back_targets[source][0]].append((node, seconds - early))

    def _nodes(self, kind: Kind, stage: int, part: int) -> list[tuple[int, float]]:
        """The node of each of a stage's tiles, in order of the sample axis, and how early in it the tile is done."""
        tiling, in_rounds = self.layout.tilings[stage], self.layout.plan.runs_in_rounds(stage)
        own = []
        for replica in range(len(self.layout.stages[stage].replicas)):
            run = self.runs[stage, replica]
            positions = run.order.positions[kind, part]
            if in_rounds:
                positions = [positions[number] for number in self.layout.round_numbers(stage, replica)]
            own.append([(run.first + position, run.early(position)) for position in positions])
        return [own[replica][index] for replica, index in zip(tiling.replicas, tiling.indices, strict=True)]

    def _crossing(self, above: int, below: int) -> Iterator[tuple[int, int, float]]:
        """Tiles of two stages that overlap, by their place on the sample axis, and the seconds that what they share is
        under way."""
        known: dict[tuple[int, int, int], float] = {}
        sources, targets = self.layout.tilings[above], self.layout.tilings[below]
        source = target = start = 0
        while source < len(sources.stops):
            stop = min(sources.stops[source], targets.stops[target])
            key = (sources.replicas[source], targets.replicas[target], stop - start)
            if key not in known:
                known[key] = self.costs.boundary(above, *key, below)
            yield source, target, known[key]
            source += sources.stops[source] == stop
            target += targets.stops[target] == stop
            start = stop
