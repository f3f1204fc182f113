"""Sailor's search, re-derived (Strati et al., SOSP 2025, arXiv 2504.17096; its planner and simulator, details as in
github.com/eth-easl/sailor). Nothing of `hethub.planner` is here.

Numbers of stages of equal layers, the later ones taking what is left over; micro-batches in powers of two; one number of
replicas for all stages, of unlike accelerators in a stage where it comes so; of every device type the least tensor
parallelism with which a stage fits, or more. Its dynamic programming deals accelerators to stages; here they are dealt in
every order of every subset of the device types, which is what its objective comes to: a stage lasts as long as its slowest
type. Cost: (micro-batches - 1) x the slowest of stage and message + sum of stages + messages there and back + the longest
all-reduce of gradients.
"""

from collections.abc import Iterator
from itertools import permutations

from tests.oracle.peers.questions import LARGEST_MICRO_BATCH, MOST_STAGES, Best, Draft, Question

Mixture = list[tuple[int, int, int]]  # a stage's device types, each with its tensor parallelism and number of replicas


def sailor(question: Question) -> Iterator[tuple[float, Draft]]:
    """Its plans in order of its own cost."""
    best = Best()
    types = range(len(question.ranks))
    orders = [order for size in range(1, len(types) + 1) for order in permutations(types, size)]
    for number in range(1, min(MOST_STAGES, question.model.layers) + 1):
        least, more = divmod(question.model.layers, number)
        layers = [least + (index >= number - more) for index in range(number)]
        micro_batch = 1
        while micro_batch <= LARGEST_MICRO_BATCH and question.global_batch % micro_batch == 0:
            turns = question.global_batch // micro_batch
            widths = sorted({-(-turns // own) for own in range(1, turns + 1)})
            for floor in (1, 2, 4, 8):
                tps = [
                    [_least_tp(question, own, i, layers, micro_batch, floor) for i in range(number)] for own in types
                ]
                for order in orders:
                    for width in widths:
                        if not _sailor_try(question, best, order, layers, tps, micro_batch, width):
                            break  # wider ones need more accelerators still
            micro_batch *= 2
    return best.drafts()


def _least_tp(question: Question, device_type: int, index: int, layers: list[int], samples: int, floor: int) -> int:
    """The least tensor parallelism, from `floor` on, with which a stage fits on a device type; 0 for none."""
    tp, number = floor, len(layers)
    while tp <= min(8, question.cluster.nodes[device_type].accelerators):
        most = question.most_layers(device_type, tp, samples, number - index, index == 0, index == number - 1)
        if layers[index] <= most:
            return tp
        tp *= 2
    return 0


def _sailor_try(
    question: Question, best: Best, order: tuple[int, ...], layers: list[int], tps: list[list[int]], micro_batch: int,
    width: int,
) -> bool:  # fmt: skip
    """Whether accelerators of the device types, in this order, suffice for `width` replicas of every stage; the plan's cost
    is kept if it is low."""
    left = [len(question.ranks[device_type]) for device_type in order]
    turn, mixtures = 0, list[Mixture]()  # per stage: (device type, tp, replicas)
    for index in range(len(layers)):
        missing, own = width, Mixture()
        while missing:
            if turn == len(order):
                return False
            tp = tps[order[turn]][index]
            taken = min(missing, left[turn] // tp) if tp else 0
            if taken:
                own.append((order[turn], tp, taken))
                left[turn] -= taken * tp
                missing -= taken
            if missing:
                turn += 1
        mixtures.append(own)
    if _sailor_bound(question, mixtures, layers, micro_batch, width) < best.limit:
        replicas = _placed(question, mixtures)
        if replicas is not None:
            cost = _sailor_cost(question, replicas, mixtures, layers, micro_batch, width)
            dealt = tuple(tuple((ranks, micro_batch) for ranks in own) for own in replicas)
            best.add(cost, Draft(tuple(layers), dealt, 0, micro_batch))
    return True


def _stage_seconds(question: Question, mixtures: list[Mixture], layers: list[int], samples: int) -> list[float]:
    last, times = len(layers) - 1, []
    for index, (mixture, number) in enumerate(zip(mixtures, layers, strict=True)):
        each = [question.seconds(device_type, tp, samples) for device_type, tp, _ in mixture]
        times.append(max(layer * number + (head if index == last else 0.0) for layer, head in each))
    return times


def _sailor_bound(question: Question, mixtures: list[Mixture], layers: list[int], samples: int, width: int) -> float:
    """Its cost without communication."""
    times = _stage_seconds(question, mixtures, layers, samples)
    return (-(-question.global_batch // (samples * width)) - 1) * max(times) + sum(times)


def _placed(question: Question, mixtures: list[Mixture]) -> list[list[tuple[int, ...]]] | None:
    """Ranks of all replicas, each on one machine, first come first served; None where machines are too much cut up."""
    free: dict[int, dict[int, list[int]]] = {}
    for device_type, ranks in enumerate(question.ranks):
        for rank in ranks:
            free.setdefault(device_type, {}).setdefault(question.machine_of[rank], []).append(rank)
    stages = []
    for mixture in mixtures:
        own: list[tuple[int, ...]] = []
        for device_type, tp, number in mixture:
            for _ in range(number):
                machine = next((ranks for ranks in free[device_type].values() if len(ranks) >= tp), None)
                if machine is None:
                    return None
                own.append(tuple(machine[:tp]))
                del machine[:tp]
        stages.append(own)
    return stages


def _sailor_cost(
    question: Question, replicas: list[list[tuple[int, ...]]], mixtures: list[Mixture],
    layers: list[int], samples: int, width: int,
) -> float:  # fmt: skip
    times, last = _stage_seconds(question, mixtures, layers, samples), len(layers) - 1
    turns = -(-question.global_batch // (samples * width))
    seconds, slowest, summed = sum(times), 0.0, 0.0
    for index, (own, mixture) in enumerate(zip(replicas, mixtures, strict=True)):
        message = 0.0
        if index < last:
            ends = {(a[0], b[0]) for a, b in zip(own, replicas[index + 1], strict=True)}
            message = question.hidden_bytes(samples) / min(question.link_of(list(pair)) for pair in ends)
            seconds += 2 * message
        slowest = max(slowest, times[index] + message)
        if width > 1:
            held = question.parameters(layers[index], index == 0, index == last) * question.width
            held /= min(tp for _, tp, _ in mixture)
            link = question.link_of([rank for ranks in own for rank in ranks])
            summed = max(summed, 2 * (width - 1) / width * held / link)
    return seconds + (turns - 1) * slowest + summed
