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
from hethub.communicator.bridge import messages
from hethub.communicator.bridge.chunks import Tuning
from hethub.communicator.relays import shm
from hethub.runtime.memory.host_arena import HostArena
from hethub.spec.errors import RunFailed
from hethub.spec.ranges import from_sizes
from tests.support.late import device as late
from tests.support.late.mutants import Mutant, apply
from tests.support.late.tensor import near

SIZE = 3
ISLANDS = [[0, 1], [2]]
MANY_CHUNKS = Tuning(chunk_bytes=2500, small_bytes=600, lag=2)
LARGE, SMALL = 1201, 40
AWARE = "gloo, which takes device memory"


class Paths:
    """One rank's part in all paths of one seed."""

    def __init__(self, world: Any, other: Any, island: Any, seed: int) -> None:
        self.world, self.other, self.island, self.seed = world, other, island, seed
        self.rank, self.size = world.rank, world.size
        self.place = world.device.torch_device

    def values(self, rank: int, size: int) -> Tensor:
        """Small enough for their sums to be exact in bf16."""
        return torch.arange(float(size)).remainder_(13) + 3 * rank + self.seed % 8

    def made(self, size: int) -> Tensor:
        """This rank's values, as a result the device has still to compute."""
        late.fall_behind(0.001)
        return self.values(self.rank, size).to(self.place) * 2 - self.values(self.rank, size).to(self.place)

    def total(self, size: int) -> Tensor:
        return sum((self.values(rank, size) for rank in range(self.size)), torch.zeros(size))

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

    def native_between(self) -> None:
        """The island's own group at work while operations over islands are under way."""
        for size in (LARGE, SMALL):
            ranges = from_sizes([size, 0, 0])
            summed, scattered, gathered = self.made(size), self.made(size), self.made(size)
            works = [dist.all_reduce(summed, async_op=True)]
            own = [self.native_sum(size)]
            works.append(reduce_scatter_by_ranges(self.world.default_group, scattered, ranges))
            own.append(self.native_sum(size))
            works.append(all_gather_by_ranges(self.world.default_group, gathered, ranges))
            own.append(self.native_sum(size))
            for work in works:
                work.wait()
            self.check("all_reduce", summed, self.total(size))
            self.check("all_gather", gathered, self.values(0, size))
            for tensor in own:
                self.check("native sum", tensor, self.values(0, size) + self.values(1, size))

    def native_sum(self, size: int) -> Tensor:
        if self.rank == 2:
            return self.values(0, size) + self.values(1, size)
        late.dawdle(0.01)
        tensor = self.made(size)
        dist.all_reduce(tensor, group=self.island)
        return tensor

    def by_ranges(self) -> None:
        for sizes in ([LARGE, 0, 500], [1, 900, 300]):
            sizes += [0] * (self.size - len(sizes))
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
        for root in (1, 2):
            tensor = self.made(LARGE)
            dist.broadcast(tensor, root)
            self.check("broadcast", tensor, self.values(root, LARGE))
        gathered = [torch.empty(SMALL, device=self.place) for _ in range(self.size)]
        dist.all_gather(gathered, self.made(SMALL))
        for rank, each in enumerate(gathered):
            self.check("all_gather", each, self.values(rank, SMALL))
        exchanged = torch.empty(self.size * SMALL, device=self.place)
        dist.all_to_all_single(exchanged, self.made(self.size * SMALL))
        pieces = [self.values(rank, self.size * SMALL)[self.rank * SMALL :][:SMALL] for rank in range(self.size)]
        self.check("all_to_all", exchanged, torch.cat(pieces))
        for size in (SMALL, LARGE):
            scattered = torch.empty(size, device=self.place)
            rows = [self.made(size) + rank for rank in range(self.size)] if self.rank == 1 else None
            dist.scatter(scattered, rows, src=1)
            self.check("scatter", scattered, self.values(1, size) + self.rank)
            collected = [
                torch.full((size,), -1.0, device=self.place) for _ in range(self.size if self.rank == 1 else 0)
            ]
            dist.gather(self.made(size), collected or None, dst=1)
            for rank, each in enumerate(collected):
                self.check("gather", each, self.values(rank, size))
        columns = torch.full((self.size * LARGE, 2), -1.0, device=self.place)[:, 1]
        dist.all_to_all_single(columns, torch.stack([self.made(self.size * LARGE)] * 2).t()[:, 0])
        pieces = [self.values(rank, self.size * LARGE)[self.rank * LARGE :][:LARGE] for rank in range(self.size)]
        self.check("all_to_all, strided", columns, torch.cat(pieces))

    def wait_elsewhere(self, arrival: Any) -> None:
        """As a stream that is not the one on which the message was asked for, whose allocator goes on meanwhile."""
        stream = self.world.device.new_stream()
        with stream.active():
            late.fall_behind(0.01)
            arrival.block_current_stream()
        self.churn()
        self.world.device.current_stream().wait(stream.record())

    def messages(self) -> None:
        """Both ways round a ring, so inside the island and over the bridge."""
        for step in (1, -1):
            following, before = (self.rank + step) % SIZE, (self.rank - step) % SIZE
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
                other = self.world.send(torch.stack([self.made(size) + 1] * 2).t()[:, 0], following, tag=size)
                self.churn()
                if size == LARGE:
                    arrival.synchronize()
                else:
                    self.wait_elsewhere(arrival)
                self.check("strided message", columns, self.values(before, size) + 1)
                sending.wait()
                other.wait()

    def messages_of_a_group(self) -> None:
        """torch's own: staged whole."""
        received = torch.full((LARGE,), -1.0, device=self.place)
        arrival = dist.irecv(received, (self.rank - 1) % SIZE, tag=3)
        sending = dist.isend(self.made(LARGE), (self.rank + 1) % SIZE, tag=3)
        self.churn()
        arrival.wait()
        self.check("message of a group", received, self.values((self.rank - 1) % SIZE, LARGE))
        sending.wait()

    def messages_under_way(self) -> None:
        """Several over the bridge at a time, asked for in another order than sent, in memory used before; both ways."""
        if self.rank == 0:
            return
        peer, sizes = 3 - self.rank, (LARGE, SMALL, LARGE + 1)
        late.fall_behind(0.01)
        places = {size: torch.full((size,), -1.0, device=self.place) for size in sizes}
        arrivals = {size: self.world.receive(places[size], peer, tag=size) for size in reversed(sizes)}
        sends = [self.world.send(self.made(size), peer, tag=size) for size in sizes]
        self.churn()
        for size in (SMALL, LARGE, LARGE + 1):
            arrivals[size].wait()
            self.check("message of several", places[size], self.values(peer, size))
        for sending in sends:
            sending.wait()

    def barrier(self) -> None:
        store, came = self.world._context.rendezvous.store, f"came/{self.seed}"
        if self.rank == self.seed % SIZE:
            time.sleep(0.005)
        store.add(came, 1)
        dist.barrier()
        if store.add(came, 0) != SIZE:
            raise AssertionError(f"barrier left before all had come, seed {self.seed}, rank {self.rank}")

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
    Paths.native_between,
    Paths.by_ranges,
    Paths.copies,
    Paths.messages,
    Paths.messages_under_way,
    Paths.messages_of_a_group,
    Paths.barrier,
    Paths.offload,
)


