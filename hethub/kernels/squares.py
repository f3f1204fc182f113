"""The sum of squares of many tensors, of which a gradient's norm is the root."""

import torch
from torch import Tensor

# A CPU's kernel adds a whole tensor's squares one after the other in each lane of a vector: of 2^27 elements it loses 1.4 %
# of the norm. A device's adds in parts by itself.
_SUMMED_IN_FP32 = 1 << 14


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares of all elements of these flat tensors, 0-d in fp64.

    It takes a few launches however many tensors there are: a device waits for them at the end of each step. On CPUs the parts'
    squares are added in their order, so that the sum does not depend on the width of the machine's vectors. Devices take a
    plain sum: torch refuses running sums on them where algorithms have to be deterministic."""
    on_cpu = tensors[0].device.type == "cpu"
    parts = [part for tensor in tensors for part in tensor.split(_SUMMED_IN_FP32)] if on_cpu else tensors
    squares = torch.stack(torch._foreach_norm(parts)).double().square()
    return squares.cumsum(0)[-1] if on_cpu else squares.sum()
