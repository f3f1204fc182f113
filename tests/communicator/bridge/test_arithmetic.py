"""Reductions by themselves: factors and what has no meaning."""

import pytest
import torch
import torch.distributed as dist

from hethub.communicator.bridge.arithmetic import make_reduction
from hethub.spec.errors import BadInput


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
@pytest.mark.parametrize("factor", [2.5, torch.tensor([2.5], dtype=torch.float64)])
def test_a_factor_does_not_change_the_type(dtype, factor):
    reduction = make_reduction(dist._make_nccl_premul_sum(factor), dtype, 2)
    scaled = reduction.prepared(torch.tensor([2, 4], dtype=dtype))
    assert scaled.dtype == dtype
    assert scaled.tolist() == [5, 10]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("AVG", torch.bool),
        ("SUM", torch.uint16),
        ("MAX", torch.uint32),
        ("AVG", torch.uint64),
        ("MIN", torch.complex64),
        ("BOR", torch.complex64),
        ("BAND", torch.bfloat16),
        ("BXOR", torch.float32),
    ],
)
def test_what_torch_does_not_compute_is_refused(name, dtype):
    """At submission, when nothing has been sent: what fails later ends the world."""
    with pytest.raises(BadInput, match=rf"{name} has no meaning for {dtype}"):
        make_reduction(getattr(dist.ReduceOp, name), dtype, 2)


@pytest.mark.parametrize("name", ["MAX", "MIN", "PRODUCT", "BXOR"])
def test_a_narrow_wire_rounds_sums_alone(name):
    dtype = torch.int32 if name == "BXOR" else torch.float32
    assert make_reduction(getattr(dist.ReduceOp, name), dtype, 2, "int8").wire.dtype == dtype
    assert make_reduction(dist.ReduceOp.SUM, torch.float32, 2, "int8").wire.dtype == torch.uint8


def test_averages_of_integers_are_cut_towards_zero():
    """As C divides, and so the vendors' libraries."""
    out = torch.empty(3, dtype=torch.int32)
    partials = [torch.tensor(values, dtype=torch.int32) for values in ([-3, 3, -4], [-4, 4, -4])]
    make_reduction(dist.ReduceOp.AVG, torch.int32, 2).total(partials, out)
    assert out.tolist() == [-3, 3, -4]
