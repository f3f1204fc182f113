"""Samples for replicas of unlike speed: the exact integer division of a batch with the earliest finish, and its end."""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np


class Worker(NamedTuple):
    """A replica's micro-batch and its seconds per microbatch of 1, 2, … micro_batch samples (index 0 is one sample)."""

    micro_batch: int
    microbatch_seconds: tuple[float, ...]

    def seconds(self, samples: int) -> float:
        """Seconds of `samples`, the last microbatch perhaps short."""
        whole, rest = divmod(samples, self.micro_batch)
        return whole * self.microbatch_seconds[-1] + (self.microbatch_seconds[rest - 1] if rest else 0.0)

    def within(self, seconds: float) -> int:
        """The most samples that end within `seconds`."""
        whole = int(seconds / self.microbatch_seconds[-1] + 1e-9)
        rest = bisect_left(self.microbatch_seconds, seconds - whole * self.microbatch_seconds[-1] + 1e-12)
        return whole * self.micro_batch + rest


def earliest_finish(total: int, per_sample: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """[case]: when the last replica ends, `total` whole samples divided best, each replica having one at least;
    `numbers` [sort] or [case, sort] of like replicas, 0 where a case has none, need `per_sample` [case, sort] seconds:
    parts of a microbatch are taken as proportional. At most a millionth of the slowest's one sample too late."""
    low = total / (numbers / per_sample).sum(axis=1)
    slowest = np.where(numbers > 0, per_sample, 0.0).max(axis=1)
    high = low + slowest  # time for one more sample on everyone
    for _ in range(20):
        middle = (low + high) / 2
        done = (numbers * np.maximum(1, within(middle, per_sample))).sum(axis=1) >= total
        high, low = np.where(done, middle, high), np.where(done, low, middle)
    return np.maximum(high, slowest)


def within(seconds: np.ndarray, per_sample: np.ndarray) -> np.ndarray:
    """[case, sort]: the samples that a replica ends in time."""
    return np.floor(seconds[:, None] / per_sample + 1e-9)


def one_moved(numbers: Sequence[int], least: float = float("-inf")) -> Iterator[tuple[int, ...]]:
    """The numbers with one taken from one of them, which keeps the least, and given to another."""
    for giver, taker in permutations(range(len(numbers)), 2):
        if numbers[giver] > least:
            yield tuple(x - (i == giver) + (i == taker) for i, x in enumerate(numbers))


def divide(total: int, workers: Sequence[Worker], least: int = 1) -> list[int]:
    """Samples per worker, each at least one, that sum to `total` with the smallest largest finishing time.

    There are no more workers than samples. Each has `least` (a micro-batch that is given) where there are so many.
    Equal workers get equal counts where the rest allows, so that replicas stay alike. The smallest deadline that all
    samples meet is found by bisection; what it has room for beyond `total` is taken from the workers that finish last.
    """
    count = len(workers)
    assert count <= total, f"{total} samples for {count} replicas"
    if len(set(workers)) == 1:
        share, rest = divmod(total, count)
        return [share + (index < rest) for index in range(count)]
    least = min(least, total // count)
    alike = Counter(workers)
    low, high = 0.0, max(worker.seconds(total) for worker in alike)
    for _ in range(60):
        middle = (low + high) / 2
        if sum(number * max(least, worker.within(middle)) for worker, number in alike.items()) >= total:
            high = middle
        else:
            low = middle
        if high - low < 1e-9 * high:
            break
    most = {worker: max(least, worker.within(high)) for worker in alike}
    counts = [most[worker] for worker in workers]
    return _take_back(counts, workers, sum(counts) - total, least)


def _take_back(counts: list[int], workers: Sequence[Worker], surplus: int, least: int) -> list[int]:
    """Removes `surplus` samples one at a time from whoever would finish last and has more than the least."""
    queue = [(-worker.seconds(counts[i]), i) for i, worker in enumerate(workers) if counts[i] > least]
    heapq.heapify(queue)
    while surplus > 0:
        _, index = heapq.heappop(queue)
        counts[index] -= 1
        surplus -= 1
        if counts[index] > least:
            heapq.heappush(queue, (-workers[index].seconds(counts[index]), index))
    return counts
