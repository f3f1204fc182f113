"""Microbatches: how a stage's micro-batches lie on the sample axis, and which of two stages share samples."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from operator import sub, truediv
from typing import Any, NamedTuple

from hethub.spec.plan import ReplicaSpec
from hethub.spec.ranges import Range, overlap


class MicrobatchRange(NamedTuple):
    """The `index`-th micro-batch of a replica of a stage: samples [samples.start, samples.stop) of the step."""

    stage: int
    replica: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a microbatch
    samples: Range


class Transfer(NamedTuple):
    """Samples that one microbatch hands to a microbatch of the next stage; `tag` is unique among the step's
    activations."""

    source: MicrobatchRange
    target: MicrobatchRange
    samples: Range
    tag: int


class Microbatching(NamedTuple):
    """A stage's microbatches in order of the sample axis, as columns: what arithmetic over thousands of them needs."""

    replicas: list[int]
    indices: list[int]  # which of its replica's microbatches each is
    starts: list[int]
    stops: list[int]

    def microbatches(self, stage: int) -> tuple[MicrobatchRange, ...]:
        samples = map(Range, self.starts, self.stops)
        return tuple(map(MicrobatchRange, repeat(stage), self.replicas, self.indices, samples))


def deal(replicas: Sequence[ReplicaSpec]) -> Microbatching:
    """The microbatches of a stage, dealt by rule 1 of exactness.

    A replica's turn comes at (dealt + micro_batch) / samples, which grows with every microbatch of its own: all turns
    sorted, ties as listed, are the order of dealing. Unlike fractions with denominators up to 2**24 round to unlike
    floats.
    """
    return deal_sizes(sizes_of(replicas))


def sizes_of(replicas: Sequence[ReplicaSpec]) -> tuple[tuple[int, int], ...]:
    """Micro-batch and samples of each replica."""
    return tuple([(replica.micro_batch, replica.samples) for replica in replicas])


@lru_cache(maxsize=64)  # a search asks for few of them again and again
def deal_sizes(replicas: tuple[tuple[int, int], ...]) -> Microbatching:
    most = max(map(max, replicas))
    fraction: Any = truediv if most < 2**24 else Fraction
    turns: list[Any] = []
    positions: list[int] = []
    indices: list[int] = []
    sizes: list[int] = []
    for position, (size, samples) in enumerate(replicas):
        count = -(-samples // size)
        turns += [fraction(stop, samples) for stop in range(size, samples + size, size)]
        positions += [position] * count
        indices += range(count)
        sizes += [size] * (count - 1) + [samples - size * (count - 1)]
    order = sorted(range(len(turns)), key=turns.__getitem__)
    stops = list(accumulate(sizes[turn] for turn in order))
    return Microbatching([positions[t] for t in order], [indices[t] for t in order], [0, *stops[:-1]], stops)


def rounds(replicas: Sequence[int]) -> list[Range]:
    """A stage's microbatches, given by their replicas, as runs with at most one microbatch of each replica, each as
    long as it can be.

    There are as many as the busiest replica has microbatches: between two microbatches of any other lies at least one
    of its own.
    """
    starts = [0]
    seen: set[int] = set()
    for position, replica in enumerate(replicas):
        if replica in seen:
            starts.append(position)
            seen.clear()
        seen.add(replica)
    return [Range(*edges) for edges in pairwise([*starts, len(replicas)])]


def as_one_replica(microbatching: Microbatching) -> Microbatching:
    """Rounds as the microbatches of a single replica, which they are to the stages around."""
    turns = rounds(microbatching.replicas)
    starts = [microbatching.starts[own.start] for own in turns]
    return Microbatching([0] * len(turns), list(range(len(turns))), starts, [*starts[1:], microbatching.stops[-1]])


class Load(NamedTuple):
    """What an actor has to do in a step."""

    num_microbatches: int
    samples: int
    largest: int  # samples of its largest microbatch


def loads(microbatching: Microbatching) -> list[Load]:
    """The load of every actor of a stage, in their order."""
    sizes: dict[int, list[int]] = {}
    for actor, start, stop in zip(microbatching.replicas, microbatching.starts, microbatching.stops, strict=True):
        sizes.setdefault(actor, []).append(stop - start)
    return [Load(len(own), sum(own), max(own)) for _, own in sorted(sizes.items())]


def load_alone(replica: ReplicaSpec) -> Load:
    """The load of a replica that is an actor of its own."""
    count = -(-replica.samples // replica.micro_batch)
    return Load(count, replica.samples, min(replica.micro_batch, replica.samples))


def transfers(
    sources: Sequence[MicrobatchRange], targets: Sequence[MicrobatchRange], first_tag: int = 0
) -> list[Transfer]:
    """What crosses one stage boundary, in axis order: the overlaps of both microbatchings and nothing else."""
    found: list[Transfer] = []
    s = t = 0
    while s < len(sources):
        source, target = sources[s], targets[t]
        shared = overlap(source.samples, target.samples)
        found.append(Transfer(source, target, shared, first_tag + len(found)))
        s += shared.stop == source.samples.stop
        t += shared.stop == target.samples.stop
    return found


def overlaps(above: Microbatching, below: Microbatching) -> tuple[list[int], list[int], list[int]]:
    """The pairs of two stages' microbatches that share samples, as columns: the microbatches' places on the axis, and
    how many."""
    if above.stops == below.stops:
        places = list(range(len(above.stops)))
        return places, places, list(map(sub, above.stops, above.starts))
    firsts, seconds, samples = [], [], []
    first = second = start = 0
    while first < len(above.stops):
        stop = min(above.stops[first], below.stops[second])
        firsts.append(first)
        seconds.append(second)
        samples.append(stop - start)
        first += above.stops[first] == stop
        second += below.stops[second] == stop
        start = stop
    return firsts, seconds, samples


class StageOverlap(NamedTuple):
    """What two stages' microbatches share, as columns: the microbatches' places on the axis, and what they have in
    common with others."""

    above: list[int]
    below: list[int]
    pairs: list[tuple[int, int, int]]  # the unlike ones: replica above, replica below, how many samples
    pair_of: list[int]
    firsts: tuple[list[int], list[int]]  # of each microbatch above, and of each one below, its first row
    others: tuple[list[int], list[int]]  # all other rows


def stage_overlap(above: Sequence[ReplicaSpec], below: Sequence[ReplicaSpec]) -> StageOverlap:
    """What the microbatches of two stages share."""
    return _stage_overlap(sizes_of(above), sizes_of(below))


@lru_cache(maxsize=64)
def _stage_overlap(above: tuple[tuple[int, int], ...], below: tuple[tuple[int, int], ...]) -> StageOverlap:
    sources, targets = deal_sizes(above), deal_sizes(below)
    givers, takers, samples = overlaps(sources, targets)
    pairs: dict[tuple[int, int, int], int] = {}
    between = zip(
        map(sources.replicas.__getitem__, givers), map(targets.replicas.__getitem__, takers), samples, strict=True
    )
    pair_of = [pairs.setdefault(pair, len(pairs)) for pair in between]
    firsts, others = zip(*(_firsts(places) for places in (givers, takers)), strict=True)
    return StageOverlap(givers, takers, list(pairs), pair_of, firsts, others)


def _firsts(places: list[int]) -> tuple[list[int], list[int]]:
    """The rows with another place than the one before, and those with the same."""
    firsts, others = [0], list[int]()
    for row, (before, place) in enumerate(pairwise(places), start=1):
        (others if before == place else firsts).append(row)
    return firsts, others
