"""The wiring of a layout: its task graph without costs. It has the nodes, the order in which actors run them, and for each
node the messages it waits for.

A layout is replayed under many costs, so its wiring is built once. Seconds are added by
`hethub.predictor.pipeline.task_graph`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from hethub.predictor.cost.cache import memoized
from hethub.predictor.pipeline.replay import NONE
from hethub.predictor.pipeline.symmetry import FoldedLayout
from hethub.predictor.pipeline.traffic.link_loads import Meeting
from hethub.predictor.pipeline.traffic.routes import Group
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.execution import Kind, actor_order
from hethub.spec.schedule.microbatches import StageOverlap, stage_overlap
from hethub.spec.schedule.orders import ActorOrder

Place = tuple[int, int]  # stage and replica
ChunkPlace = tuple[int, int]  # stage and chunk
T = TypeVar("T")


class Run(NamedTuple):
    """A replica's step: the actor that runs it, and the node of each entry of the actor's order."""

    actor: int
    nodes: Mapping[int, int] | range  # by position
    order: ActorOrder


class Way(NamedTuple):
    """The messages over a boundary between model chunks in one direction. Rows are those of the overlap of its stages."""

    sources: list[int]  # by row, the node that sends
    alone: list[bool]  # by row, whether its sender takes chunks in turn and goes one way yet, or no more than one
    waiting: list[int]  # the nodes that wait for a message as for their source
    firsts: list[int]  # the row of that message
    others: list[tuple[int, int]]  # nodes that wait for a message beside, and its row


class BoundaryMessages(NamedTuple):
    """The messages over a boundary between model chunks of two stages."""

    boundary: int
    stages: tuple[int, int]
    overlap: StageOverlap
    ways: tuple[Way, Way]  # with the activations, with their gradients


class StageNodes:
    """The nodes of one stage for which collectives wait or that wait for them. Replicas that work as one actor have them
    once."""

    def __init__(self, stage: int, runs: dict[Place, Run]) -> None:
        self.index, self.runs = stage, runs
        self.apart = list({run.actor: run for run in runs.values()}.values())
        order = self.apart[0].order
        self.first = {each: [run.nodes[run.order.spans[each][0]] for run in self.apart] for each in order.computing}
        self.last = {each: [run.nodes[run.order.spans[each][1]] for run in self.apart] for each in order.computing}
        self.updates: dict[Kind, dict[int, list[int]]] = {}  # by chunk, or under 0 for all of them at once
        for kind, chunk in order.updates:
            found = [run.nodes[run.order.updates[kind, chunk]] for run in self.apart]
            self.updates.setdefault(kind, {})[chunk] = found
        chunks = [chunk for kind, chunk in self.last if kind is Kind.BACKWARD]
        self.chunks = sorted(chunks, key=lambda chunk: self.completing(chunk)[0])  # as their gradients are complete

    def reduces(self, chunk: int) -> list[int]:
        """Return the REDUCE nodes that wait for a chunk: its own, or those of all chunks together."""
        found = self.updates[Kind.REDUCE]
        return found[chunk] if len(found) > 1 else next(iter(found.values()))

    def completing(self, chunk: int) -> list[int]:
        """Return the last node on each replica that adds to the chunk's gradients."""
        return self.last.get((Kind.WEIGHT, chunk), self.last[Kind.BACKWARD, chunk])


