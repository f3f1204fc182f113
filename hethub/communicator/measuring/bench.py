"""Times of bridged, native and flat communication in a connected world: what `hethub bench comm` prints."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from hethub.communicator.counters import since
from hethub.communicator.joining.islands import lower_bound_bridge_elements
from hethub.communicator.measuring.bound import bound_call, wire_bytes
from hethub.communicator.torch_private import all_gather_single, reduce_scatter_single
from hethub.communicator.world import World

DEFAULT_SIZES = (4096, 1 << 20, 16 << 20, 64 << 20)


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One operation at one size: the slowest rank's median time and its algorithm bandwidth."""

    operation: str
    path: str
    ranks: int
    bytes: int
    seconds: float
    bytes_per_second: float
    bridge_bytes: int
    bridge_bytes_over_bound: float | None
    """Over the least an all-reduce can send, in the world's wire."""
    bound_seconds: float | None
    """Median seconds in which the same relays, doing nothing else, move those least bytes."""
    legs: dict[str, float]
    """Mean seconds per call that rank 0 felt in each leg; empty for native and flat paths."""


def run(world: World, sizes: Sequence[int] = DEFAULT_SIZES, repeats: int = 5) -> list[dict[str, Any]]:
    """A row per operation, path and size in bytes, the same on every rank.

    Paths: "world" is the default group (bridged where there are several islands), "island" this rank's native group,
    "flat" one Gloo group over all ranks on host tensors. Every rank of the world calls it.
    """
    rows = []
    flat = dist.new_group(list(range(world.size)), backend="gloo")
    for size in sizes:
        for name, call in _operations(world, world.default_group, size, world.device.torch_device).items():
            bound = _bound(world, size, repeats) if name == "all_reduce" else None
            rows.append(_row(world, name, "world", range(world.size), size, repeats, call, bound))
        for island in world.islands:
            group = world.group(island)
            if len(island) > 1:
                calls = _operations(world, group, size, world.device.torch_device) if group is not None else {}
                rows.append(_row(world, "all_reduce", "island", island, size, repeats, calls.get("all_reduce")))
        for name, call in _operations(world, flat, size, torch.device("cpu")).items():
            rows.append(_row(world, name, "flat", range(world.size), size, repeats, call))
        if world.size > 1:
            rows.append(_row(world, "send_receive", "world", range(world.size), size, repeats, _ring(world, size)))
    return [asdict(row) for row in rows]


def _operations(
    world: World, group: dist.ProcessGroup | None, size: int, device: torch.device
) -> dict[str, Callable[[], None]]:
    members = dist.get_world_size(group)
    part = max(1, size // 4 // members)
    whole = torch.ones(part * members, device=device)
    piece = torch.ones(part, device=device)
    return {
        "all_reduce": lambda: _wait(dist.all_reduce(whole, group=group, async_op=True)),
        "all_gather": lambda: _wait(all_gather_single(whole, piece, group=group, async_op=True)),
        "reduce_scatter": lambda: _wait(reduce_scatter_single(piece, whole, group=group, async_op=True)),
    }


def _ring(world: World, size: int) -> Callable[[], None]:
    """Every rank sends to the next and receives from the one before."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    # Else each rank's first receive would wait for the one before it, all the way round.
    world.connect_messages([after], [before])
    sent = torch.ones(max(1, size // 4), device=world.device.torch_device)
    received = torch.empty_like(sent)

    def call() -> None:
        work = world.receive(received, before, tag=1)
        sending = world.send(sent, after, tag=1)
        work.wait()
        sending.wait()

    return call


def _wait(work: Any) -> None:
    work.wait()


def _row(
    world: World,
    name: str,
    path: str,
    ranks: Sequence[int],
    size: int,
    repeats: int,
    call: Callable[[], None] | None,
    bound_seconds: float | None = None,
) -> BenchRow:
    """Times `call` on the ranks that have one; all ranks take part in the exchange of results."""
    world.barrier()
    counters, before = world.counters(), _bridge_bytes(world)
    seconds = _timed(world, call, repeats) if call is not None else []
    sent = (_bridge_bytes(world) - before) // (repeats + 1)
    legs = _legs(since(counters, world.counters())) if path == "world" else {}
    of_ranks = world.all_gather_objects({"seconds": seconds, "sent": sent, "legs": legs})
    median = _slowest([r["seconds"] for r in of_ranks if r["seconds"]])
    total_sent = sum(r["sent"] for r in of_ranks)
    least = (
        lower_bound_bridge_elements(world.islands, wire_bytes(world, size))
        if name == "all_reduce" and path == "world"
        else 0
    )
    return BenchRow(
        operation=name,
        path=path,
        ranks=len(ranks),
        bytes=size,
        seconds=median,
        bytes_per_second=size / median,
        bridge_bytes=total_sent,
        bridge_bytes_over_bound=total_sent / least if least else None,
        bound_seconds=bound_seconds,
        legs=of_ranks[0]["legs"],
    )


def _timed(world: World, call: Callable[[], None], repeats: int) -> list[float]:
    """Seconds of each repeat but the first, which connects and warms up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        world.device.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _slowest(of_ranks: Sequence[Sequence[float]]) -> float:
    """The median over repeats of the slowest rank's time."""
    return statistics.median(max(times) for times in zip(*of_ranks, strict=True))


def _bound(world: World, size: int, repeats: int) -> float | None:
    """Seconds of the bridge alone; None where there is none."""
    if len(world.islands) == 1:
        return None
    call = bound_call(world, size)
    world.barrier()
    return _slowest(world.all_gather_objects(_timed(world, call, repeats)))


def _legs(news: dict[str, Any]) -> dict[str, float]:
    """Seconds per call in each leg, over the bridged operations counted."""
    rows = [row for row in news["operations"] if row["legs"]]
    calls = sum(row["calls"] for row in rows)
    names = sorted({leg for row in rows for leg in row["legs"]})
    return {leg: sum(row["legs"].get(leg, 0.0) for row in rows) / calls for leg in names}


def _bridge_bytes(world: World) -> int:
    return sum(link["bytes"] for link in world.counters()["links"] if link["level"] == "bridge")
