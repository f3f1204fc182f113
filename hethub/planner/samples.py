"""Samples for replicas of unlike speed: the exact integer division of a batch with the earliest finish."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Worker(NamedTuple):
    """A replica's micro-batch and its seconds per tile of 1, 2, … micro_batch samples (index 0 is one sample)."""

    micro_batch: int
    tile_seconds: tuple[float, ...]

    def seconds(self, samples: int) -> float:
        """Seconds of `samples`, the last tile perhaps short."""
        whole, rest = divmod(samples, self.micro_batch)
        return whole * self.tile_seconds[-1] + (self.tile_seconds[rest - 1] if rest else 0.0)

    def within(self, seconds: float) -> int:
        """The most samples that end within `seconds`."""
        whole = int(seconds / self.tile_seconds[-1] + 1e-9)
        rest = bisect_left(self.tile_seconds, seconds - whole * self.tile_seconds[-1] + 1e-12)
        return whole * self.micro_batch + min(rest, self.micro_batch - 1)


def earliest_finish(total: int, counts: Sequence[tuple[Worker, int]]) -> float:
    """When the last of several sorts of workers, `count` of each, ends `total` samples divided best, each having one."""
    if len(counts) == 1:
        worker, count = counts[0]
        return worker.seconds(-(-total // count))

    def done(seconds: float) -> int:
        return sum(count * max(1, worker.within(seconds)) for worker, count in counts)

    low, high = 0.0, total / sum(count * worker.micro_batch / worker.tile_seconds[-1] for worker, count in counts)
    while done(high) < total:
        high *= 1.1
    for _ in range(34):
        middle = (low + high) / 2
        if done(middle) >= total:
            high = middle
        else:
            low = middle
    return max(high, *(worker.seconds(1) for worker, _ in counts))


def divide(total: int, workers: Sequence[Worker]) -> list[int]:
    """Samples per worker, each at least one, that sum to `total` with the smallest largest finishing time.

    There are no more workers than samples. Equal workers get equal counts where the rest allows, so that
    replicas stay alike. The smallest deadline that all samples meet is found by bisection; what it has room for beyond
    `total` is taken from the workers that finish last.
    """
    count = len(workers)
    assert count <= total, f"{total} samples for {count} replicas"
    if len(set(workers)) == 1:
        share, rest = divmod(total, count)
        return [share + (index < rest) for index in range(count)]
    alike = Counter(workers)
    low, high = 0.0, max(worker.seconds(total) for worker in alike)
    for _ in range(60):
        middle = (low + high) / 2
        if sum(number * max(1, worker.within(middle)) for worker, number in alike.items()) >= total:
            high = middle
        else:
            low = middle
        if high - low < 1e-9 * high:
            break
    most = {worker: max(1, worker.within(high)) for worker in alike}
    counts = [most[worker] for worker in workers]
    return _take_back(counts, workers, sum(counts) - total)


def _take_back(counts: list[int], workers: Sequence[Worker], surplus: int) -> list[int]:
    """Removes `surplus` samples one at a time from whoever would finish last and has more than one."""
    import heapq

    queue = [(-worker.seconds(counts[i]), i) for i, worker in enumerate(workers) if counts[i] > 1]
    heapq.heapify(queue)
    while surplus > 0:
        _, index = heapq.heappop(queue)
        counts[index] -= 1
        surplus -= 1
        if counts[index] > 1:
            heapq.heappush(queue, (-workers[index].seconds(counts[index]), index))
    return counts