class Wiring:
    """The compute of all replicas, as nodes that wait for each other's microbatches.

    On a single stage microbatches wait for nothing, unless replicas meet in rounds or chunks take turns. Everything between
    the ends of the passes is then one node, unless `full` asks for each action.
    """

    def __init__(self, layout: Layout, full: bool) -> None:
        self.layout = layout
        chunks_in_turn = layout.plan.num_chunks > 1 and not layout.plan.passes_in_turn(0)
        self.each = full or layout.num_stages > 1 or self.meets(0) or chunks_in_turn
        self.orders: list[range] = []  # the nodes of each actor
        self.runs: dict[Place, Run] = {}
        for stage, spec in enumerate(layout.stages):
            for replica in range(len(spec.replicas)):
                shared = replica > 0 and self.goes_as_one(stage)
                order = actor_order(layout, stage, layout.actor_of(stage, replica))
                run = self.runs[stage, 0] if shared else self._run(order)
                self.runs[stage, replica] = run
        self.stages = [self._stage_nodes(stage) for stage in range(layout.num_stages)]
        self.sources = [NONE] * self._num_nodes
        self.boundaries = list(self._boundaries())

    def goes_as_one(self, stage: int) -> bool:
        """Whether a stage's replicas do every pass together, because they gather the weights of each layer (ZeRO-3)."""
        return self.layout.plan.runs_in_rounds(stage) and self.layout.stages[stage].zero == 3

    def meets(self, stage: int) -> bool:
        """Whether a stage's replicas meet only where gradients are summed (ZeRO-2)."""
        return self.layout.plan.runs_in_rounds(stage) and self.layout.stages[stage].zero < 3

    @property
    def _num_nodes(self) -> int:
        return self.orders[-1].stop if self.orders else 0

    @memoized
    def meeting(self, ends: tuple[int, int]) -> Meeting:
        """Return how the messages from one stage to another meet. Those from one replica to another are a flow."""
        pairs, sources = list[tuple[int, int]](), list[int]()
        for own in self.boundaries:
            if ends in (own.stages, own.stages[::-1]):
                up = ends != own.stages
                between = [(below, above) if up else (above, below) for above, below, _ in own.overlap.pairs]
                pairs += [between[pair] for pair in own.overlap.pair_of]
                sources += own.ways[up].sources
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        return Meeting([numbers[pair] for pair in pairs], sources)

    def _run(self, order: ActorOrder) -> Run:
        """Add an actor with the nodes of its order."""
        first, actor = self._num_nodes, len(self.orders)
        if self.each:
            nodes = range(first, first + len(order.operation_of))
            self.orders.append(nodes)
            return Run(actor, nodes, order)
        starts = [start for start, _ in pieces(order)]
        self.orders.append(range(first, first + len(starts)))
        edges = set(order.edges)
        return Run(actor, {start: first + i for i, start in enumerate(starts) if start in edges}, order)

    def _stage_nodes(self, stage: int) -> StageNodes:
        return StageNodes(stage, {place: run for place, run in self.runs.items() if place[0] == stage})

    def _boundaries(self) -> Iterator[BoundaryMessages]:
        """Yield the boundaries between chunks of different stages, and let microbatches wait: each for those that share samples
        with it in the chunk before, or in the backward in the chunk after."""
        stages, chunks = self.layout.stages, [(chunk.stage, chunk.chunk) for chunk in self.layout.model_chunks]
        for boundary, (above, below) in enumerate(pairwise(chunks)):
            if above[0] != below[0]:  # else handed over inside a rank, whose own order sees to it
                own = stage_overlap(stages[above[0]].replicas, stages[below[0]].replicas)
                down = self._way(Kind.FORWARD, (above, own.above), (below, own.below), own.firsts[1], own.others[1])
                up = self._way(Kind.BACKWARD, (below, own.below), (above, own.above), own.firsts[0], own.others[0])
                yield BoundaryMessages(boundary, (above[0], below[0]), own, (down, up))

    def _way(
        self,
        kind: Kind,
        givers: tuple[ChunkPlace, list[int]],
        takers: tuple[ChunkPlace, list[int]],
        firsts: list[int],
        others: list[int],
    ) -> Way:
        """Return the messages from one chunk to another, each given with its places on the sample axis by row. The first
        message that a node waits for becomes its source; `others` are the rows of the rest."""
        (giving, senders), (taking, receivers) = givers, takers
        given, waiting = self._nodes(kind, *giving), self._nodes(kind, *taking)
        sources = [given[place] for place in senders]
        alone = self._alone(giving[0], senders, sources)
        if self.goes_as_one(taking[0]):  # a node is of several microbatches
            beside = [(waiting[place], row) for row, place in enumerate(receivers)]
            return Way(sources, alone, [], [], beside)
        for node, row in zip(waiting, firsts, strict=True):
            self.sources[node] = sources[row]
        beside = [(waiting[receivers[row]], row) for row in others]
        return Way(sources, alone, waiting, firsts, beside)

    def _alone(self, stage: int, senders: list[int], sources: list[int]) -> list[bool]:
        """Return for each row whether its replica still sends in one direction only: before its first backward or after its
        last forward. This is not used where a stage is one chunk, which soon turns round, nor where chunks go one after
        another, so that the two directions never meet."""
        if self.layout.plan.num_chunks == 1 or self.layout.plan.goes_chunk_by_chunk:
            return [False] * len(sources)
        both, replicas = self._both_ways[stage], self.layout.microbatchings[stage].replicas
        return [node not in both[replicas[place]] for place, node in zip(senders, sources, strict=True)]

    @cached_property
    def _both_ways(self) -> list[list[range]]:
        """By stage and replica, the nodes from the first backward to the last forward."""
        found = []
        for stage in range(self.layout.num_stages):
            runs = [self.runs[stage, replica] for replica in self._replicas(stage)]
            edges = [(run, run.order.spans.items()) for run in runs]
            first = [min(own[0] for (kind, _), own in spans if kind is Kind.BACKWARD) for _, spans in edges]
            last = [max(own[1] for (kind, _), own in spans if kind is Kind.FORWARD) for _, spans in edges]
            found.append([range(run.nodes[a], run.nodes[b] + 1) for run, a, b in zip(runs, first, last, strict=True)])
        return found

    def _replicas(self, stage: int) -> range:
        return range(len(self.layout.stages[stage].replicas))

    @memoized
    def _nodes(self, kind: Kind, stage: int, chunk: int) -> list[int]:
        """Return the node of each of a stage's microbatches, in the order of the sample axis."""
        own = [map(run.nodes.__getitem__, positions) for run, positions in self.turns(kind, stage, chunk)]
        return self.by_microbatch(stage, own)

    def turns(self, kind: Kind, stage: int, chunk: int) -> list[tuple[Run, list[int]]]:
        """Return for each replica its run and the positions of its own microbatches in the order."""
        found = []
        for replica in self._replicas(stage):
            run = self.runs[stage, replica]
            positions = run.order.positions[kind, chunk]
            if self.layout.plan.runs_in_rounds(stage):
                positions = [positions[number] for number in self.layout.round_numbers(stage, replica)]
            found.append((run, positions))
        return found

    def by_microbatch(self, stage: int, own: Sequence[Iterator[T]]) -> list[T]:
        """Return what replicas have for their microbatches, in the order of the sample axis."""
        return list(map(next, map(own.__getitem__, self.layout.microbatchings[stage].replicas)))


def pieces(order: ActorOrder) -> list[tuple[int, int]]:
    """Return the positions from which and to which each node goes, if each edge of the order is a node of its own and
    everything between two edges is another."""
    found, done = [], 0
    for edge in order.edges:
        if done < edge:
            found.append((done, edge))
        found.append((edge, edge + 1))
        done = edge + 1
    return found


class Wirings:
    """The wirings of a layout and of its folded layouts. Each is built when it is first asked for."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @memoized
    def whole(self, full: bool) -> Wiring:
        """Return the wiring of all replicas and microbatches."""
        return Wiring(self.layout, full)

    @memoized
    def folded(self, group: Group, num_microbatches: int | None) -> Wiring:
        """Return the wiring of a group of replicas with `num_microbatches` each, or with all if it is None."""
        return Wiring(FoldedLayout.of(self.layout, group, num_microbatches), False)
