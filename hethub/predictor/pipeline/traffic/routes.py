"""The links that the messages of a plan pass, and how many samples: all of their loads that does not depend on the cluster's
figures."""

from collections import Counter, defaultdict
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from hethub.predictor.cost.cache import memoized
from hethub.predictor.cost.links import Network
from hethub.predictor.cost.resources import OF_RANKS, Resource
from hethub.predictor.cost.software import HETHUB, Software
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import ReplicaSpec
from hethub.spec.schedule.microbatches import sizes_of, stage_overlap


class Flow(NamedTuple):
    """The messages over a boundary between model chunks in one direction, from one replica to another. Where chunks take turns
    these are only a part of all messages between the two."""

    ranks: tuple[int, int]  # the leaders, or others between machines of the same kinds, where the way alone is as fast
    passed: tuple[int, ...]  # what they pass, by its number in `Routes.passed`
    turns: int  # ranks of either end that send or receive one message after the other
    in_phase: int  # samples that the sender gives the receiver, over every boundary and either way
    in_all: int


Pair = tuple[int, int, int]  # a boundary, as the model chunk above it, and the replicas above and below
Ends = tuple[tuple[int, int], tuple[int, int]]  # of a boundary, each as stage and replica
Group = tuple[tuple[int, ...], ...]  # replicas by stage


