"""A step of a plan as nodes to replay: every replica's actions, and what goes on beside them.

A stage whose microbatches come in rounds (ZeRO-2/3) is one actor: its replicas meet in every layer's collectives, so a
round takes as long as its slowest microbatch. Collectives over a chunk are nodes of a stream of their own, beside
compute.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from hethub.predictor.pipeline.costs import Parts, PlanCosts
from hethub.predictor.pipeline.link_loads import meeting
from hethub.predictor.pipeline.replay import TaskGraph
from hethub.predictor.pipeline.symmetry import FoldedCosts
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import Kind, actor_order
from hethub.spec.schedule.microbatches import StageOverlap, load_alone, stage_overlap
from hethub.spec.schedule.orders import ActorOrder

Place = tuple[int, int]  # stage and replica
ChunkPlace = tuple[int, int]  # stage and chunk
T = TypeVar("T")
PASSES = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.WEIGHT: 2}  # where they are in a MicrobatchCost


class Rows(NamedTuple):
    """One side of a stage boundary: the microbatch of each row by its place, each microbatch's first row, and all other
    rows."""

    places: list[int]
    firsts: list[int]
    others: list[int]


class Run(NamedTuple):
    """A replica's step: the actor that does it, and the node of each entry of its order."""

    actor: int
    nodes: Mapping[int, int] | range  # by position
    order: ActorOrder
    early_seconds: Sequence[float] | None  # how long before each node's end the replica is done; None: never

    def early(self, position: int) -> float:
        return self.early_seconds[position] if self.early_seconds else 0.0


