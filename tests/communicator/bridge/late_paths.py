"""Every way that a device's tensors take, on late devices (`tests.support.late`): results, whatever the device's order.

`run_paths` is what ranks run; it raises where a result is wrong. Inputs are made by the device shortly before each
operation, and what was only handed over is let go at once, so that an event, a wait or a kept tensor that is missing
shows as poison.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hethub.communicator import Rendezvous, all_gather_by_ranges, connect, reduce_scatter_by_ranges
from hethub.communicator.bridge.chunks import Tuning
from hethub.runtime.memory.host_arena import HostArena
from hethub.spec.errors import RunFailed
from hethub.spec.ranges import from_sizes
from tests.support.late import device as late
from tests.support.late.mutants import Mutant, apply

SIZE = 3
ISLANDS = [[0, 1], [2]]
MANY_CHUNKS = Tuning(chunk_bytes=2500, unchunked_bytes=2500, small_bytes=600, lag=2)
LARGE, SMALL = 1201, 40


class Paths:
    """One rank's part in all paths of one seed."""

    def __init__(self, world: Any, other: Any, seed: int) -> None:
        self.world, self.other, self.seed, self.rank = world, other, seed, world.rank
        self.place = world.device.torch_device

    def values(self, rank: int, size: int) -> Tensor:
        """Small enough for their sums to be exact in bf16."""
        return torch.arange(float(size)).remainder_(13) + 3 * rank + self.seed % 8

    def made(self, size: int) -> Tensor:
        """This rank's values, as a result the device has still to compute."""
        late.fall_behind(0.001)
        return self.values(self.rank, size).to(self.place) * 2 - self.values(self.rank, size).to(self.place)

    def total(self, size: int) -> Tensor:
        return sum((self.values(rank, size) for rank in range(SIZE)), torch.zeros(size))

    def check(self, what: str, found: Tensor, expected: Tensor) -> None:
        """Used by the device first, as a model would."""
        found = (found * 1).cpu()
        if not torch.equal(found, expected):
            raise AssertionError(f"{what}, seed {self.seed}, rank {self.rank}: {found} instead of {expected}")

    def churn(self) -> None:
        """Takes and frees memory of the sizes in use, on this thread's stream, which is late with it."""
        late.fall_behind(0.002)
        for size in (LARGE, SMALL):
            torch.full((size,), -1.0, device=self.place)

    def reduce(self) -> None:
        for size in (LARGE, SMALL):
            tensor = self.made(size)
            work = dist.all_reduce(tensor, async_op=True)
            self.churn()
            work.wait()
            self.check("all_reduce", tensor, self.total(size))
        strided = torch.full((LARGE, 2), -1.0, device=self.place)[:, 0].copy_(self.made(LARGE))
        dist.all_reduce(strided, op=torch.distributed._make_nccl_premul_sum(0.5))
        self.check("all_reduce, scaled and strided", strided, 0.5 * self.total(LARGE))
        tensor = self.made(LARGE)
        dist.reduce(tensor, 1)
        self.check("reduce", tensor, self.total(LARGE) if self.rank == 1 else self.values(self.rank, LARGE))

    def several_groups(self) -> None:
        """Two groups that share an island's devices, and operations waited for in reverse."""
        tensors = [self.made(LARGE) for _ in range(4)]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for tensor, group in zip(tensors, [self.other, None] * 2, strict=True)
        ]
        for work, tensor in reversed(list(zip(works, tensors, strict=True))):
            work.wait()
            self.check("all_reduce", tensor, self.total(LARGE))

    def by_ranges(self) -> None:
        for sizes in ([LARGE, 0, 500], [1, 900, 300]):
            ranges = from_sizes(sizes)
            own, whole = ranges[self.rank], sum(sizes)
            flat, share = self.made(whole), torch.empty(own.size, device=self.place)
            reduce_scatter_by_ranges(self.world.default_group, flat, ranges, share).wait()
            self.check("reduce_scatter", share, self.total(whole)[own.start : own.stop])
            reduce_scatter_by_ranges(self.world.default_group, flat, ranges).wait()
            self.check("reduce_scatter in place", flat[own.start : own.stop], self.total(whole)[own.start : own.stop])
            gathered = torch.full((whole,), -1.0, device=self.place)
            gathered[own.start : own.stop].copy_(share)
            work = all_gather_by_ranges(self.world.default_group, gathered, ranges)
            self.churn()
            work.wait()
            self.check("all_gather", gathered, self.total(whole))

    def copies(self) -> None:
        tensor = self.made(LARGE)
        dist.broadcast(tensor, 2)
        self.check("broadcast", tensor, self.values(2, LARGE))
        gathered = [torch.empty(SMALL, device=self.place) for _ in range(SIZE)]
        dist.all_gather(gathered, self.made(SMALL))
        for rank, each in enumerate(gathered):
            self.check("all_gather", each, self.values(rank, SMALL))
        exchanged = torch.empty(3 * SMALL, device=self.place)
        dist.all_to_all_single(exchanged, self.made(3 * SMALL))
        pieces = [self.values(rank, 3 * SMALL)[self.rank * SMALL :][:SMALL] for rank in range(SIZE)]
        self.check("all_to_all", exchanged, torch.cat(pieces))
        scattered = torch.empty(SMALL, device=self.place)
        rows = [self.made(SMALL) + rank for rank in range(SIZE)] if self.rank == 1 else None
        dist.scatter(scattered, rows, src=1)
        self.check("scatter", scattered, self.values(1, SMALL) + self.rank)

    def messages(self) -> None:
        following, before = (self.rank + 1) % SIZE, (self.rank - 1) % SIZE
        for size in (LARGE, SMALL):
            late.fall_behind(0.01)  # the message may be there before the tensor is free for it
            received = torch.full((size,), -1.0, device=self.place)
            arrival = self.world.receive(received, before, tag=size)
            sending = self.world.send(self.made(size), following, tag=size)
            self.churn()
            arrival.wait()
            self.check("message", received, self.values(before, size))
            columns = torch.full((size, 2), -1.0, device=self.place)[:, 1]
            arrival = self.world.receive(columns, before, tag=size)
            other = self.world.send(torch.stack([self.made(size)] * 2).t()[:, 0], following, tag=size)
            arrival.synchronize() if size == LARGE else arrival.block_current_stream()
            self.check("strided message", columns, self.values(before, size))
            sending.wait()
            other.wait()

    def offload(self) -> None:
        """State in host memory, stored and brought back again and again in the same buffers."""
        if self.place.type == "cpu":
            return
        arena = HostArena(self.world.device)
        host = arena.empty(LARGE, torch.float32)
        into = torch.empty(LARGE, device=self.place)
        for step in range(3):
            arena.store(host, self.made(LARGE) + step)
            self.churn()
            fetched = arena.fetch(host, into if step else None).wait()
            self.check("fetched", fetched, self.values(self.rank, LARGE) + step)
            into.fill_(-1.0)
            arena.fetch(host, into).wait()
            self.check("fetched into", into, self.values(self.rank, LARGE) + step)
            del fetched
            arena.fetch(host)  # not wanted after all, while the copy is still to come
            others = [self.made(LARGE) + 1 for _ in range(3)]
            for other in others:
                self.check("memory that a copy was still to come to", other, self.values(self.rank, LARGE) + 1)
            arena.store(host, self.made(LARGE) - step)
            arena.synchronize()
            assert torch.equal(host, self.values(self.rank, LARGE) - step), "stored"


