"""What a plan sends over every link in a step, and the pace at which messages share it.

Messages from one replica to another are a flow, whatever model chunks they are between. A flow keeps its own order and
waits for no other one. Where a link has more to carry than time for it, its flows get parts of its rate by their bytes, so
that all would be through at the same moment: message after message, a flow goes no faster than (seconds the link needs
for all its messages) x (message) / (the flow's bytes). As long as a replica that takes chunks in turn goes forward alone,
or backward, messages of the other way are left out. Shares that the plan fixes have none of the anomalies of first come,
first served (Graham, 1969), where a faster link can slow a plan. Beside that no step is shorter than any link needs for
all its bytes, messages and collectives.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.groups import Operation
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.resources import OF_RANKS, Resource
from hethub.predictor.memory.parameters import RankWidths, StageParameters, rank_widths, replica_widths
from hethub.predictor.pipeline.state.costs import StateCosts
from hethub.predictor.pipeline.traffic.routes import Flow, Routes
from hethub.spec.layout.execution import Kind, actor_order

SAME_MOMENT = 1e-12  # seconds, by which sums may be off


class Paces(NamedTuple):
    """The least seconds per sample between two messages of a flow, as its links allow: while messages of its own direction
    alone share them, and while those of both directions do. 0.0 where the passes of the sender take longer anyway."""

    one_way: float
    two_way: float


class LinkLoads:
    """The seconds that a layout's step takes on every link, by flow and by resource."""

    def __init__(self, routes: Routes, network: Network, state: StateCosts) -> None:
        self.routes, self.network, self.traffic = routes, network, StateTraffic(state)

    @cached_property
    def messages(self) -> dict[tuple[object, Resource], float]:
        """Seconds that a resource needs for the messages of one phase: of one way, and where all microbatches pass one chunk
        before the next, of one chunk of all stages."""
        return {key: self._seconds(key[1], num_bytes) for key, num_bytes in self.routes.messages.items()}

    def _seconds(self, resource: Resource, num_bytes: Sequence[float]) -> float:
        seconds, rate = 0.0, self.network.rate(resource)
        for own in num_bytes:
            seconds += own / rate
        return seconds

    @cached_property
    def both_ways(self) -> dict[Resource, float]:
        """Seconds that a resource needs for all messages."""
        found = defaultdict[Resource, float](float)
        for (_, resource), seconds in self.messages.items():
            found[resource] += seconds
        return found

    @cached_property
    def _by_number(self) -> tuple[list[float], list[float]]:
        """By number of what is passed, seconds for the messages of its phase, and for all of its resource."""
        return list(self.messages.values()), [self.both_ways[resource] for _, resource in self.messages]

    @memoized
    def paces(self, flow: Flow) -> tuple[float, float]:
        """What a flow takes at least from one sample to the next, alone (one message has one interface, and the next one
        another where ranks take turns) or with others: those that go the same way, or both."""
        (of_phase, of_all), least = self._by_number, self._alone(flow.ranks) / flow.turns
        one_way = max(max([of_phase[number] for number in flow.passed]) / flow.in_phase, least)
        if self._goes_back_last:
            return one_way, one_way
        return one_way, max(max([of_all[number] for number in flow.passed]) / flow.in_all, least)

    @cached_property
    def _goes_back_last(self) -> bool:
        """Whether every replica has all its microbatches forward before the first goes back, as its schedule or the limits
        that the plan gives have it: there the two ways never meet."""
        layout, chunks = self.routes.layout, self.routes.layout.plan.num_chunks
        counts = [[load.num_microbatches * chunks for load in own] for own in layout.loads]
        return layout.plan.holds_all or layout.actor_limits == counts

    @memoized
    def _alone(self, ranks: tuple[int, int]) -> float:
        """Seconds per sample from rank to rank where nobody else uses the way."""
        return self.network.path(*ranks).alone.seconds_per_byte * self.routes.sample_bytes

    @cached_property
    def longest(self) -> tuple[float, float, Resource | None]:
        """Seconds that the fullest resource needs for all its bytes, and for those of messages among them; which it is,
        None where nothing is sent."""
        messages, both = self.both_ways, defaultdict[Resource, float](float, self.both_ways)
        for resource, num_bytes in self.traffic.by_resource().items():
            both[resource] += num_bytes / self.network.rate(resource)
        leaders: dict[object, tuple[int, int]] = {
            rank: (stage, replica) for stage, own in enumerate(self.routes.leaders) for replica, rank in enumerate(own)
        }
        for resource in messages:
            if resource.kind in OF_RANKS:
                num_bytes = self.traffic.of_leader(*leaders[resource.owner], resource)
                both[resource] += num_bytes / self.network.rate(resource)
        if not both:
            return 0.0, 0.0, None
        fullest = max(both, key=lambda resource: (both[resource], messages.get(resource, 0.0)))
        return both[fullest], messages.get(fullest, 0.0), fullest


