"""Collectives and messages of the started ranks: right, number for number; and how fast beside what could be."""

from collections.abc import Callable, Iterator, Sequence

import torch

from hethub.communicator import World
from hethub.communicator.measuring import bench
from hethub.runtime.acceptance.collectives import (
    AT_ONCE,
    CPU_NUMEL,
    DEVICE_NUMEL,
    OPERATIONS,
    wrong_alone,
    wrong_at_once,
)
from hethub.runtime.acceptance.patterns import numbers
from hethub.runtime.parity.row import Row
from hethub.spec.cluster import ClusterSpec
from hethub.spec.ranges import show_ranks

NUMEL = 3 * 7 * 1024
LEAST_SHARE = 0.85  # of the bridge's own bound, between devices
DEVICE_SIZES, CPU_SIZES = (4096, 64 << 20), (4096, 1 << 20)
_TAG = 7


def check_exchange(world: World, cluster: ClusterSpec, progress: Callable[[str], None]) -> Iterator[Row]:
    """Return the rows, the same on every rank. All ranks must call it together."""
    numel = DEVICE_NUMEL if any(world.all_gather_objects(world.device.is_gpu)) else CPU_NUMEL
    for label, members in _groups(world):
        progress(f"collectives of {label}")
        group, wrong, wrong_large = world.group(members), [], []
        if group is not None:
            wrong = wrong_alone(group, world, NUMEL * group.size() + 1)  # divides by no group's size
            wrong_large = wrong_at_once(group, world, numel)
        yield _compared(world, "collectives", label, f"{len(OPERATIONS)} compared", wrong)
        large = f"{len(OPERATIONS)} compared, {AT_ONCE} of each at once, {4 * numel / 1e6:.0f} MB"
        yield _compared(world, "large collectives", label, large, wrong_large)
    progress("messages")
    yield _messages(world)
    progress("bandwidth")
    yield from _bandwidth(world, cluster)


def _compared(world: World, what: str, where: str, compared: str, wrong: list[str]) -> Row:
    """The row on which all ranks agree, of what each found `wrong`."""
    found = {name for rank in world.all_gather_objects(wrong) for name in rank}
    return Row(
        what=what, where=where, state="fail" if found else "pass", found=compared,
        reason=f"wrong: {', '.join(sorted(found))}" if found else "",
    )  # fmt: skip


def _groups(world: World) -> Iterator[tuple[str, tuple[int, ...]]]:
    if world.size > 1:
        yield "all ranks" if len(world.islands) == 1 else "all islands, bridged", tuple(range(world.size))
    for number, island in enumerate(world.islands):
        if 1 < len(island) < world.size:
            yield f"island {number}", tuple(island)


def _messages(world: World) -> Row:
    """Every rank to every other, one to each side at a time: all at once, a device's streams would share hardware queues,
    and a send could stand behind a receive that waits for it. What goes one way is not what comes the other, or a rank that is
    given its own message would pass."""
    where, peers = world.device.torch_device, [rank for rank in range(world.size) if rank != world.rank]
    if not peers:
        return Row(what="messages", where="all ranks", state="skipped", reason="one rank alone sends none")
    world.connect_messages(peers, peers)  # all at once they would wait for each other's connections in a circle
    received = {peer: torch.empty(NUMEL, device=where) for peer in peers}
    for distance in range(1, world.size):
        source, target = (world.rank - distance) % world.size, (world.rank + distance) % world.size
        receiving = world.receive(received[source], source, _TAG)
        sending = world.send(numbers(world, world.rank, NUMEL, target), target, _TAG)
        receiving.wait()
        sending.wait()
    wrong = [peer for peer, got in received.items() if not torch.equal(got, numbers(world, peer, NUMEL, world.rank))]
    told = [f"{peer} to {rank}" for rank, own in enumerate(world.all_gather_objects(wrong)) for peer in own]
    return Row(
        what="messages", where="all ranks", state="fail" if told else "pass", found=f"{world.size * len(peers)} compared",
        reason=f"wrong: {', '.join(told)}" if told else "",
    )  # fmt: skip


def _bandwidth(world: World, cluster: ClusterSpec) -> Iterator[Row]:
    devices = world.all_gather_objects(world.device.is_gpu)
    on_devices, held = any(devices), all(devices)  # CPUs add with the core that moves what others send them
    sizes = DEVICE_SIZES if on_devices else CPU_SIZES
    islands = iter([island for island in world.islands if len(island) > 1])  # as they are timed
    for row in bench.run(world, sizes):
        if row["bytes"] != sizes[-1] or row["path"] == "flat":
            continue
        rate, bound = row["bytes_per_second"] / 1e9, row["bound_seconds"]
        figures = {"gbytes_per_second": rate}
        what = f"{row['operation']} of {row['bytes'] >> 20} MiB"
        if bound is None:
            island = next(islands) if row["path"] == "island" else None
            where = "all ranks" if island is None else f"island of ranks {show_ranks(island)}"
            yield _against_link(what, where, rate, _link_gbytes(cluster, island or ()), row, figures)
            continue
        share = bound / row["seconds"]
        figures["share_of_bound"] = share
        slow = share < LEAST_SHARE and held
        yield Row(
            what=what, where="all islands, bridged", state="fail" if slow else "pass" if held else "note",
            found=f"{rate:.3g} GB/s, {share:.0%} of what the relays alone move",
            reason=f"at least {LEAST_SHARE:.0%} is expected" if slow else "" if held else "CPUs: no limit is held to",
            figures=figures,
        )  # fmt: skip


def _link_gbytes(cluster: ClusterSpec, island: Sequence[int]) -> float | None:
    """The link of the island's devices to their neighbours, one direction, as its data sheet says; None of CPUs."""
    devices = [cluster.places[rank].accelerator for rank in island]
    return min((d.link_gbytes_per_second for d in devices if d.vendor != "cpu"), default=None)


def _against_link(
    what: str, where: str, rate: float, limit: float | None, row: dict[str, object], figures: dict[str, float]
) -> Row:
    """Bytes over the slowest link of a ring: 2 (n - 1) / n of an all-reduce's."""
    if limit is None or row["operation"] != "all_reduce":
        reason = "no data sheet has a figure for it"
        return Row(what=what, where=where, state="note", found=f"{rate:.3g} GB/s", reason=reason, figures=figures)
    ranks = int(str(row["ranks"]))
    share = rate * 2 * (ranks - 1) / ranks / limit
    return Row(
        what=what, where=where, state="note", found=f"{rate:.3g} GB/s, {share:.0%} of the link's data sheet",
        reason="a bound, not an aim", figures={**figures, "share_of_link": share},
    )  # fmt: skip
