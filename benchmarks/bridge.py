"""Bridged collectives against flat Gloo on the same ranks: interleaved pairs with an A/A control, medians.

    python benchmarks/bridge.py [--repeats 11] [--only host|link|shares|gpu]

Ranks run on this host; the rows with a link put the islands into two network namespaces joined by a 1 Gbit/s token
bucket (needs root, `ip` and `tc`; left out with that reason otherwise). Times are the slowest rank's. The GPU's row
joins one device and one CPU, and compares the whole operation with each of its legs alone.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ETHERNET_SHARE = 1448 / 1514  # payload of a full frame as the token bucket counts it: TCP and IP headers, Ethernet
MIB = 1 << 20
WIDTH = {"exact": 1.0, "bf16": 0.5}  # of fp32 on the wire


def load_support() -> tuple[Any, Any]:
    """tests.support.ranks and .namespaces, without putting the repository root on sys.path."""
    spec = importlib.util.spec_from_file_location(
        "tests", ROOT / "tests" / "__init__.py", submodule_search_locations=[str(ROOT / "tests")]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["tests"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["tests"])
    from tests.support import ranks
    from tests.support.hosts import namespaces

    return ranks, namespaces


def timed_pairs(world: Any, num_bytes: int, repeats: int, wires: Sequence[str] = ()) -> dict[str, list[float]]:
    """Seconds of each repeat, slowest rank: ours, flat Gloo, and flat Gloo again (the A/A control).

    With `wires`, ours once per wire, interleaved like the others; "ours" is the first.
    """
    import torch
    import torch.distributed as dist

    from hethub.communicator import torch_private

    rendezvous = world._context.rendezvous
    flat_store = dist.PrefixStore("flat", rendezvous.store)
    flat = torch_private.create_gloo_group(flat_store, world.rank, world.size, 120, rendezvous.address)
    tensor = torch.ones(num_bytes // 4)
    options = dist.AllreduceOptions()

    def ours() -> None:
        dist.all_reduce(tensor)

    def gloo() -> None:
        flat.allreduce([tensor], options).wait()

    def over(wire: str) -> Callable[[], object]:
        world._context.wire = wire  # a group's first sum decides how all its sums of that type cross
        group = dist.new_group(list(range(world.size)), backend="hethub")
        dist.all_reduce(torch.ones(1), group=group)
        return partial(dist.all_reduce, tensor, group=group)

    calls: dict[str, Callable[[], object]] = {"flat": gloo, "ours": ours}
    calls |= {"ours" if wire == wires[0] else wire: over(wire) for wire in wires}
    calls["flat again"] = gloo
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            tensor.fill_(1.0)
            flat.barrier().wait()
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            assert tensor[-1].item() == world.size
            if repeat >= 2:
                seconds[name].append(elapsed)
    of_ranks = world.all_gather_objects(seconds)
    return {name: [max(row) for row in zip(*(r[name] for r in of_ranks), strict=True)] for name in seconds}


def connect_in_namespace(rank: int, store: Any, found: Any, islands: list[list[int]], **options: Any) -> Any:
    """The world, each island in a network namespace of its own."""
    from hethub.communicator import Rendezvous, connect
    from hethub.communicator.joining.rendezvous import agree_on_token
    from tests.support.hosts.namespaces import ADDRESSES

    side = next(index for index, island in enumerate(islands) if rank in island)
    found.enter(side)
    size = sum(map(len, islands))
    rendezvous = Rendezvous(
        store=store,
        rank=rank,
        size=size,
        local_rank=islands[side].index(rank),
        local_size=len(islands[side]),
        address=ADDRESSES[side],
        interface=None,
        token=agree_on_token(store, rank, None),
    )
    return connect(rendezvous, islands=islands, **options)


def in_namespace(
    rank: int, store: Any, found: Any, islands: list[list[int]], wires: Sequence[str], num_bytes: int, repeats: int
) -> Any:
    """As `timed_pairs`, over the link."""
    world = connect_in_namespace(rank, store, found, islands)
    seconds = timed_pairs(world, num_bytes, repeats, wires)
    links = [link for link in world.counters()["links"] if link["level"] == "bridge"]
    sent = world.all_gather_objects(sum(link["bytes"] for link in links))
    world.close()
    return seconds, sum(sent) / (repeats + 2)


def stream(world: Any, num_bytes: int) -> Callable[[], None]:
    """Sends so many bytes each way at once between ranks 0 and 2 by plain TCP sockets: what the link gives by itself."""
    import socket

    from tests.support.hosts.namespaces import ADDRESSES

    if world.rank == 0:
        with socket.create_server((ADDRESSES[0], 0)) as server:
            ports = world.all_gather_objects(server.getsockname()[1])
            connection, _ = server.accept()
    else:
        ports = world.all_gather_objects(0)
        if world.rank != 2:
            return lambda: None
        connection = socket.create_connection((ADDRESSES[0], ports[0]))
    leaving, arriving = bytes(num_bytes), memoryview(bytearray(1 << 20))

    def call() -> None:
        sender = threading.Thread(target=connection.sendall, args=(leaving,))
        sender.start()
        left = num_bytes
        while left:
            left -= connection.recv_into(arriving, min(left, len(arriving)))
        sender.join()

    return call


def shares_and_messages(
    rank: int, store: Any, found: Any, islands: list[list[int]], staged: list[int], num_bytes: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each repeat, slowest rank: what crosses the link in each direction is `num_bytes` in every case.

    `staged` ranks take the way of device tensors, Gloo in place of the vendor's library: its sums are not beside the wire.
    """
    import torch

    from hethub.communicator import all_gather_by_ranges, reduce_scatter_by_ranges
    from hethub.spec.ranges import from_sizes

    world = connect_in_namespace(rank, store, found, islands, staged_ranks=staged)
    count = 2 * num_bytes // 4  # each island owns half of it
    flat = torch.ones(count)
    even = from_sizes([count // 4] * 4)
    uneven = from_sizes([count // 8, 3 * count // 8] * 2)
    peer, pieces = (rank + 2) % 4, 4
    sent = torch.ones(pieces, num_bytes // 8 // pieces)  # two ranks a side, so half of the bytes each
    received = torch.empty_like(sent)

    def messages() -> None:
        works = [world.receive(received[i], peer, tag=i) for i in range(pieces)]
        works += [world.send(sent[i], peer, tag=i) for i in range(pieces)]
        for work in works:
            work.wait()

    group = world.default_group
    calls: dict[str, Callable[[], object]] = {
        "reduce-scatter by ranges, even": lambda: reduce_scatter_by_ranges(group, flat, even).wait(),
        "reduce-scatter by ranges, uneven": lambda: reduce_scatter_by_ranges(group, flat, uneven).wait(),
        "all-gather by ranges, even": lambda: all_gather_by_ranges(group, flat, even).wait(),
        "all-gather by ranges, uneven": lambda: all_gather_by_ranges(group, flat, uneven).wait(),
        "messages of a pipeline": messages,
        "TCP socket": stream(world, num_bytes),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            flat.fill_(1.0)
            world.barrier()
            start = time.perf_counter()
            call()
            if repeat >= 1:
                seconds[name].append(time.perf_counter() - start)
    of_ranks = world.all_gather_objects(seconds)
    world.close()
    return {name: [max(row) for row in zip(*(r[name] for r in of_ranks), strict=True)] for name in seconds}


def share_rows(
    ranks: Any, found: Any, link_bits_per_second: float, repeats: int, num_bytes: int = 32 * MIB
) -> Iterator[dict[str, str]]:
    """Both directions at once, plain sockets in the same run as the witness."""
    islands = [[0, 1], [2, 3]]
    bound = num_bytes * 8 / (link_bits_per_second * ETHERNET_SHARE)
    for way, staged in (("host tensors", []), ("the way of a device's", [0, 1, 2, 3])):
        arguments = found, islands, staged, num_bytes, repeats
        outcomes = ranks.start_ranks(4, shares_and_messages, *arguments, timeout_seconds=500)
        seconds = ranks.values(outcomes)[0]
        for name, values in seconds.items():
            median = statistics.median(values)
            witness = statistics.median(w / v for w, v in zip(seconds["TCP socket"], values, strict=True))
            yield {
                "case": f"{name}, 2+2, {num_bytes // MIB} MiB each way over 1 Gbit/s, {way}",
                "ms": f"{median * 1e3:.1f}",
                "share of the bound": f"{bound / median:.3f}",
                "share of the sockets": f"{witness:.3f}",
                "to reach": ">= 0.90 of the bound",
            }


def iperf3_row(found: Any, link_bits_per_second: float) -> str:
    rates = found.iperf3(3)
    if rates is None:
        return "iperf3 is not installed (Debian: iperf3)."
    shares = [rate / (link_bits_per_second * ETHERNET_SHARE) for rate in rates]
    return f"iperf3, both directions at once: {shares[0]:.3f} and {shares[1]:.3f} of the bound"


def row(case: str, seconds: dict[str, list[float]], target: str, extra: str = "") -> dict[str, str]:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = statistics.median(f / o for f, o in zip(seconds["flat"], seconds["ours"], strict=True))
    control = statistics.median(f / o for f, o in zip(seconds["flat"], seconds["flat again"], strict=True))
    return {
        "case": case,
        "flat Gloo ms": f"{median['flat'] * 1e3:.2f}",
        "hethub ms": f"{median['ours'] * 1e3:.2f}",
        "flat / hethub": f"{ratio:.2f}",
        "A/A control": f"{control:.2f}",
        "to reach": target,
        "note": extra,
    }


def one_host_rows(ranks: Any, repeats: int) -> Iterator[dict[str, str]]:
    for case, islands, num_bytes, target in (
        ("1+1, 64 MiB, one host", [[0], [1]], 64 * MIB, ">= 2.0"),
        ("2+2, 64 MiB, one host", [[0, 1], [2, 3]], 64 * MIB, ">= 1.2"),
        ("1+1, 4 KiB, one host", [[0], [1]], 4096, ">= 1.0"),
        ("2+2, 4 KiB, one host", [[0, 1], [2, 3]], 4096, ">= 1.0"),
        ("one island of 4, 64 MiB", [[0, 1, 2, 3]], 64 * MIB, "1 (A/A)"),
    ):
        count = repeats if num_bytes > MIB else 10 * repeats
        size = sum(map(len, islands))
        yield row(case, ranks.run_ranks(size, timed_pairs, num_bytes, count, islands=islands)[0], target)


def link_rows(ranks: Any, found: Any, link_bits_per_second: float, repeats: int) -> Iterator[dict[str, str]]:
    num_bytes = 64 * MIB
    for case, islands, wires, target in (
        ("2+2 contiguous, 1 Gbit/s link", [[0, 1], [2, 3]], ("exact",), ">= 1.35; bound >= 0.95"),
        ("2+2 interleaved, 1 Gbit/s link", [[0, 2], [1, 3]], ("exact",), ">= 2.6; bound >= 0.95"),
        ("2+2 contiguous, 1 Gbit/s link, bf16 wire", [[0, 1], [2, 3]], ("bf16", "exact"), ">= 1.8 over exact"),
    ):
        outcomes = ranks.start_ranks(4, in_namespace, found, islands, wires, num_bytes, repeats, timeout_seconds=500)
        seconds, sent = ranks.values(outcomes)[0]
        ours = statistics.median(seconds["ours"])
        bound = num_bytes * 8 / (link_bits_per_second * ETHERNET_SHARE) * WIDTH[wires[0]]
        least = 2 * num_bytes * sum(WIDTH[wire] for wire in wires)
        note = f"bound {bound * 1e3:.0f} ms, reached {bound / ours:.2f}; bridge bytes / least {sent / least:.3f}"
        if "exact" in seconds:
            pairs = zip(seconds["exact"], seconds["ours"], strict=True)
            note += f"; over exact, interleaved {statistics.median(exact / narrow for exact, narrow in pairs):.2f}"
        yield row(case, seconds, target, note)


def with_a_gpu(rank: int, store: Any, num_bytes: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat, slowest rank: an all-reduce between rank 0's device and a CPU, and each leg alone."""
    import torch
    import torch.distributed as dist

    from hethub.communicator import Rendezvous, connect
    from hethub.communicator.measuring.bound import bound_call
    from hethub.kernels.device import Device, choose_device

    device = choose_device(0, 1) if rank == 0 else Device(vendor="cpu")
    device.activate()
    world = connect(Rendezvous.on_one_host(store, rank, 2), device=device, islands=[[0], [1]])
    tensor, other = (torch.ones(num_bytes // 4, device=device.torch_device) for _ in range(2))
    host = device.host_buffer(num_bytes).view(torch.float32)
    move = bound_call(world, num_bytes)

    def wire_and_add() -> None:
        move()
        tensor.add_(other)

    calls: dict[str, Callable[[], object]] = {
        "device to host": lambda: host.copy_(tensor, non_blocking=True),
        "wire and add": wire_and_add,
        "host to device": lambda: other.copy_(host, non_blocking=True),
        "bridged": lambda: dist.all_reduce(tensor),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            tensor.fill_(1.0)
            device.synchronize()
            world.barrier()
            start = time.perf_counter()
            call()
            device.synchronize()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - start)
        assert tensor[-1].item() == 2
    of_ranks = world.all_gather_objects(seconds)
    world.close()
    return {name: [max(times) for times in zip(*(r[name] for r in of_ranks), strict=True)] for name in seconds}


def gpu_rows(ranks: Any, repeats: int, num_bytes: int = 256 * MIB) -> Iterator[dict[str, str]]:
    seconds = ranks.values(ranks.start_ranks(2, with_a_gpu, num_bytes, repeats, timeout_seconds=500))[0]
    *legs, bridged = seconds
    share = statistics.median(max(seconds[leg][i] for leg in legs) / seconds[bridged][i] for i in range(repeats))
    yield {
        "case": f"a GPU and a CPU, {num_bytes // MIB} MiB, one host",
        **{f"{name} ms": f"{statistics.median(values) * 1e3:.2f}" for name, values in seconds.items()},
        "share of the slowest leg's bound": f"{share:.2f}",
        "to reach": ">= 0.85",
    }


def show(rows: Iterator[dict[str, str]]) -> None:
    """Prints a Markdown table, row by row as they come."""
    for number, each in enumerate(rows):
        if number == 0:
            print("| " + " | ".join(each) + " |\n|" + "---|" * len(each))
        print("| " + " | ".join(each.values()) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--only", choices=["host", "link", "shares", "gpu"])
    arguments = parser.parse_args()
    began = time.monotonic()
    ranks, support = load_support()
    if arguments.only in (None, "host"):
        show(one_host_rows(ranks, arguments.repeats))
    if arguments.only in (None, "link", "shares"):
        reason = support.why_no_namespaces()
        if reason is not None:
            print(f"The rows with a link are left out: {reason}.")
        else:
            with support.namespaces("hethub-bench") as found:
                if arguments.only != "shares":
                    show(link_rows(ranks, found, support.LINK_BITS_PER_SECOND, arguments.repeats))
                show(share_rows(ranks, found, support.LINK_BITS_PER_SECOND, arguments.repeats))
                print(iperf3_row(found, support.LINK_BITS_PER_SECOND))
    if arguments.only in (None, "gpu"):
        from hethub.kernels.device import detect_vendor

        if detect_vendor() == "cpu":
            print("The row with a GPU is left out: torch finds none here.")
        else:
            show(gpu_rows(ranks, arguments.repeats))
    print(f"{time.monotonic() - began:.0f} s, load average {os.getloadavg()[0]:.1f} at the end", file=sys.stderr)


if __name__ == "__main__":
    main()