_NOTHING = RankWidths(0, 0, 0, 0)  # a rank that holds norms alone


class Summed(NamedTuple):
    """Bytes of a stage's matrices that a step's collectives move, by what they do, and of norms, which go with the first
    piece."""

    moved: dict[Operation, float]
    norms: dict[Operation, float]


class StateTraffic:
    """What collectives over a stage's replicas send in a step."""

    def __init__(self, state: StateCosts) -> None:
        self.state = state

    def by_resource(self) -> dict[Resource, float]:
        """Bytes of a step's collectives over replicas by the resources that carry them, in one direction."""
        found = defaultdict[Resource, float](float)
        for stage, spec in enumerate(self.state.layout.stages):
            if len(spec.replicas) == 1:
                continue
            own = self._summed[stage]
            for piece, part in enumerate(self._parts(stage)):
                group = self.state.rings.group(stage, piece)
                for operation, moved in own.moved.items():
                    num_bytes = part * moved + own.norms[operation] * (piece == 0)
                    for resource, carried in self.state.network.ring_bytes(group, num_bytes, operation).items():
                        found[resource] += carried
        return found

    def of_leader(self, stage: int, replica: int, own: Resource) -> float:
        """Bytes of a step's collectives over replicas by a leader's own staging or port, in its direction."""
        spec, summed, state = self.state.layout.stages[stage], self._summed[stage], self.state
        if len(spec.replicas) == 1:
            return 0.0
        leader = spec.replicas[replica]
        first = state.rings.rank_fractions(leader)[0]
        parts = self._parts(stage)[: sum(piece.start < first - 1e-6 for piece in state.rings.pieces(stage))]
        widths, (alone,) = replica_widths(state.model, leader, state.software)[0], rank_widths(state.model, 1)
        held, whole = (self._matrices(stage, each) for each in (widths, alone))
        more = held / whole / sum(parts)  # than these parts: heads and columns are cut whole, and some held twice
        return sum(
            state.network.rank_bytes(
                state.rings.group(stage, piece), leader.ranks[0], own,
                more * part * moved + summed.norms[operation] * (piece == 0), operation,
            )
            for piece, part in enumerate(parts)
            for operation, moved in summed.moved.items()
        )  # fmt: skip

    @cached_property
    def _summed(self) -> list[Summed]:
        """By stage, what its replicas sum and gather."""
        (alone,), found = rank_widths(self.state.model, 1), []
        for stage, spec in enumerate(self.state.layout.stages):
            repeated = self._repeated(stage) / max(1, len(spec.replicas) - 1)
            matrices = self._matrices(stage, alone) + repeated
            moved = {name: matrices * each for name, each in self._bytes_a_step(stage).items()}
            if "all_gather" in moved:
                moved["all_gather"] -= self.state.width * self._not_gathered_again(stage, alone)
            norms = self._held(stage, _NOTHING)
            once = {name: norms * each for name, each in self._bytes_a_step(stage, once=True).items()}
            found.append(Summed(moved, once))
        return found

    @memoized
    def _parts(self, stage: int) -> list[float]:
        """What part of the stage's matrices each of its pieces is."""
        pieces = self.state.rings.pieces(stage)
        return [piece.part / pieces[-1].stop for piece in pieces]

    def _held(self, stage: int, widths: RankWidths) -> float:
        """Parameters of the stage on a rank of these widths, but for a table that its other end has too."""
        return self.state.count(widths, self.state.whole[stage]).own

    def _matrices(self, stage: int, widths: RankWidths) -> float:
        """The same without norms."""
        return self._held(stage, widths) - self._held(stage, _NOTHING)

    def _repeated(self, stage: int) -> int:
        """Parameters of keys and values where ranks of a replica hold the same heads: their rings have more ranks than
        replicas, and carry nearly all of their bytes."""
        spec, model = self.state.layout.stages[stage], self.state.model
        cuts = {replica_widths(model, replica, self.state.software) for replica in spec.replicas}
        if all(sum(widths.kv for widths in cut) == model.num_kv_heads for cut in cuts):
            return 0
        return 2 * model.hidden * model.num_kv_heads * model.head_size * spec.num_layers

    def _bytes_a_step(self, stage: int, *, once: bool = False) -> dict[Operation, int]:
        """Bytes that collectives over replicas move of every parameter in a step; `once`, of what does not come and go."""
        level, wire = self.state.level(stage), self.state.gradient_wire_bytes
        if level == 0:
            return {"all_reduce": 2 * wire}
        rounds = self._rounds(stage)
        return {
            "reduce_scatter": wire * (rounds if level > 1 and not once else 1),
            "all_gather": self.state.width * (2 * rounds if level == 3 and not once else 1),
        }

    def _rounds(self, stage: int) -> int:
        """How many times in a step the stage's weights are gathered for a forward and a backward, and gradients summed."""
        return self.state.layout.loads[stage][0].num_microbatches if self.state.in_rounds(stage) else 1

    def _not_gathered_again(self, stage: int, alone: RankWidths) -> float:
        """Parameters that stay from one pass to the next under ZeRO-3: of the layer at which a microbatch turns round, of the
        stage's first where the next microbatch goes forward behind another's backward, and of an embedding that both ends
        use beyond how often it comes."""
        if self.state.level(stage) < 3 or not self.state.software.gathers_ahead:
            return 0.0
        held = StageParameters.of(self.state.layout, stage, alone)
        turning, returning = actor_order(self.state.layout, stage, 0).turns
        rounds, whole = self._rounds(stage), self.state.whole[stage]
        forward, backward = (self.state.ends_with_tied(stage, whole, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
        comes = rounds * sum(forward + backward) + (not forward[0])  # the first forward brings it if no other does
        return turning * held.units[-1] + returning * held.units[0] + (2 * rounds - comes) * held.tied


class Kept(NamedTuple):
    """Messages that may wait for the one before them on their flow, or keep the one behind, as new nodes flow by flow; and all
    rows, of which theirs wait for them."""

    streams: list[slice]  # by flow, the places of its messages in the next three
    seconds: list[float]  # for which a flow carries a message's rows
    senders: list[int]  # the nodes that give it to the flow
    ready: list[float]  # when, from that node's end and never later than it
    sources: list[int]  # by row, the node from whose end on it is under way
    under_way: list[float]  # by row, for how long


class Meeting:
    """Rows of messages from a stage to another, each of a flow and from a node: those of one node and flow are one
    message. Which they are does not depend on costs."""

    def __init__(self, flows: Sequence[int], sources: Sequence[int]) -> None:
        import numpy as np  # here, since most predictions do without

        self._flow, self._source = np.array(flows), np.array(sources)
        self._rows = np.lexsort((self._source, self._flow))

    def kept(self, carried: Sequence[float], under_way: Sequence[float], computed: Any, first_node: int) -> Kept:
        """By row the seconds for which its flow carries it, 0 where it never waits, and those under way; `computed` is an array
        of the seconds that nodes up to each one take, `first_node` the number of the first new one.

        A sender's nodes end at least as far apart as it computes between them: a message is kept by as much as the one
        before it was, and that one's seconds, exceed this. What is certainly not kept needs no node in a replay.
        """
        import numpy as np

        seconds, delays = np.array(carried), np.array(under_way)
        rows = self._rows[seconds[self._rows] != 0.0]
        begins = np.flatnonzero(_changes(self._flow[rows]) | _changes(self._source[rows]))
        flow, source = self._flow[rows[begins]], self._source[rows[begins]]
        ready = np.minimum(np.minimum.reduceat(delays[rows], begins), 0.0)
        spent = np.add.reduceat(seconds[rows], begins)
        set_out = computed[source] + ready
        longer = np.zeros(len(begins))
        longer[1:] = spent[:-1] - (set_out[1:] - set_out[:-1])
        longer[_changes(flow)] = -np.abs(longer).sum()  # the first of a flow is not kept
        sums = np.cumsum(longer)
        kept = sums - np.minimum.accumulate(sums) > SAME_MOMENT
        kept[:-1] |= kept[1:]
        size = np.diff(begins, append=len(rows))  # in rows
        own, count, sources = rows[np.repeat(kept, size)], np.where(kept, size, 0), self._source.copy()
        sources[own] = first_node + np.repeat(np.cumsum(kept) - 1, count)
        delays[own] = delays[own] - np.repeat(ready, count) - np.repeat(spent, count)
        starts = [*np.flatnonzero(_changes(flow[kept])).tolist(), int(kept.sum())]
        columns = [column.tolist() for column in (spent[kept], source[kept], ready[kept], sources, delays)]
        return Kept([slice(*edges) for edges in pairwise(starts)], *columns)


def _changes(column: Any) -> Any:
    """Where a value is unlike the one before it; the first one always."""
    import numpy as np

    found = np.ones(len(column), bool)
    found[1:] = column[1:] != column[:-1]
    return found
