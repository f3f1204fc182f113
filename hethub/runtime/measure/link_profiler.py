"""Measures links: latency and bandwidth inside nodes, between nodes and between islands."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import World
from hethub.predictor.cost.profile import LinkTiming

SMALL_BYTES, LARGE_BYTES = 4 * 2**10, 16 * 2**20
REPEATS = 5

Level = Literal["in_node", "between_nodes", "between_islands"]


def measure_links(world: World, machines: Sequence[int]) -> list[LinkTiming]:
    """Latency and bandwidth of one pair and one group per level; `machines[rank]` is the machine a rank is on.

    Every rank calls it and returns the same figures.
    """
    links = []
    for level, ranks in _pairs(world, machines).items():
        links.append(_send(world, level, *ranks))
    for level, members in _groups(world, machines).items():
        links.append(_all_reduce(world, level, members))
    return links


def _level(world: World, machines: Sequence[int], a: int, b: int) -> Level:
    if world.island_of(a) != world.island_of(b):
        return "between_islands"
    return "in_node" if machines[a] == machines[b] else "between_nodes"


def _pairs(world: World, machines: Sequence[int]) -> dict[Level, tuple[int, int]]:
    """The first two ranks at every level that occurs."""
    found: dict[Level, tuple[int, int]] = {}
    for a in range(world.size):
        for b in range(a + 1, world.size):
            found.setdefault(_level(world, machines, a, b), (a, b))
    return found


def _groups(world: World, machines: Sequence[int]) -> dict[Level, tuple[int, ...]]:
    """A group per level that lies on it and on none further out."""
    found: dict[Level, tuple[int, ...]] = {}
    for island in world.islands:
        on_first = tuple(rank for rank in island if machines[rank] == machines[island[0]])
        if len(on_first) > 1:
            found.setdefault("in_node", on_first)
        if len(on_first) < len(island):
            found.setdefault("between_nodes", island)
    if len(world.islands) > 1:
        found["between_islands"] = tuple(range(world.size))
    return found


def _send(world: World, level: Level, a: int, b: int) -> LinkTiming:
    """A message there and back, halved."""

    def bounce(buffer: Tensor) -> None:
        first, second = (world.send, world.receive) if world.rank == a else (world.receive, world.send)
        peer = b if world.rank == a else a
        first(buffer, peer, 1).wait()
        second(buffer, peer, 2).wait()

    small, large = (_timed(world, (a, b), num_bytes, bounce) / 2 for num_bytes in (SMALL_BYTES, LARGE_BYTES))
    return _link(level, "send", small, large, LARGE_BYTES, 2)


def _all_reduce(world: World, level: Level, members: tuple[int, ...]) -> LinkTiming:
    group = world.group(members)
    small, large = (
        _timed(world, members, num_bytes, lambda buffer: dist.all_reduce(buffer, group=group))
        for num_bytes in (SMALL_BYTES, LARGE_BYTES)
    )
    carried = 2 * LARGE_BYTES * (len(members) - 1) / len(members)
    return _link(level, "all_reduce", small, large, carried, len(members))


def _link(
    level: Level, operation: Literal["send", "all_reduce"], small: float, large: float, carried: float, ranks: int
) -> LinkTiming:
    rate = carried / max(large - small, 1e-9) / 1e9
    return LinkTiming(level=level, operation=operation, latency_seconds=small, gbytes_per_second=rate, ranks=ranks)


def _timed(world: World, members: Iterable[int], num_bytes: int, run: Callable[[Tensor], object]) -> float:
    """The median seconds of `run` on the slowest member, the same figure on every rank; others wait."""
    times = [0.0]
    if world.rank in members:
        buffer = torch.zeros(num_bytes // 4, device=world.device.torch_device)
        run(buffer)  # from here on all members are there
        times = []
        for _ in range(REPEATS):
            start = perf_counter()
            run(buffer)
            world.device.synchronize()
            times.append(perf_counter() - start)
    return max(world.all_gather_objects(median(times)))
