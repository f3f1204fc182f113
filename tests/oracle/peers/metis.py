"""Metis' search, re-derived (Um et al., USENIX ATC 2024; its planner and cost estimator, details as in
github.com/SamsungLabs/Metis). Nothing of `hethub.planner` is here.

Orders of device types; groups of accelerators in powers of two, a stage each, none smaller than half an even share, and of
their orders those of at most four bundles; every number of micro-batches that divides the batch; in each stage data
parallelism first, then, where memory asks for it, half of it for twice the tensor parallelism in the stage with the least
room; layers in proportion to the stages' speed as memory allows; in a stage of unlike accelerators samples in proportion to
theirs. Cost: (micro-batches - 1) x slowest stage + sum of stages + the longest all-reduce of gradients + messages, each
border's once + the longest update.

Left out, so that a question takes less than a minute: more than MOST_STAGES stages, micro-batches above LARGEST_MICRO_BATCH,
and more tensor parallelism of a plan that with less would not be among the cheapest even if layers could be cut in parts.
"""

from collections.abc import Iterator
from functools import cache
from itertools import permutations
from typing import NamedTuple

from tests.oracle.peers.questions import LARGEST_MICRO_BATCH, MOST_STAGES, Best, Draft, Question

LEAST_PART, MOST_BUNDLES = 0.5, 4  # its defaults: of an even share, a group; bundles of groups that are put in order


class MetisStage(NamedTuple):
    """A group under (dp, tp): seconds of a layer and of the head for one micro-batch, replicas with their samples, and
    what one border's message and the gradients' all-reduce take."""

    layer: float
    head: float
    replicas: tuple[tuple[tuple[int, ...], int], ...]
    shapes: tuple[tuple[int, int], ...]  # (device type, samples) that there are
    link: float


def metis(question: Question) -> Iterator[tuple[float, Draft]]:
    """Its plans in order of its own cost."""
    best, sizes, most = Best(), question.cluster.size, LARGEST_MICRO_BATCH
    for order in permutations(range(len(question.ranks))):
        sequence = [rank for device_type in order for rank in question.ranks[device_type]]

        @cache
        def stage(start: int, size: int, tp: int, samples: int, sequence: list[int] = sequence) -> MetisStage | None:
            return _metis_stage(question, sequence[start : start + size], tp, samples)

        for number in range(1, min(MOST_STAGES, question.model.layers, sizes) + 1):
            for groups in device_groups(sizes, number):
                starts = [sum(groups[:index]) for index in range(number)]
                for microbatches in divisors(question.global_batch):
                    samples = question.global_batch // microbatches
                    tps = [1] * number
                    while tps and samples * max(tp / size for tp, size in zip(tps, groups, strict=True)) <= most:
                        formed = [stage(*own, samples) for own in zip(starts, groups, tps, strict=True)]
                        known = [own for own in formed if own]
                        if len(known) < number:  # no memory is known: the widest data parallelism gives way
                            room = [tp / size for tp, size in zip(tps, groups, strict=True)]
                        else:
                            room = _metis_try(question, best, known, tps, microbatches)
                        tps = _next_tps(groups, tps, room) if room else []
    return best.drafts()


