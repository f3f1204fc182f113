"""What a plan sends over each link in a step, and the pace at which messages share it.

All messages from one replica to another are a flow, between whichever model chunks. A flow keeps its order and waits for
no other flow. Where a link has more to carry than it has time for, its flows get parts of its rate in proportion to their
bytes, so that all would end at the same moment. The seconds from one message of a flow to the next are then at least
(seconds the link needs for all its messages) x (bytes of the message) / (bytes of the flow). While a replica whose chunks
take turns still sends in one direction only, messages of the other direction are not counted.

These shares follow from the plan alone. So they have none of the anomalies of first come, first served (Graham, 1969), under
which a faster link can slow a plan. In addition no step is shorter than any link needs for all its bytes, messages and
collectives.
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
    """The least seconds per sample between two messages of a flow that its links allow: while only messages of its own
    direction share them, and while those of both directions do. They are 0.0 where the sender's passes take longer anyway."""

    one_way: float
    two_way: float


class LinkLoads:
    """The seconds that each link needs in a step of a layout, by flow and by resource."""

    def __init__(self, routes: Routes, network: Network, state: StateCosts) -> None:
        self.routes, self.network, self.traffic = routes, network, StateTraffic(state)

    @cached_property
    def messages(self) -> dict[tuple[object, Resource], float]:
        """The seconds that a resource needs for the messages of one phase. A phase is one direction or, where all microbatches
        pass one chunk before the next, one chunk of all stages."""
        return {key: self._seconds(key[1], num_bytes) for key, num_bytes in self.routes.messages.items()}

    def _seconds(self, resource: Resource, num_bytes: Sequence[float]) -> float:
        seconds, rate = 0.0, self.network.rate(resource)
        for own in num_bytes:
            seconds += own / rate
        return seconds

    @cached_property
    def both_ways(self) -> dict[Resource, float]:
        """The seconds that a resource needs for all messages."""
        found = defaultdict[Resource, float](float)
        for (_, resource), seconds in self.messages.items():
            found[resource] += seconds
        return found

    @cached_property
    def _by_number(self) -> tuple[list[float], list[float]]:
        """For each phase and resource, by its number: the seconds for the messages of the phase, and for all messages of the
        resource."""
        return list(self.messages.values()), [self.both_ways[resource] for _, resource in self.messages]

    @memoized
    def paces(self, flow: Flow) -> tuple[float, float]:
        """Return the least seconds of a flow from one sample to the next: with the messages of its own direction on its links,
        and with those of both. Alone, a message has one interface, and the next one another where ranks take turns."""
        (of_phase, of_all), least = self._by_number, self._alone(flow.ranks) / flow.turns
        one_way = max(max([of_phase[number] for number in flow.passed]) / flow.in_phase, least)
        if self._goes_back_last:
            return one_way, one_way
        return one_way, max(max([of_all[number] for number in flow.passed]) / flow.in_all, least)

    @cached_property
    def _goes_back_last(self) -> bool:
        """Whether every replica takes all its microbatches forward before the first goes back, because of its schedule or of
        the plan's limits. The two directions then never meet."""
        layout, chunks = self.routes.layout, self.routes.layout.plan.num_chunks
        counts = [[load.num_microbatches * chunks for load in own] for own in layout.loads]
        return layout.plan.holds_all or layout.actor_limits == counts

    @memoized
    def _alone(self, ranks: tuple[int, int]) -> float:
        """Return the seconds per sample from rank to rank if nobody else uses the links."""
        return self.network.path(*ranks).alone.seconds_per_byte * self.routes.sample_bytes

    @cached_property
    def longest(self) -> tuple[float, float, Resource | None]:
        """The seconds that the fullest resource needs for all its bytes, the part of them that is for messages, and which
        resource it is: None where nothing is sent."""
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
    """Bytes that a step's collectives move, by operation: of a stage's matrices, and of its norms, which go with the first
    piece."""

    moved: dict[Operation, float]
    norms: dict[Operation, float]