class Routes:
    """The flows of a layout. They are the same for clusters that differ only in figures, since these have the same links
    between ranks."""

    def __init__(self, layout: Layout, network: Network, sample_bytes: float, software: Software) -> None:
        """`sample_bytes` are the bytes of one sample's hidden states."""
        self.layout, self.network, self.sample_bytes = layout, network, sample_bytes
        self.repeats = software.interleave  # how often a chunk's boundary is crossed
        self.stages = [(above.stage, below.stage) for above, below in pairwise(layout.model_chunks)]  # by boundary
        self.boundaries = [boundary for boundary, (above, below) in enumerate(self.stages) if above != below]
        self.leaving: defaultdict[int, list[int]] = defaultdict(list)  # by stage, the boundaries below it
        for boundary in self.boundaries:
            self.leaving[self.stages[boundary][0]].append(boundary)
        self.leaders = [[replica.ranks[0] for replica in stage.replicas] for stage in layout.stages]
        turns = _turns if software.stack == HETHUB.stack else lambda _: _Turns(1, 1.0)
        self._turns = [[turns(replica) for replica in stage.replicas] for stage in layout.stages]
        self.passed: dict[tuple[object, Resource], int] = {}  # numbers by phase and resource, as `flows` meet them
        self._like: dict[tuple[object, ...], tuple[int, int]] = {}

    @cached_property
    def pairs(self) -> list[list[tuple[int, int, int]]]:
        """For each stage but the last: the replicas of it and of the next that share samples, and how many they share."""
        return [stage_overlap(a.replicas, b.replicas).pairs for a, b in pairwise(self.layout.stages)]

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of replicas that only talk among themselves. It needs stages of one chunk."""
        joined: dict[tuple[int, int], tuple[int, int]] = {}

        def first(place: tuple[int, int]) -> tuple[int, int]:
            while place in joined:
                place = joined[place]
            return place

        for stage, own in enumerate(self.pairs):
            for above, below, _ in own:
                a, b = sorted((first((stage, above)), first((stage + 1, below))))
                if a != b:
                    joined[b] = a
        found: dict[tuple[int, int], list[list[int]]] = {}
        for stage, spec in enumerate(self.layout.stages):
            for replica in range(len(spec.replicas)):
                found.setdefault(first((stage, replica)), [[] for _ in self.layout.stages])[stage].append(replica)
        return [tuple(map(tuple, group)) for group in found.values()]

    @cached_property
    def samples(self) -> Counter[Pair]:
        """The samples that cross the boundary from one replica to the other, by pair."""
        found: Counter[Pair] = Counter()
        for boundary in self.boundaries:
            above, below = (self.layout.stages[stage].replicas for stage in self.stages[boundary])
            if sizes_of(above) == sizes_of(below):
                found.update({(boundary, r, r): replica.samples for r, replica in enumerate(above)})
                continue
            overlap = stage_overlap(above, below)
            for pair, count in Counter(overlap.pair_of).items():
                one, other, samples = overlap.pairs[pair]
                found[boundary, one, other] += count * samples
        return found

    @cached_property
    def alike(self) -> dict[Pair, Pair]:
        """For each pair, the pair that stands for it. Replicas with the same number that talk to nobody else are a chain through
        the stages. Of chains on the same machines that are equally busy, the first stands for all."""
        with_others = {end for _, *ends in self.samples if ends[0] != ends[1] for end in ends}
        chains = {one: self._chain(one) for _, one, other in self.samples if one == other and one not in with_others}
        first: dict[object, int] = {}
        like = {replica: first.setdefault(chain, replica) for replica, chain in chains.items()}
        return {(at, one, other): (at, like.get(one, one), like.get(other, other)) for at, one, other in self.samples}

    def _chain(self, number: int) -> tuple[object, ...]:
        """Return what the flows between the replicas of this number depend on, from stage to stage. Boundaries between the same
        two stages are alike."""
        places, found = self.layout.cluster.places, list[object]()
        for (stage, other), boundary in self._unlike_boundaries.items():
            above, below = self.layout.stages[stage].replicas[number], self.layout.stages[other].replicas[number]
            ends, samples = (above.ranks[0], below.ranks[0]), self.samples[boundary, number, number]
            machines = places[ends[0]].machine, places[ends[1]].machine
            found.append((*machines, self.network.joined(ends), samples, above.micro_batch, above.tp, below.tp))
        return tuple(found)

    @cached_property
    def _unlike_boundaries(self) -> dict[tuple[int, int], int]:
        """One boundary between each two stages, by the stages above and below."""
        return {self.stages[boundary]: boundary for boundary in self.boundaries}

    @cached_property
    def flows(self) -> dict[Pair, tuple[Flow, Flow]]:
        """The flows with the activations and with their gradients, by the pairs that stand for others."""
        return {key: (self._flow(key, 0), self._flow(key, 1)) for key in self._unlike}

    @cached_property
    def _unlike(self) -> list[Pair]:
        """The pairs that stand for others."""
        return list(dict.fromkeys(self.alike.values()))

    def _flow(self, key: Pair, way: int) -> Flow:
        ends = self._ends(key)
        return self._between(ends[::-1] if way else ends, self._phases[key[0], way])

    def _ends(self, key: Pair) -> Ends:
        boundary, *replicas = key
        above, below = zip(self.stages[boundary], replicas, strict=True)
        return above, below

    @memoized
    def _between(self, ends: Ends, phase: object) -> Flow:
        """Return the flow from one replica to another in one phase. It is the same over every boundary between their stages."""
        (giving, sender), (taking, receiver) = ends
        source, target = self.leaders[giving][sender], self.leaders[taking][receiver]
        turns = min(self._turns[giving][sender].ranks, self._turns[taking][receiver].ranks)
        a, b = self.layout.cluster.places[source], self.layout.cluster.places[target]
        nodes = (a.node.name, b.node.name, a.machine == b.machine, self.network.joined((source, target)))
        resources = self.network.path(source, target).resources
        passed = tuple([self.passed.setdefault((phase, resource), len(self.passed)) for resource in resources])
        ranks = self._like.setdefault(nodes, (source, target))
        return Flow(ranks, passed, turns, self._carried[phase, *ends], self._carried[None, *ends])

    @cached_property
    def _phases(self) -> dict[tuple[int, int], object]:
        """The phase of each boundary and direction."""
        return {(boundary, way): self._phase(boundary, way) for boundary in self.boundaries for way in (0, 1)}

    def _phase(self, boundary: int, way: int) -> object:
        chunk = self.layout.model_chunks[boundary + way].chunk
        return (way, chunk) if self.layout.plan.goes_chunk_by_chunk else way

    @cached_property
    def _carried(self) -> Counter[tuple[object, ...]]:
        """The samples that a sender gives a receiver, by phase (None for all of them), sender and receiver. They are over all
        boundaries and in both directions, of the pairs that stand for others."""
        found: Counter[tuple[object, ...]] = Counter()
        for key in self._unlike:
            ends, samples = self._ends(key), self.repeats * self.samples[key]
            for way, between in enumerate((ends, ends[::-1])):
                found[self._phases[key[0], way], *between] += samples
                found[None, *between] += samples
        return found

    @cached_property
    def messages(self) -> dict[tuple[object, Resource], list[float]]:
        """The bytes of each sort of message, numbered as in `passed`, by phase and resource. A phase is a direction or, where all
        microbatches pass one chunk before the next, a chunk."""
        flows = self.flows  # these number what they pass
        found: dict[tuple[object, Resource], list[float]] = {key: [] for key in self.passed}
        parts: dict[object, float] = {
            rank: turns.first
            for leaders, own in zip(self.leaders, self._turns, strict=True)
            for rank, turns in zip(leaders, own, strict=True)
        }
        numbered = [(resource.kind in OF_RANKS, resource.owner, own) for (_, resource), own in found.items()]
        for key, count in Counter(self.alike.values()).items():
            num_bytes = self.samples[key] * self.repeats * self.sample_bytes
            for number in flows[key][0].passed + flows[key][1].passed:
                is_of_rank, owner, own = numbered[number]
                own.append((parts[owner] if is_of_rank else count) * num_bytes)
        return found


class _Turns(NamedTuple):
    """How many ranks of a replica take turns to send and receive, microbatch by microbatch (`Layout.leader`), and for which part
    of the samples the first one does, which is the largest part."""

    ranks: int
    first: float


def _turns(replica: ReplicaSpec) -> _Turns:
    each, samples = replica.micro_batch, replica.samples
    turns = -(-samples // (each * replica.tp))  # of the first, each of a microbatch, the last perhaps of a short one
    first = (turns - 1) * each + min(each, samples - (turns - 1) * each * replica.tp)
    return _Turns(min(replica.tp, -(-samples // each)), first / samples)