class Compute:
    """The compute actions of all replicas as nodes that wait for each other's microbatches.

    On a single stage no microbatch waits for another, so that all between the ends of the passes is one node, unless
    `full` asks for each.
    """

    def __init__(self, layout: Layout, costs: PlanCosts | FoldedCosts, full: bool) -> None:
        self.layout, self.costs = layout, costs
        self.each = full or layout.num_stages > 1
        self.graph = TaskGraph()
        self.runs: dict[Place, Run] = {}
        self.spent: dict[Place, Parts] = {}  # by each replica on all its microbatches
        self.senders: dict[int, int] = {}  # by node of a flow, the node that gives it its messages
        self._known_nodes: dict[tuple[Kind, int, int], list[int]] = {}
        for stage, spec in enumerate(layout.stages):
            if layout.plan.runs_in_rounds(stage):
                self._add_in_rounds(stage)
            else:
                for replica in range(len(spec.replicas)):
                    self._add_alone((stage, replica))
        self._wire()

    def _add_alone(self, place: Place) -> None:
        """Nodes for the actions of a replica that goes its own way."""
        order = actor_order(self.layout, *place)
        full, last = self._prices(place, order)
        seconds = [each.total for each in full] + [0.0] * len(order.updating)
        spent = [seconds[operation] for operation in order.operation_of]
        for operation, last_pass in zip(order.computing, last, strict=True):
            spent[order.positions[operation][-1]] = last_pass.total
        actor = self.graph.add_actor()
        self.runs[place] = Run(actor, self._add(actor, order, spent), order, None)

    def _add_in_rounds(self, stage: int) -> None:
        """Nodes for the rounds of replicas that go through them in lockstep."""
        order, actor = actor_order(self.layout, stage, 0), self.graph.add_actor()
        replicas = range(len(self.layout.stages[stage].replicas))
        taken = [self._taken((stage, replica), order) for replica in replicas]
        longest = [max(own) for own in zip(*taken, strict=True)]
        nodes = self._add(actor, order, longest)
        # Only gathers keep a replica from running ahead of the others inside a round.
        ahead = self.layout.stages[stage].zero < 3 and self.each
        for replica, own in enumerate(taken):
            early = [most - mine for most, mine in zip(longest, own, strict=True)] if ahead else None
            self.runs[stage, replica] = Run(actor, nodes, order, early)

    def _taken(self, place: Place, order: ActorOrder) -> list[float]:
        """Seconds that a replica needs for its own microbatch of each entry of its actor's order."""
        full, last = self._prices(place, order)
        found, numbers = [0.0] * len(order.operation_of), self.layout.round_numbers(*place)
        for operation, whole, short in zip(order.computing, full, last, strict=True):
            positions, seconds = order.positions[operation], whole.total
            for number in numbers:
                found[positions[number]] = seconds
            found[positions[numbers[-1]]] = short.total
        return found

    def _add(self, actor: int, order: ActorOrder, spent: list[float]) -> Mapping[int, int] | range:
        """Adds an actor's nodes, which take the seconds `spent` by position; the node of each position."""
        if self.each:
            return self.graph.extend(actor, spent)
        nodes, done = {}, 0
        for edge in order.edges:
            if done < edge:
                self.graph.extend(actor, [sum(spent[done:edge])])
            (nodes[edge],) = self.graph.extend(actor, [spent[edge]])
            done = edge + 1
        return nodes

    def _prices(self, place: Place, order: ActorOrder) -> tuple[list[Parts], list[Parts]]:
        """What the replica spends on a whole microbatch and on its last one, by operation; notes what it spends in
        all."""
        spec = self.layout.replica(*place)
        num_microbatches = load_alone(spec).num_microbatches
        short = spec.samples - spec.micro_batch * (num_microbatches - 1)
        last = self._passes(place, order, short)
        full = last if short == spec.micro_batch else self._passes(place, order, spec.micro_batch)
        sums = [
            sum((num_microbatches - 1) * whole[part] + own[part] for whole, own in zip(full, last, strict=True))
            for part in range(3)
        ]
        self.spent[place] = Parts(*sums)
        return full, last

    def _passes(self, place: Place, order: ActorOrder, samples: int) -> list[Parts]:
        """What a microbatch takes, by operation."""
        portions = self.costs.state.portions[place[0]]
        costs = [self.costs.microbatch(*place, samples, own if len(portions) > 1 else None) for own in portions]
        return [costs[chunk][PASSES[kind]] for kind, chunk in order.computing]

    def _wire(self) -> None:
        """A microbatch waits for those of the chunk before (backward: behind) that overlap it, where another stage ran
        them."""
        chunks = [(chunk.stage, chunk.chunk) for chunk in self.layout.model_chunks]
        for boundary, (above, below) in enumerate(pairwise(chunks)):
            if above[0] != below[0]:  # else handed over inside a rank, whose own order sees to it
                own = stage_overlap(self.layout.stages[above[0]].replicas, self.layout.stages[below[0]].replicas)
                costs = [self.costs.boundary(above[0], *pair, below[0]) for pair in own.pairs]
                seconds, ends = [costs[pair] for pair in own.pair_of], (own.above, own.below)
                rows = [Rows(*columns) for columns in zip(ends, own.firsts, own.others, strict=True)]
                both = [self.costs.paces(boundary, *pair[:2]) for pair in own.pairs]
                for way, kind in enumerate((Kind.FORWARD, Kind.BACKWARD)):
                    (giving, givers), (taking, takers) = list(zip((above, below), rows, strict=True))[:: 1 - 2 * way]
                    sources, under_way = self._sent(kind, giving, givers, seconds)
                    paces = [each[way] for each in both]
                    if any(paces):
                        sources, under_way = self._queued(own, paces, sources, under_way)
                    self._link(kind, sources, under_way, taking, takers)

    def _sent(
        self, kind: Kind, giving: ChunkPlace, givers: Rows, seconds: list[float]
    ) -> tuple[list[int], list[float]]:
        """By row, the node that a message comes from, and how long after its end it is there."""
        nodes = self._nodes(kind, *giving)
        if (early := self._earlies(kind, *giving)) is not None:
            seconds = [under_way - early[giver] for giver, under_way in zip(givers.places, seconds, strict=True)]
        return [nodes[place] for place in givers.places], seconds

    def _queued(
        self,
        overlap: StageOverlap,
        paces: Sequence[float],
        sources: list[int],
        under_way: list[float],
    ) -> tuple[list[int], list[float]]:
        """The same where messages wait for those before them on their flow: a node of the flow for what a node of its
        sender gives it. A message that meets no other on its flow needs none."""
        messages = meeting(overlap, paces, sources, under_way, self._computed)
        sources, under_way = list(sources), list(under_way)
        actors: dict[int, int] = {}
        for message in messages:
            if message.flow not in actors:
                actors[message.flow] = self.graph.add_actor()
            node = self.graph.add(actors[message.flow], message.seconds, [(message.source, message.ready)])
            self.senders[node] = message.source
            for row in message.rows:
                sources[row], under_way[row] = node, under_way[row] - message.ready - message.seconds
        return sources, under_way

    @cached_property
    def _computed(self) -> list[float]:
        """By node of compute, the seconds of it and of all before it."""
        return list(accumulate(self.graph.seconds))

    def _link(self, kind: Kind, giving: list[int], seconds: list[float], taking: ChunkPlace, takers: Rows) -> None:
        """Lets a chunk's microbatches wait for messages, given by row, with samples of theirs."""
        waiting, graph = self._nodes(kind, *taking), self.graph
        others: Iterable[int] = takers.others
        if self.layout.plan.runs_in_rounds(taking[0]):  # a node is of several microbatches
            others = range(len(seconds))
        else:
            sources, under_way = graph.sources, graph.under_way
            for node, row in zip(waiting, takers.firsts, strict=True):
                sources[node], under_way[node] = giving[row], seconds[row]
        for row in others:
            graph.needs[waiting[takers.places[row]]].append((giving[row], seconds[row]))

    def _nodes(self, kind: Kind, stage: int, chunk: int) -> list[int]:
        """The node of each of a stage's microbatches, in order of the sample axis."""
        found = self._known_nodes.get((kind, stage, chunk))
        if found is None:
            own = [map(run.nodes.__getitem__, positions) for run, positions in self._turns(kind, stage, chunk)]
            found = self._known_nodes[kind, stage, chunk] = self._by_microbatch(stage, own)
        return found

    def _earlies(self, kind: Kind, stage: int, chunk: int) -> list[float] | None:
        """How early in its node each of a stage's microbatches is done; None where none is."""
        turns = self._turns(kind, stage, chunk)
        if turns[0][0].early_seconds is None:
            return None
        return self._by_microbatch(stage, [map(run.early, positions) for run, positions in turns])

    def _turns(self, kind: Kind, stage: int, chunk: int) -> list[tuple[Run, list[int]]]:
        """Each replica's run, and where in its order its own microbatches come."""
        found = []
        for replica in range(len(self.layout.stages[stage].replicas)):
            run = self.runs[stage, replica]
            positions = run.order.positions[kind, chunk]
            if self.layout.plan.runs_in_rounds(stage):
                positions = [positions[number] for number in self.layout.round_numbers(stage, replica)]
            found.append((run, positions))
        return found

    def _by_microbatch(self, stage: int, own: Sequence[Iterator[T]]) -> list[T]:
        """What each replica has of its microbatches, in order of the sample axis."""
        return list(map(next, map(own.__getitem__, self.layout.microbatchings[stage].replicas)))
