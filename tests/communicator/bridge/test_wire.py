"""Narrow wires: smaller messages, bounded error, the same bits everywhere, and feedback that makes the error vanish."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hethub.communicator import all_reduce_with_feedback
from hethub.communicator.bridge.arithmetic import make_reduction
from hethub.communicator.bridge.exchange import Exchange
from hethub.communicator.bridge.routes import all_reduce_route
from hethub.communicator.bridge.wire import WIRES, make_wire
from hethub.communicator.counters import LegClock
from hethub.kernels.reference import TorchKernels
from hethub.spec.ranges import Range
from tests.support.ranks import run_ranks

BOUNDS = {"exact": 1e-6, "bf16": 8e-3, "int8": 2e-2, "fp8": 6e-2}
SHRUNK = {"exact": 1.0, "bf16": 0.5, "int8": 0.254, "fp8": 0.254}


def contribution(rank, size=60_000):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def reduce_over_wire(world):
    tensor = contribution(world.rank)
    exact = sum(contribution(rank).double() for rank in range(world.size))
    dist.all_reduce(tensor)
    other = torch.full((1000,), 3, dtype=torch.int64)
    dist.all_reduce(other)
    assert (other == 3 * world.size).all()
    error = ((tensor - exact).norm() / exact.norm()).item()
    return tensor, error


@pytest.mark.parametrize(
    "islands", [[[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 3], [1], [2]]], ids=["2+2", "1+3", "2+1+1"]
)
@pytest.mark.parametrize("wire", BOUNDS)
def test_error_is_bounded_and_bits_agree(wire, islands):
    results = run_ranks(4, reduce_over_wire, islands=islands, wire=wire)
    for tensor, error in results:
        assert torch.equal(tensor, results[0][0])
        assert error <= BOUNDS[wire]
    if wire != "exact":
        assert results[0][1] > BOUNDS["exact"]


def bridge_bytes(world):
    dist.all_reduce(torch.ones(60_000))
    return sum(link["bytes"] for link in world.counters()["links"] if link["level"] == "bridge")


@pytest.mark.parametrize("wire", SHRUNK)
@pytest.mark.parametrize("islands", [[[0, 1], [2, 3]], [[0, 3], [1], [2]]], ids=["2+2", "2+1+1"])
def test_bytes_over_the_bridge(wire, islands):
    """Both directions shrink, also where three islands send partials to owners and totals back."""
    sent = sum(run_ranks(4, bridge_bytes, islands=islands, wire=wire))
    least = 60_000 * 4 * 2 * (len(islands) - 1)
    assert sent == pytest.approx(least * SHRUNK[wire], rel=0.01)


def average_over_steps(world, steps, op=dist.ReduceOp.SUM):
    """The mean over steps of the same sum or average, with feedback: rounding errors cancel over time."""
    exact = sum(contribution(rank, 5000).double() for rank in range(world.size))
    exact /= world.size if op == dist.ReduceOp.AVG else 1
    residual, total = torch.zeros(5000), torch.zeros(5000, dtype=torch.float64)
    errors = []
    for step in range(1, steps + 1):
        tensor = contribution(world.rank, 5000)
        all_reduce_with_feedback(world.default_group, tensor, residual, op=op, async_op=False)
        total += tensor
        errors.append(((total / step - exact).norm() / exact.norm()).item())
    return errors


@pytest.mark.parametrize("wire", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("islands", [[[0, 1], [2]], [[0], [1], [2]]], ids=["2+1", "1+1+1"])
def test_feedback_makes_the_mean_error_vanish(wire, islands):
    for errors in run_ranks(3, average_over_steps, 20, islands=islands, wire=wire):
        assert errors[-1] < errors[0] / 10


def test_feedback_of_an_average_keeps_all_that_the_total_lost():
    """The total is rounded behind the division: what that loses is a third of what contributions must make up for."""
    for errors in run_ranks(3, average_over_steps, 20, dist.ReduceOp.AVG, islands=[[0], [1], [2]], wire="int8"):
        assert errors[-1] < errors[0] / 10


def test_a_partial_is_encoded_as_its_receiver_decodes_it():
    partial, residual = torch.randn(300), torch.zeros(1000)
    reduction = make_reduction(dist.ReduceOp.SUM, torch.float32, 2, "int8")
    route = all_reduce_route(((0,), (1,)), [Range(0, 1000)] * 2, 0)
    side = SimpleNamespace(clock=LegClock())
    exchange = Exchange(route=route, side=side, reduction=reduction, residual=residual)
    message, own = exchange._encoded(partial, Range(100, 400))
    assert torch.equal(own, reduction.wire.decode(message, 300))
    torch.testing.assert_close(own + residual[100:400], partial, rtol=0, atol=1e-6)
    assert not residual[:100].any()
    assert not residual[400:].any()


def test_a_name_that_no_wire_has_makes_none():
    """Any but those of its time was taken for fp8."""
    kernels = TorchKernels()
    assert all(make_wire(name, torch.float32, kernels) for name in WIRES)
    with pytest.raises(KeyError, match="fp4"):
        make_wire("fp4", torch.float32, kernels)


def test_unknown_wires_are_refused():
    from hethub.communicator.bridge.wire import check_wire
    from hethub.spec.errors import BadInput

    with pytest.raises(BadInput, match="did you mean 'bf16'"):
        check_wire("bf61")
