"""The offset of every rank's monotonic clock to rank 0's, so that a trace over machines has one time."""

from time import monotonic

import torch

from hethub.communicator import World

ROUNDS = 8


def clock_offset(world: World) -> float:
    """Seconds to add to this rank's `monotonic()` to get rank 0's; all ranks call it together.

    A ping-pong with rank 0, one rank after the other. The round with the shortest way there and back decides: rank
    0's answer was read halfway through it, within half that way.
    """
    best, offset = float("inf"), 0.0
    for other in range(1, world.size):
        for _ in range(ROUNDS):
            if world.rank == other:
                sent = monotonic()
                world.send(torch.zeros(1, dtype=torch.float64), 0).wait()
                answer = torch.zeros(1, dtype=torch.float64)
                world.receive(answer, 0).wait()
                back = monotonic()
                if back - sent < best:
                    best, offset = back - sent, float(answer) - (sent + back) / 2
            elif world.rank == 0:
                world.receive(torch.zeros(1, dtype=torch.float64), other).wait()
                world.send(torch.tensor([monotonic()], dtype=torch.float64), other).wait()
    return offset
