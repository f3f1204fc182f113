"""The bound of a bridged all-reduce in seconds: its least bytes over the same relays at once, and nothing else."""

from collections.abc import Callable

import torch

from hethub.communicator.bridge.wire import make_wire
from hethub.communicator.joining.islands import Islands
from hethub.communicator.world import World
from hethub.spec.ranges import split

_TAG = 0  # groups' tags begin above it


def wire_bytes(world: World, num_bytes: int) -> int:
    """What that many bytes of fp32 become on the world's wire."""
    wire = make_wire(world._context.wire, torch.float32, world._context.kernels)
    return wire.num_elements(max(1, num_bytes // 4)) * wire.dtype.itemsize


def least_messages(islands: Islands, num_bytes: int) -> dict[tuple[int, int], int]:
    """Bytes by (sender, receiver): 2n/k from each island to every other, shared by all ranks of both."""
    messages: dict[tuple[int, int], int] = {}
    for island in islands:
        for other in islands:
            if other is island:
                continue
            for index, part in enumerate(split(2 * num_bytes // len(islands), max(len(island), len(other)))):
                messages[island[index % len(island)], other[index % len(other)]] = part.size
    return {pair: size for pair, size in messages.items() if size}


def bound_call(world: World, num_bytes: int) -> Callable[[], None]:
    """Moves the least bytes of an all-reduce of `num_bytes` between host memories; all ranks call it together."""
    messages = least_messages(world.islands, wire_bytes(world, num_bytes))
    relays = world._context.relays
    sent = {b: torch.zeros(size, dtype=torch.uint8) for (a, b), size in messages.items() if a == world.rank}
    received = {a: torch.zeros(size, dtype=torch.uint8) for (a, b), size in messages.items() if b == world.rank}

    def call() -> None:
        arrivals = [relays[peer].carrier(part.nbytes).receive(part, peer, _TAG) for peer, part in received.items()]
        sends = [relays[peer].carrier(part.nbytes).send(part, peer, _TAG) for peer, part in sent.items()]
        for transfer in [*arrivals, *sends]:
            transfer.wait()

    return call