def device_groups(size: int, number: int) -> list[tuple[int, ...]]:
    """Sizes of `number` groups, powers of two that sum to `size`, in the orders that Metis looks at."""
    least = LEAST_PART * size / number
    powers = [1 << bit for bit in range(size.bit_length()) if 1 << bit >= least]

    def sums(left: int, rest: int, smallest: int) -> Iterator[tuple[int, ...]]:
        if not rest:
            if not left:
                yield ()
            return
        for power in powers:
            if smallest <= power and power * rest <= left:
                yield from ((power, *more) for more in sums(left - power, rest - 1, power))

    found: dict[tuple[int, ...], None] = {}
    for sizes in sums(size, number, 0):
        bundles = [(own,) for own in sizes]
        while len(bundles) > MOST_BUNDLES:  # pairs of neighbours, the smallest first
            merge = min(len(bundles) - MOST_BUNDLES, len(bundles) // 2)
            pairs = [bundles[2 * index] + bundles[2 * index + 1] for index in range(merge)]
            bundles = pairs + bundles[2 * merge :]
        for dealt in set(permutations(bundles)):
            found[sum(dealt, ())] = None
    return sorted(found)


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _metis_stage(question: Question, ranks: list[int], tp: int, samples: int) -> MetisStage | None:
    """None where a replica would have no or too many samples, or lie on two machines."""
    replicas = [tuple(ranks[start : start + tp]) for start in range(0, len(ranks), tp)]
    if samples < len(replicas) or any(question.machine_of[own[0]] != question.machine_of[own[-1]] for own in replicas):
        return None
    types = [question.type_of[own[0]] for own in replicas]
    speeds = [1 / question.seconds(device_type, tp, 1)[0] for device_type in types]
    exact = [samples * speed / sum(speeds) for speed in speeds]
    dealt = [int(part) for part in exact]
    for index in sorted(range(len(dealt)), key=lambda i: dealt[i] - exact[i])[: samples - sum(dealt)]:
        dealt[index] += 1
    if max(dealt) > LARGEST_MICRO_BATCH:
        return None
    shapes = tuple({(device_type, own) for device_type, own in zip(types, dealt, strict=True) if own})
    times = [question.seconds(device_type, tp, own) for device_type, own in shapes]
    slowest = max(times)
    link = question.link_of(ranks) if len(replicas) > 1 else float("inf")
    return MetisStage(*slowest, tuple(zip(replicas, dealt, strict=True)), shapes, link)


def _metis_try(
    question: Question, best: Best, stages: list[MetisStage], tps: list[int], microbatches: int
) -> list[float]:
    """Layers for the stages and the cost, kept if it is low. Nothing where layers fit as they are wanted, or would cost too
    much in exact proportion to speed; else the room that the stages have, in layers."""
    number, speeds = len(stages), [1 / stage.layer for stage in stages]
    if microbatches * question.model.layers / sum(speeds) >= best.limit:
        return []
    most = [
        min(
            question.most_layers(
                device_type, tp, samples, min(number - index, microbatches), index == 0, index == number - 1
            )
            for device_type, samples in stage.shapes
        )
        for index, (stage, tp) in enumerate(zip(stages, tps, strict=True))
    ]
    head = stages[-1].head / stages[-1].layer  # in layers
    layers, wanted = layers_by_speed(question.model.layers, speeds, head, most)
    if layers:
        cost = _metis_cost(question, stages, layers, tps, microbatches, best.limit)
        best.add(cost, Draft(tuple(layers), tuple(stage.replicas for stage in stages), microbatches))
    room = [limit - own for limit, own in zip(most, wanted, strict=True)]
    return [] if layers and min(room) >= 0 else room


def layers_by_speed(layers: int, speeds: list[float], head: float, most: list[int]) -> tuple[list[int], list[float]]:
    """Layers by stage in proportion to speed, the last stage having a head of so many layers beside; fewer where no more
    than `most` fit, none at all where they do not fit anywhere. And how many there would be without that limit."""
    exact = [(layers + head) * speed / sum(speeds) for speed in speeds]
    exact[-1] = max(0.0, exact[-1] - head)
    wanted = [part * layers / sum(exact) for part in exact]
    if sum(most) < layers or min(most) < 1 or len(speeds) > layers:
        return [], wanted
    found = [min(limit, max(1, int(part))) for limit, part in zip(most, wanted, strict=True)]
    while sum(found) != layers:  # to whoever is furthest from what was wanted
        up = sum(found) < layers
        able = [i for i, own in enumerate(found) if (own < most[i] if up else own > 1)]
        chosen = max(able, key=lambda i: wanted[i] - found[i] if up else found[i] - wanted[i])
        found[chosen] += 1 if up else -1
    return found, wanted


def _metis_cost(
    question: Question, stages: list[MetisStage], layers: list[int], tps: list[int], microbatches: int, limit: float
) -> float:
    """Its cost; without communication where that alone reaches the limit."""
    times = [stage.layer * own for stage, own in zip(stages, layers, strict=True)]
    times[-1] += stages[-1].head
    seconds = (microbatches - 1) * max(times) + sum(times)
    if seconds >= limit:
        return seconds
    summed, update, last = 0.0, 0.0, len(stages) - 1
    for index, (stage, own, tp) in enumerate(zip(stages, layers, tps, strict=True)):
        held = question.parameters(own, index == 0, index == last) / tp
        dp = len(stage.replicas)
        summed = max(summed, 2 * (dp - 1) / dp * held * question.width / stage.link)
        slowest = max(question.layer_costs[device_type].optimizer(held) for device_type, _ in stage.shapes)
        update = max(update, slowest)
        if index < last:
            ends = [stage.replicas[-1][0][-1], stages[index + 1].replicas[0][0][0]]
            largest = max(samples for _, samples in stage.shapes)
            seconds += question.hidden_bytes(largest) / question.link_of(ends)
    return seconds + summed + update


def _next_tps(groups: tuple[int, ...], tps: list[int], room: list[float]) -> list[int]:
    """Twice the tensor parallelism where there is the least room and data parallelism left; none where it is used up."""
    able = [index for index, (size, tp) in enumerate(zip(groups, tps, strict=True)) if size % (2 * tp) == 0 and tp < 8]
    if not able:
        return []
    chosen = min(able, key=room.__getitem__)
    return [tp * 2 if index == chosen else tp for index, tp in enumerate(tps)]
