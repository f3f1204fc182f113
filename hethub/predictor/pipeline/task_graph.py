"""Build the task graph of a plan's step: the actions of every replica, with what they cost.

Under ZeRO-3 a stage is one actor: its replicas meet in the collectives of each layer, so a round takes as long as its
slowest microbatch. Under ZeRO-2 replicas meet where gradients are summed, and are at most two layers apart. Collectives
over a chunk are nodes of a stream of their own, beside compute.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise, repeat
from operator import attrgetter
from typing import Any, NamedTuple

from hethub.predictor.pipeline.costs import PlanCosts
from hethub.predictor.pipeline.overlap import Parts, Visit, binds
from hethub.predictor.pipeline.replay import NONE, LayeredPass, TaskGraph
from hethub.predictor.pipeline.symmetry import FoldedCosts
from hethub.predictor.pipeline.traffic.link_loads import Paces
from hethub.predictor.pipeline.wiring import BoundaryMessages, Place, Run, Way, Wiring, pieces
from hethub.spec.layout.execution import Kind
from hethub.spec.plan import ReplicaSpec
from hethub.spec.schedule.microbatches import StageOverlap, load_alone
from hethub.spec.schedule.orders import ActorOrder

PASSES = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.WEIGHT: 2}  # where they are in a MicrobatchCost


class Sent(NamedTuple):
    """The messages over a boundary in one direction. `ends` are the stages from which and to which they go, `paces` are by pair
    of the overlap, and `under_way` are by row the seconds from the end of the sender's node to the arrival."""

    ends: tuple[int, int]
    way: Way
    overlap: StageOverlap
    paces: Sequence[Paces]
    under_way: list[float]

    @property
    def is_paced(self) -> bool:
        return any(own.two_way for own in self.paces)

    def carried(self) -> list[float]:
        """Return for each row the seconds for which its flow is busy with it, 0 where it never waits."""
        found = [
            (own.two_way * samples, own.one_way * samples)
            for own, (*_, samples) in zip(self.paces, self.overlap.pairs, strict=True)
        ]
        return [found[pair][alone] for pair, alone in zip(self.overlap.pair_of, self.way.alone, strict=True)]


