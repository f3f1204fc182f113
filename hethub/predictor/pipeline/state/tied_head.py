"""The costs of a head that is tied to an embedding at the other end of the pipeline."""

from functools import cached_property

from hethub.predictor.cost.groups import UNEVEN, Group
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.software import Software, gradient_bytes
from hethub.predictor.memory.parameters import replica_widths
from hethub.spec.layout.bind import Layout
from hethub.spec.layout.state import both_ends_step
from hethub.spec.plan import ReplicaSpec


class TiedHead:
    """The sum of a tied head's gradients with those of the embedding on other ranks. It costs nothing if there is no such
    head."""

    def __init__(
        self, layout: Layout, software: Software, network: Network, element_bytes: int, wire_bytes: int
    ) -> None:
        """`element_bytes` are the bytes of a weight, `wire_bytes` those of a gradient on the wire."""
        self.layout, self.software, self.network = layout, software, network
        self.element_bytes, self.wire_bytes = element_bytes, wire_bytes

    @cached_property
    def group(self) -> Group | None:
        """The ranks that sum a tied head together: those at one position of every replica at both ends. It is None where no tied
        head is on another stage than the embedding, or where it is summed in pairs, as other frameworks do. All of these
        ranks step it, or if the plan gives shares, those of the first stage."""
        layout = self.layout
        if not layout.head_is_apart or not self.software.one_tied_copy:
            return None
        ranks = [replica.ranks[0] for end in (0, -1) for replica in layout.stages[end].replicas]
        owned = layout.stages[0].every_state_share
        return self.network.group(ranks, None if both_ends_step(layout) else {r: owned.get(r, 0.0) for r in ranks})

    def beside(self, seconds: float, passing: float, sent_bytes: float) -> float:
        """Return the seconds of a stage's collectives together with the head's, which send `sent_bytes` for each parameter.
        `seconds` are those of the stage alone, `passing` the part of them that their bytes take. The head has a group of its
        own: latencies overlap, but the bytes of both wait for each other."""
        tied = sent_bytes / self.wire_bytes * (self.seconds - self._latency)
        return max(seconds + tied, (sent_bytes > 0) * self._latency + tied + min(seconds, passing))

    @cached_property
    def seconds(self) -> float:
        """The seconds to sum the gradients of a tied head with those of the embedding on other ranks."""
        layout = self.layout
        if not layout.head_is_apart:
            return 0.0
        first, last = layout.stages[0].replicas, layout.stages[-1].replicas
        if self.group:
            return self._summed(self.group, self.wire_bytes * max(self._table(replica) for replica in (*first, *last)))
        places = layout.cluster.places
        machines = [places[rank].machine for replica in first for rank in replica.ranks]
        width = self.element_bytes if self.software.gradient_wire_bytes else gradient_bytes(self.element_bytes)
        slowest: dict[tuple[int, int], float] = {}
        for a, b in zip(first, last, strict=False):
            ends = (places[a.ranks[0]].machine, places[b.ranks[0]].machine)
            if ends not in slowest:
                num_bytes = width * max(self._table(a), self._table(b))
                group = self.network.group([a.ranks[0], b.ranks[0]])
                slowest[ends] = self.network.all_reduce(group, num_bytes, machines.count(ends[0]))
        return max(slowest.values())

    @cached_property
    def _latency(self) -> float:
        """The part of these seconds that is latency. Of sums in pairs, as other frameworks do, it is taken to be 0."""
        return min(self.seconds, self._summed(self.group, 1e-6)) if self.group else 0.0

    def _summed(self, group: Group, num_bytes: float) -> float:
        times = 1.0 if both_ends_step(self.layout) else UNEVEN
        return times * self.network.reduce_scatter(group, num_bytes, self.network.sharing(group))

    def _table(self, replica: ReplicaSpec) -> int:
        """Return the parameters of the embedding, or of a head tied to it, on the replica's fullest rank."""
        widths = replica_widths(self.layout.model, replica, self.software)
        return self.layout.model.hidden * max(own.vocab for own in widths)
