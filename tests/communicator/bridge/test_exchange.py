"""What an exchange between islands gives back when it is over: memory that relays have lent, and its own partials."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hethub.communicator.bridge.arithmetic import make_reduction
from hethub.communicator.bridge.exchange import Exchange
from hethub.communicator.bridge.routes import all_reduce_route, reduce_scatter_route
from hethub.communicator.counters import LegClock
from hethub.spec.ranges import Range

ISLANDS = ((0,), (1,), (2,))


class Side:
    """Where rank 0 computes; all partials are ones, and all totals that come are threes."""

    copies, clock = False, LegClock()

    def __init__(self):
        self.out, self.notes = torch.zeros(6), []

    def partial(self, piece, only_reader):
        return torch.ones(piece.size)

    def place(self, piece):
        return self.out[piece.start : piece.stop]

    def send(self, message, peer, stage):
        return lambda: SimpleNamespace(
            wait=lambda: self.notes.append("sent"), wait_until_read=lambda: self.notes.append("read")
        )

    def expect(self, num_elements, dtype, peer, stage):
        message, number = torch.full((num_elements,), 3.0 if stage.name == "TOTAL" else 1.0), (stage.name, peer)
        return SimpleNamespace(wait=lambda: message, release=lambda: self.notes.append(number))

    def release(self):
        self.notes.append("released")


@pytest.mark.parametrize(
    ("route", "total", "notes"),
    [
        (
            all_reduce_route(ISLANDS, [Range(0, 6)] * 3, 0), [3.0] * 6,
            ["sent"] * 2 + [("EXCHANGE", 1), ("EXCHANGE", 2), "released", ("TOTAL", 1), ("TOTAL", 2)] + ["sent"] * 2,
        ),
        # Who hears nothing may not run ahead of those it sends to.
        (reduce_scatter_route(ISLANDS, [Range(0, 0), Range(0, 3), Range(3, 6)], 0), [0.0] * 6, ["read"] * 2 + ["released"]),
    ],
    ids=["all-reduce", "reduce-scatter to others"],
)  # fmt: skip
def test_all_that_was_lent_is_given_back(route, total, notes):
    side = Side()
    reduction = make_reduction(dist.ReduceOp.SUM, torch.float32, 3)
    for _ in Exchange(route=route, side=side, reduction=reduction).stages():
        pass
    assert side.notes == notes
    assert side.out.tolist() == total