PATHS: tuple[Callable[[Paths], None], ...] = (
    Paths.reduce,
    Paths.several_groups,
    Paths.by_ranges,
    Paths.copies,
    Paths.messages,
    Paths.offload,
)


def run_paths(
    rank: int,
    store: Any,
    late_ranks: Sequence[int],
    seeds: Sequence[int],
    relay: str = "auto",
    wire: str = "exact",
    mutant: Mutant | None = None,
) -> int:
    """How many seeds went right: all, or it raises. A mutant lacks one event, wait or record."""
    device = late.install() if rank in late_ranks else None
    rendezvous = Rendezvous.on_one_host(store, rank, SIZE)
    world = connect(rendezvous, device=device, islands=ISLANDS, relay=relay, wire=wire, timeout_seconds=30)
    other = dist.new_group([0, 1, 2], backend="hethub")
    for bridge in world._context._bridges.values():
        bridge._tuning = MANY_CHUNKS
    if mutant is not None:
        apply(mutant)
    with torch.no_grad():
        for seed in seeds:
            late.reseed(seed * SIZE + rank)
            for path in PATHS:
                path(Paths(world, other, seed))
    if device is not None:
        device.synchronize()
    world.close()
    assert all(native.ended == "shut down" for native in late.natives)
    assert len(late.natives) == (2 if rank in late_ranks and rank < 2 else 0)
    return len(seeds)


def give_up(rank: int, store: Any) -> list[str]:
    """How the island's libraries end when a rank gives the world up."""
    rendezvous = Rendezvous.on_one_host(store, rank, SIZE)
    world = connect(rendezvous, device=late.install(), islands=ISLANDS, timeout_seconds=30)
    dist.all_reduce(torch.ones(40).to("late:0"))
    world.barrier()
    if rank == 2:
        world.abort("on purpose")
    with contextlib.suppress(RunFailed):
        world.receive(torch.empty(1), (rank + 1) % SIZE, tag=99).wait()
    world.close()
    deadline = time.monotonic() + 20
    while not all(native.ended for native in late.natives) and time.monotonic() < deadline:
        time.sleep(0.01)  # another thread gives up what this one has left
    return [native.ended for native in late.natives]