LARGER_ISLAND = [[0, 1, 2], [3]]
"""Where shares are more unlike than padding allows, so that each is reduced and broadcast by itself."""
PATHS_OF_SHARES = (Paths.reduce, Paths.by_ranges, Paths.copies)


def take_device_memory(world: Any) -> None:
    """From here on relays move device memory themselves, as a GPU-aware MPI: at once, whatever the device still has to
    do."""
    for relay in world._context._distinct_relays():
        relay.takes_device_memory, move = True, relay._over_lanes
        relay._over_lanes = lambda lanes, start, tensor, *rest, move=move: move(lanes, start, near(tensor), *rest)


def run_paths(
    rank: int,
    store: Any,
    late_ranks: Sequence[int],
    seeds: Sequence[int],
    relay: str = "auto",
    wire: str = "exact",
    mutant: Mutant | None = None,
    paths: Sequence[Callable[[Paths], None]] = PATHS,
    islands: Sequence[Sequence[int]] = ISLANDS,
) -> int:
    """How many seeds went right: all, or it raises. A mutant lacks one event, wait or record."""
    device = late.install() if rank in late_ranks else None
    shm._INLINE_BYTES = 256  # so that chunks of this size lie in shared memory
    size = sum(map(len, islands))
    rendezvous = Rendezvous.on_one_host(store, rank, size)
    carried_by = "gloo" if relay == AWARE else relay
    world = connect(rendezvous, device=device, islands=islands, relay=carried_by, wire=wire, timeout_seconds=30)
    if relay == AWARE and device is not None:
        take_device_memory(world)
    other = dist.new_group(list(range(size)), backend="hethub")
    island = dist.new_group([0, 1], backend="hethub")
    others = [peer for peer in range(size) if peer != rank]
    world.connect_messages(others, others)
    for bridge in world._context._bridges.values():
        bridge._tuning = MANY_CHUNKS
    messages._CHUNKS = MANY_CHUNKS
    if mutant is not None:
        apply(mutant)
    with torch.no_grad():
        for seed in seeds:
            late.reseed(seed * size + rank)
            for path in paths:
                path(Paths(world, other, island, seed))
    if device is not None:
        device.synchronize()
    world.close()
    assert all(native.ended in ("shut down", "left to torch") for native in late.natives)
    home = next(island for island in islands if rank in island)
    has_library = rank in late_ranks and len(home) > 1
    # Two groups' legs, each direction of messages with each neighbour, and the group of ranks 0 and 1.
    assert len(late.natives) == (2 + 2 * (len(home) - 1) + (rank < 2) if has_library else 0)
    return len(seeds)


def give_up(rank: int, store: Any) -> list[str]:
    """How the island's libraries end when a rank gives the world up."""
    rendezvous = Rendezvous.on_one_host(store, rank, SIZE)
    world = connect(rendezvous, device=late.install(), islands=ISLANDS, timeout_seconds=30)
    dist.all_reduce(torch.ones(40).to("late:0"))
    with contextlib.suppress(RunFailed):  # rank 2 may have given up before the others have left the barrier
        world.barrier()
        if rank == 2:
            world.abort("on purpose")
        world.receive(torch.empty(1), (rank + 1) % SIZE, tag=99).wait()
    world.close()
    deadline = time.monotonic() + 20
    while not all(native.ended for native in late.natives) and time.monotonic() < deadline:
        time.sleep(0.01)  # another thread gives up what this one has left
    return [native.ended for native in late.natives]