class Compute:
    """The compute actions of all replicas, as nodes that wait for each other's microbatches."""

    def __init__(self, wiring: Wiring, costs: PlanCosts | FoldedCosts) -> None:
        self.wiring, self.layout, self.costs = wiring, wiring.layout, costs
        self.runs = wiring.runs
        self.spent: dict[Place, Parts] = {}  # by each replica on all its microbatches
        self.through: dict[int, int] = {}  # by node of a pass, one that ends when others let its replica be through
        self._priced: dict[tuple[object, ...], tuple[list[Parts], list[Parts], Parts]] = {}
        self.senders: dict[int, int] = {}  # by node of a flow, the node that gives it its messages
        self.layered: dict[int, LayeredPass] = {}
        seconds = [each for stage in range(self.layout.num_stages) for each in self._seconds(stage)]
        self.graph = TaskGraph(
            seconds, wiring.sources[:], [0.0] * len(seconds), orders=list(wiring.orders), layered=self.layered
        )
        sent = [each for of_boundary in wiring.boundaries for each in self._messages(of_boundary)]
        for _, between in groupby(sorted(sent, key=attrgetter("ends")), attrgetter("ends")):
            self._add_messages(list(between))
        for stage in filter(wiring.meets, range(self.layout.num_stages)):
            self._meet(stage)

    def _seconds(self, stage: int) -> list[float]:
        """Return the seconds of each node of a stage."""
        places = [(stage, replica) for replica in range(len(self.layout.stages[stage].replicas))]
        if self.costs.state.is_replayed(stage):
            return self._by_layer(stage)
        if not self.layout.plan.runs_in_rounds(stage):
            return [each for place in places for each in self._by_node(self._taken(place), self.runs[place])]
        taken = [self._taken_in_rounds(place) for place in places]
        if self.wiring.goes_as_one(stage):
            return self._by_node([max(own) for own in zip(*taken, strict=True)], self.runs[stage, 0])
        return [each for own in taken for each in own]

    def _by_layer(self, stage: int) -> list[float]:
        """Return the seconds of each node of a stage whose passes wait for their layers. Where layers may make them wait,
        record them in `layered`."""
        places = [(stage, replica) for replica in range(len(self.layout.stages[stage].replicas))]
        taken = [self._visits(place) for place in places]
        if self.wiring.goes_as_one(stage):
            taken = [[self._slowest(own) for own in zip(*taken, strict=True)]]
        waits = binds([visit for visits in {visits for own in taken for visits in own} for visit in visits])
        found = list[float]()
        for first, alone in zip(places[: len(taken)], taken, strict=True):
            visits = self._bringing(self.runs[first], alone, self.costs.state.overlap_cost(stage))
            seconds = [sum(visit.compute for visit in own) for own in visits]
            longer = sum(seconds) - sum(visit.compute for own in alone for visit in own)
            for place in places if self.wiring.goes_as_one(stage) else [first]:
                self.spent[place] = self.spent[place]._replace(dp=self.spent[place].dp + longer)
            if waits:
                run = self.runs[first]
                nodes = {run.nodes[at]: own for at, own in enumerate(visits) if own}
                nodes |= {run.nodes[at]: () for (kind, _), at in run.order.updates.items() if kind is Kind.REDUCE}
                self.layered |= {node: LayeredPass(run.actor, own) for node, own in nodes.items()}
            found += seconds
        return found

    def _visits(self, place: Place) -> list[tuple[Visit, ...]]:
        """Return a replica's visits of layers at each entry of its actor's order. In rounds in which it has no microbatch they
        compute nothing."""
        (stage, replica), order, spec = place, self.runs[place].order, self.layout.replica(*place)
        self._prices(place, order)
        short = spec.samples % spec.micro_batch or spec.micro_batch
        found: list[tuple[Visit, ...]] = [()] * len(order.operation_of)
        in_rounds = self.layout.plan.runs_in_rounds(stage)
        for (kind, chunk), positions in order.positions.items():
            portion = self.costs.state.portions[stage][chunk]
            own = self.layout.round_numbers(stage, replica) if in_rounds else range(len(positions))
            full, last = (
                tuple(self.costs.visits(stage, replica, size, portion)[PASSES[kind]])
                for size in (spec.micro_batch, short)
            )
            none = tuple([visit._replace(compute=0.0) for visit in full])
            for position in positions:
                found[position] = none
            for number in own:
                found[positions[number]] = full
            found[positions[own[-1]]] = last
        return found

    @staticmethod
    def _slowest(visits: Sequence[tuple[Visit, ...]]) -> tuple[Visit, ...]:
        """Return the visits of replicas that do each layer together: the slowest of each."""
        if len(set(visits)) == 1:
            return visits[0]
        return tuple(max(layer) for layer in zip(*visits, strict=True))

    def _bringing(self, run: Run, taken: Sequence[tuple[Visit, ...]], cost: float) -> list[tuple[Visit, ...]]:
        """Return an actor's visits with what each gathers for the next. Nothing is gathered if the same chunk goes on with the
        same layer."""
        found, known = list(taken), dict[object, tuple[Visit, ...]]()
        passes = [(at, run.order.computing[run.order.operation_of[at]][1]) for at, own in enumerate(taken) if own]
        for (at, chunk), (after, following) in pairwise([*passes, (-1, -1)]):
            own, ahead = taken[at], 0.0
            if after >= 0:
                first = taken[after][0]
                ahead = own[-1].brings(first) if chunk == following else first.gather
            if (own, ahead) not in known:
                each = [*(before.brings(visit) for before, visit in pairwise(own)), ahead]
                known[own, ahead] = tuple(map(Visit.bringing, own, each, repeat(cost)))
            found[at] = known[own, ahead]
        return found

    def _summed(self, stage: int) -> list[tuple[int, int]]:
        """Return the positions in their order at which a stage's replicas sum gradients layer by layer, with the number of
        layers."""
        order, portions = self.runs[stage, 0].order, self.costs.state.portions[stage]
        last = Kind.WEIGHT if self.layout.plan.defers_wgrad else Kind.BACKWARD
        return sorted(
            (position, portions[chunk].layers)
            for (kind, chunk), positions in order.positions.items()
            for position in positions
            if kind is last
        )

    def _meet(self, stage: int) -> None:
        """Let replicas under ZeRO-2 wait for each other's sums.

        A replica fills a layer's gradients only when those of the layer two before, in this round or the previous one, are
        summed over all replicas. Nodes are whole passes, whose layers take equally long. So a pass ends no earlier than it
        may once all replicas are through its first layer, and through the one before its last two."""
        graph, summed, count = self.graph, self._summed(stage), len(self.layout.stages[stage].replicas)
        runs = [self.runs[stage, replica] for replica in range(count)]
        own = [{run.nodes[position]: layers for position, layers in summed} for run in runs]
        first, last_but_two, last_but_one, met, *through = (self._meetings(len(summed)) for _ in range(4 + count))
        ends = {node: end for each in zip(own, through, strict=True) for node, end in zip(*each, strict=True)}
        graph.sources = [ends.get(source, source) for source in graph.sources]
        for each in graph.needs.values():
            each[:] = [(ends.get(source, source), seconds) for source, seconds in each]
        self.through |= ends
        needs = graph.needs
        for nodes in own:
            for number, (node, layers) in enumerate(nodes.items()):
                end, layer = ends[node], graph.seconds[node] / layers
                needs[end].append((node, 0.0))
                needs[met[number]].append((end, 0.0))
                needs[node + 1].append((end, 0.0))
                if number:
                    needs[node].append((last_but_one[number - 1], 0.0))
                if number and layers > 1:
                    needs[node].append((met[number - 1], -layer))
                if layers > 1:
                    needs[last_but_one[number]].append((end, -layer))
                elif number:
                    needs[last_but_one[number]].append((met[number - 1], 0.0))
                if layers > 2:
                    needs[first[number]].append((node, -(layers - 1) * layer))
                    needs[last_but_two[number]] += [(node, -2 * layer), (first[number], (layers - 4) * layer)]
                    needs[end] += [(first[number], (layers - 2) * layer), (last_but_two[number], layer)]

    def _meetings(self, count: int) -> range:
        """Add nodes of no length, one after another, and return their numbers."""
        first = len(self.graph.seconds)
        self.graph.add_stream([0.0] * count, [NONE] * count, [0.0] * count)
        return range(first, first + count)

    def _by_node(self, taken: list[float], run: Run) -> list[float]:
        return taken if self.wiring.each else [sum(taken[start:stop]) for start, stop in pieces(run.order)]

    def _taken(self, place: Place) -> list[float]:
        """Return the seconds of each entry of the order of a replica that works alone."""
        order = self.runs[place].order
        full, last = self._prices(place, order)
        seconds = [each.total for each in full] + [0.0] * len(order.updating)
        taken = [seconds[operation] for operation in order.operation_of]
        if last is not full:
            for operation, last_pass in zip(order.computing, last, strict=True):
                taken[order.positions[operation][-1]] = last_pass.total
        return taken

    def _taken_in_rounds(self, place: Place) -> list[float]:
        """Return the seconds that a replica needs for its own microbatch at each entry of its actor's order."""
        order = self.runs[place].order
        full, last = self._prices(place, order)
        found, numbers = [0.0] * len(order.operation_of), self.layout.round_numbers(*place)
        for operation, whole, short in zip(order.computing, full, last, strict=True):
            positions, seconds = order.positions[operation], whole.total
            for number in numbers:
                found[positions[number]] = seconds
            found[positions[numbers[-1]]] = short.total
        return found

    def _prices(self, place: Place, order: ActorOrder) -> tuple[list[Parts], list[Parts]]:
        """Return what a replica spends on a whole microbatch and on its last one, by operation. Record what it spends in all,
        which is the same for equal replicas that do the same."""
        spec = self.layout.replica(*place)
        key = (self.costs.replica_key(*place), spec.micro_batch, spec.samples, order)
        if key not in self._priced:
            self._priced[key] = self._priced_anew(place, order, spec)
        full, last, self.spent[place] = self._priced[key]
        return full, last

    def _priced_anew(
        self, place: Place, order: ActorOrder, spec: ReplicaSpec
    ) -> tuple[list[Parts], list[Parts], Parts]:
        """Return the same for the first of equal replicas, and what it spends in all."""
        num_microbatches = load_alone(spec).num_microbatches
        short = spec.samples - spec.micro_batch * (num_microbatches - 1)
        last = self._passes(place, order, short)
        full = last if short == spec.micro_batch else self._passes(place, order, spec.micro_batch)
        by_part = zip(zip(*full, strict=True), zip(*last, strict=True), strict=True)
        sums = [sum([(num_microbatches - 1) * a + b for a, b in zip(*each, strict=True)]) for each in by_part]
        return full, last, Parts(*sums)

    def _passes(self, place: Place, order: ActorOrder, samples: int) -> list[Parts]:
        """Return what a microbatch takes, by operation."""
        portions = self.costs.state.portions[place[0]]
        costs = [self.costs.microbatch(*place, samples, own if len(portions) > 1 else None) for own in portions]
        return [costs[chunk][PASSES[kind]] for kind, chunk in order.computing]

    def _messages(self, of_boundary: BoundaryMessages) -> Iterator[Sent]:
        """Yield the messages over a boundary, in each direction."""
        boundary, (above, below), overlap, ways = of_boundary
        costs = [self.costs.boundary(above, *pair, below) for pair in overlap.pairs]
        under_way = [costs[pair] for pair in overlap.pair_of]
        both = [self.costs.paces(boundary, one, other) for one, other, _ in overlap.pairs]
        for ends, way, paces in zip(((above, below), (below, above)), ways, zip(*both, strict=True), strict=True):
            yield Sent(ends, way, overlap, paces, under_way)

    def _add_messages(self, sent_between: Sequence[Sent]) -> None:
        """Let the microbatches of a stage wait for the messages of another. Where a message may have to wait for the one before
        it on its flow, they wait for a node of the flow instead of the sender's."""
        if not any(sent.is_paced for sent in sent_between):
            for sent in sent_between:
                self._link(sent.way, sent.under_way)
            return
        under_way, carried = (
            list(chain.from_iterable(column))
            for column in zip(*((sent.under_way, sent.carried()) for sent in sent_between), strict=True)
        )
        meeting, first = self.wiring.meeting(sent_between[0].ends), len(self.graph.seconds)
        kept = meeting.kept(carried, under_way, self._computed, first)
        for own in kept.streams:
            self.graph.add_stream(kept.seconds[own], kept.senders[own], kept.ready[own])
        self.senders.update(enumerate(kept.senders, first))
        stop = 0
        for sent in sent_between:
            start, stop = stop, stop + len(sent.under_way)
            self._link(sent.way, kept.under_way[start:stop], kept.sources[start:stop])

    @cached_property
    def _computed(self) -> Any:
        """The seconds of each compute node together with all nodes before it."""
        import numpy as np

        return np.array(list(accumulate(self.graph.seconds)))

    def _link(self, way: Way, seconds: list[float], sources: list[int] | None = None) -> None:
        """Let microbatches wait for the messages that bring their samples. `seconds` under way are by row; so are `sources`, if
        given, the nodes to wait for instead of the senders'."""
        graph = self.graph
        for node, own in zip(way.waiting, map(seconds.__getitem__, way.firsts), strict=True):
            graph.under_way[node] = own
        if sources:
            for node, source in zip(way.waiting, map(sources.__getitem__, way.firsts), strict=True):
                graph.sources[node] = source
        given = sources or way.sources
        for node, row in way.others:
            graph.needs[node].append((given[row], seconds[row]))
