"""Reductions by themselves: factors and what has no meaning."""

import pytest
import torch
import torch.distributed as dist

from hethub.communicator.bridge.arithmetic import make_reduction
from hethub.spec.errors import BadInput


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
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


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]
)
def test_a_factor_is_for_floats_alone(dtype):
    """As NCCL has it. Twice 2^40 + 1 came out 2 too small, through fp32; an 8-bit float ended the world."""
    with pytest.raises(BadInput, match=rf"PREMUL_SUM has no meaning for {dtype}"):
        make_reduction(dist._make_nccl_premul_sum(2.0), dtype, 2)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT"])
def test_narrow_types_are_added_in_fp32_and_rounded_once(name, dtype):
    partials = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)]
    a, b, c = (partial.float() for partial in partials)
    expected = {"SUM": a + b + c, "AVG": (a + b + c) / 3, "PRODUCT": a * b * c}[name].to(dtype)
    out = torch.empty(1000, dtype=dtype)
    make_reduction(getattr(dist.ReduceOp, name), dtype, 3).total(partials, out)
    assert torch.equal(out.float(), expected.float())
    assert torch.equal(partials[0].float(), a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", range(3))
def test_a_total_may_lie_where_a_partial_does_and_leaves_the_others(place, dtype):
    """The others may be memory that their sender still reads."""
    partials = [torch.full((5,), float(10**number), dtype=dtype) for number in range(3)]
    make_reduction(dist.ReduceOp.SUM, dtype, 3).total(partials, partials[place])
    assert [partial[0].item() for partial in partials] == [111 if at == place else 10**at for at in range(3)]