class StateTraffic:
    """What the collectives over replicas send in a step."""

    def __init__(self, state: StateCosts) -> None:
        self.state = state

    def by_resource(self) -> dict[Resource, float]:
        """The bytes of a step's collectives over replicas, by the resource that carries them, in one direction."""
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
        """Return the bytes of a step's collectives over replicas on a leader's own staging or port, in its direction."""
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
        """What the replicas of each stage sum and gather."""
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
        """Return which part of the stage's matrices each of its pieces is."""
        pieces = self.state.rings.pieces(stage)
        return [piece.part / pieces[-1].stop for piece in pieces]

    def _held(self, stage: int, widths: RankWidths) -> float:
        """Return the parameters of the stage on a rank with these widths, without a table that the other end has too."""
        return self.state.count(widths, self.state.whole[stage]).own

    def _matrices(self, stage: int, widths: RankWidths) -> float:
        """Return these parameters without norms."""
        return self._held(stage, widths) - self._held(stage, _NOTHING)

    def _repeated(self, stage: int) -> int:
        """Return the parameters of keys and values whose heads several ranks of a replica hold. Their rings have more ranks than
        there are replicas, and carry nearly all of their bytes."""
        spec, model = self.state.layout.stages[stage], self.state.model
        cuts = {replica_widths(model, replica, self.state.software) for replica in spec.replicas}
        if all(sum(widths.kv for widths in cut) == model.num_kv_heads for cut in cuts):
            return 0
        return 2 * model.hidden * model.num_kv_heads * model.head_size * spec.num_layers

    def _bytes_a_step(self, stage: int, *, once: bool = False) -> dict[Operation, int]:
        """Return the bytes that collectives over replicas move for each parameter in a step, by operation. `once` asks for
        parameters that are not gathered for each pass."""
        level, wire = self.state.level(stage), self.state.gradient_wire_bytes
        if level == 0:
            return {"all_reduce": 2 * wire}
        rounds = self._rounds(stage)
        return {
            "reduce_scatter": wire * (rounds if level > 1 and not once else 1),
            "all_gather": self.state.width * (2 * rounds if level == 3 and not once else 1),
        }

    def _rounds(self, stage: int) -> int:
        """Return how many times in a step the stage's weights are gathered for a forward and a backward, and its gradients
        summed."""
        return self.state.layout.loads[stage][0].num_microbatches if self.state.in_rounds(stage) else 1

    def _not_gathered_again(self, stage: int, alone: RankWidths) -> float:
        """Return the parameters that stay from one pass to the next under ZeRO-3, so that they are not gathered again: those of
        the layer at which a microbatch turns round, of the stage's first layer where another microbatch's forward follows,
        and of an embedding that both ends use."""
        if self.state.level(stage) < 3 or not self.state.software.gathers_ahead:
            return 0.0
        held = StageParameters.of(self.state.layout, stage, alone)
        turning, returning = actor_order(self.state.layout, stage, 0).turns
        rounds, whole = self._rounds(stage), self.state.whole[stage]
        forward, backward = (self.state.ends_with_tied(stage, whole, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
        comes = rounds * sum(forward + backward) + (not forward[0])  # the first forward brings it if no other does
        return turning * held.units[-1] + returning * held.units[0] + (2 * rounds - comes) * held.tied


class Kept(NamedTuple):
    """The messages that may have to wait for another message of their flow, or make another one wait, as new nodes, flow by
    flow; and all rows, those of such messages with the new nodes as their sources."""

    streams: list[slice]  # by flow, the places of its messages in the next three
    seconds: list[float]  # for which a flow carries a message's rows
    senders: list[int]  # the nodes that give it to the flow
    ready: list[float]  # when, from that node's end and never later than it
    sources: list[int]  # by row, the node from whose end on it is under way
    under_way: list[float]  # by row, for how long


class Meeting:
    """The rows of messages from one stage to another. Each row has a flow and a node that sends it; rows with the same flow and
    node are one message. None of this depends on costs."""

    def __init__(self, flows: Sequence[int], sources: Sequence[int]) -> None:
        import numpy as np  # here, since most predictions do without

        self._flow, self._source = np.array(flows), np.array(sources)
        self._rows = np.lexsort((self._source, self._flow))

    def kept(self, carried: Sequence[float], under_way: Sequence[float], computed: Any, first_node: int) -> Kept:
        """Return the messages that may have to wait for another one of their flow.

        By row, `carried` are the seconds for which its flow is busy with it, 0 where it never waits, and `under_way` those
        until it arrives. `computed` are the seconds of each node and all before it, `first_node` is the number of the first
        new node.

        The nodes of a sender end at least as far apart as it computes between them. A message waits by as much as the wait
        and the seconds of the one before it exceed this. Messages that certainly never wait need no node in a replay.
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
    """Return where a value differs from the one before it. The first one always does."""
    import numpy as np

    found = np.ones(len(column), bool)
    found[1:] = column[1:] != column[:-1]
    return found
