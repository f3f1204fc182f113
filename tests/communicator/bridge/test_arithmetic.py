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


def test_an_average_of_bools_is_refused():
    with pytest.raises(BadInput, match=r"AVG has no meaning for torch\.bool"):
        make_reduction(dist.ReduceOp.AVG, torch.bool, 2)
