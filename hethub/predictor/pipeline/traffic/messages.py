"""Messages between replicas of two stages: which links the leaders' messages pass, and who shares these."""

from collections import Counter
from collections.abc import Container

from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.resources import IN, Link
from hethub.predictor.cost.software import Software
from hethub.spec.cluster import Place
from hethub.spec.layout.bind import Layout


class Messages:
    """The seconds of a layout's messages between stages, each by itself."""

    def __init__(
        self, layout: Layout, network: Network, software: Software, sample_bytes: float, like: "Messages | None" = None
    ) -> None:
        """`sample_bytes` are the bytes of one sample's hidden states on a rank. `like` are the same messages under other figures
        of links: who shares a link does not depend on figures, and is taken from there."""
        self.layout, self.network, self.software, self.sample_bytes = layout, network, software, sample_bytes
        self._like = like
        self._sharing: dict[tuple[int, int, int], tuple[tuple[str, int], ...]] = {}
        self._ways: dict[tuple[object, ...], Link] = {}

    def seconds(self, stage: int, source: int, target: int, samples: int, below: int | None = None) -> float:
        """Return the seconds of a message of `samples` from a replica of `stage` to one of the stage `below`, by default the
        next, or back, whichever is slower. It goes from leader to leader, over links shared with all replicas that send or
        receive there, and then to the other ranks of the receiver."""
        below = stage + 1 if below is None else below
        sender, receiver = self.layout.replica(stage, source), self.layout.replica(below, target)
        num_bytes = samples * self.sample_bytes
        if self.software.spread_boundaries and sender.tp == receiver.tp > 1:
            # Every rank sends its part to its peer and the receivers gather (Megatron's scatter and gather).
            seconds = self.way(stage, source, below, target, receiver.tp).seconds(num_bytes / receiver.tp)
            return seconds + self.network.all_gather(self.network.group(receiver.ranks), num_bytes)
        told = [self.network.broadcast(end.ranks).seconds(num_bytes) for end in (sender, receiver) if end.tp > 1]
        return self.way(stage, source, below, target).seconds(num_bytes) + max(told, default=0.0)

    def way(self, stage: int, source: int, below: int, target: int, spread: int = 1) -> Link:
        """Return the link from leader to leader or back, whichever is slower. It is shared with all other leaders of the two
        stages in the same place, and where messages are `spread` over ranks with these too."""
        key = (self.key(stage, source, below, target), spread)
        found = self._ways.get(key)
        if found is None:
            leaders = self.layout.replica(stage, source).ranks[0], self.layout.replica(below, target).ranks[0]
            ways = [
                self._shared_way(leaders, (stage, below), spread),
                self._shared_way(leaders[::-1], (below, stage), spread),
            ]
            found = self._ways[key] = Link(*map(max, zip(*ways, strict=True)))
        return found

    @memoized
    def key(self, stage: int, source: int, below: int, target: int) -> tuple[object, ...]:
        """Return what the seconds between two replicas depend on, beside bytes: where their leaders are, and how many messages
        of their stages leave and enter there at a time."""
        if self._like is not None:
            return self._like.key(stage, source, below, target)
        places = self.layout.cluster.places
        a = places[self.layout.replica(stage, source).ranks[0]]
        b = places[self.layout.replica(below, target).ranks[0]]
        on_one_machine = a.machine == b.machine
        return (
            on_one_machine and self.network.joined((a.rank, b.rank)),
            on_one_machine,
            a.node.name,
            b.node.name,
            self._at_once(stage, below, a),
            self._at_once(below, stage, b),
        )

    def _shared_way(self, ranks: tuple[int, ...], stages: tuple[int, ...], spread: int) -> Link:
        alone, _ = self.network.path(ranks[0], ranks[1])
        at_once = [spread * seconds for _, seconds in self._passed(ranks, stages)]
        return Link(alone.latency_seconds, max([alone.seconds_per_byte, *at_once]))

    def _passed(self, ranks: tuple[int, ...], stages: tuple[int, ...]) -> list[tuple[str, float]]:
        """Return the resources that a message passes from rank to rank, each with its kind and its seconds per byte, shared with
        the other messages of their stages."""
        places, found = self.layout.cluster.places, []
        for resource in self.network.path(ranks[0], ranks[1]).resources:
            end = resource.way == IN
            sharing = dict(self._at_once(stages[end], stages[1 - end], places[ranks[end]])).get(resource.kind, 1)
            found.append((resource.kind, sharing / self.network.rate(resource)))
        return found

    def seconds_on(self, kinds: Container[str], stage: int, source: int, target: int) -> float:
        """Return the seconds per byte between a replica of a stage and one of the next, in either direction, on resources of
        these kinds."""
        ranks = self.layout.replica(stage, source).ranks[0], self.layout.replica(stage + 1, target).ranks[0]
        both = self._passed(ranks, (stage, stage + 1)) + self._passed(ranks[::-1], (stage + 1, stage))
        return max([seconds for kind, seconds in both if kind in kinds], default=0.0)

    def _at_once(self, stage: int, other: int, place: Place) -> tuple[tuple[str, int], ...]:
        """Return for each kind of resource how many replicas of the stage share the one at `place` for messages with the `other`
        stage: all that are there, but if the stages have equally many replicas, only those that can have their partner
        elsewhere."""
        if self._like is not None:
            return self._like._at_once(stage, other, place)
        found = self._sharing.get((stage, other, place.machine))
        if found is None:
            own, partners = self._leaders(stage), self._leaders(other)
            replicas = [len(self.layout.stages[at].replicas) for at in (stage, other)]
            found = tuple(
                (key[0], min(own[key], replicas[1] - partners[key]) if replicas[0] == replicas[1] else own[key])
                for key in self._shared_at(place)
            )
            self._sharing[stage, other, place.machine] = found
        return found

    @memoized
    def _leaders(self, stage: int) -> Counter[tuple[str, object]]:
        """Count the leaders of the stage's replicas on each machine, in each rack and in each region."""
        found = Counter[tuple[str, object]]()
        for replica in self.layout.stages[stage].replicas:
            found.update(self._shared_at(self.layout.cluster.places[replica.ranks[0]]))
        return found

    def _shared_at(self, place: Place) -> list[tuple[str, object]]:
        """Return the resources that the messages of a machine share, each by kind and owner."""
        rack, regions = self.network.racks.get(place.node.name), self.layout.cluster.links.regions
        found: list[tuple[str, object]] = [("cards", place.machine), ("bridge", place.machine), ("host", place.machine)]
        if rack is not None:
            found.append(("rack", rack.name))
        if regions is not None:
            found.append(("regions", regions.of_node[place.node.name]))
        return found
