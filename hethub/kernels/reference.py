"""The staging kernels in torch: what they compute, on any device, and the path taken where CuPy is absent."""

from collections.abc import Sequence

import torch

from hethub.kernels.sources import QUANTISED_BLOCK, SMALLEST_MAXIMUM

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude of a quantised type."""


class TorchKernels:
    """Pack, add, cast and quantise with torch operations."""

    name = "torch"

    def pack(self, tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """`flat` (one dimension) becomes the elements of all contiguous `tensors`, one after another."""
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)

    def unpack(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """The reverse of `pack`."""
        start = 0
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()

    def add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """`total` (fp32) += `part` (fp32, bf16 or fp16), added in fp32."""
        total.add_(part)

    def cast(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """`out` becomes `source` in out's type, rounded to nearest even."""
        out.copy_(source)

    def quantise(self, source: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
        """`values` (int8 or float8_e4m3fn) and one fp32 scale per block of 256 stand for `source` (fp32).

        A scale is the block's largest magnitude over the type's largest. A block with an infinity or a NaN comes back
        as NaN: overflow must be seen, not smoothed. A block below `SMALLEST_MAXIMUM` everywhere comes back as zeros.
        """
        largest = LARGEST[values.dtype]
        blocks = _blocks(source)
        maximum = blocks.abs().amax(dim=1)
        finite, vanishes = torch.isfinite(maximum), maximum < SMALLEST_MAXIMUM
        # One division per block and a product per element: an element's own division would take most of the time.
        inverse = torch.where(finite & ~vanishes, largest / maximum, 0.0)
        quotient = torch.where(finite[:, None], blocks * inverse[:, None], 0.0)
        if values.dtype == torch.int8:
            quotient = quotient.round()
        quotient = quotient.clamp(-largest, largest).view(-1)[: source.numel()]
        values.copy_(quotient)
        scales.copy_(torch.where(finite, torch.where(vanishes, 1.0, maximum / largest), float("nan")))

    def dequantise(self, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """`out` (fp32) becomes what `values` and `scales` stand for."""
        blocks = _blocks(values.float())
        out.copy_((blocks * scales[:, None]).view(-1)[: out.numel()])


def num_scales(num_elements: int) -> int:
    """How many blocks of 256 hold that many elements."""
    return -(-num_elements // QUANTISED_BLOCK)


def _blocks(flat: torch.Tensor) -> torch.Tensor:
    """The elements as rows of 256, the last one filled up with zeros."""
    missing = num_scales(flat.numel()) * QUANTISED_BLOCK - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, QUANTISED_BLOCK)
