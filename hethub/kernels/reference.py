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
        """`out` becomes `source` (of its type, or fp32) in out's type, rounded to nearest even."""
        out.copy_(source)

    def quantise(self, source: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
        """`values` (int8 or float8_e4m3fn) and one fp32 scale per block of 256 stand for `source` (fp32).

        A scale is the block's largest magnitude over the type's largest. A block with an infinity or a NaN comes back
        as NaN: overflow must be seen, not smoothed. A block below `SMALLEST_MAXIMUM` everywhere comes back as zeros.
        """
        for part, count, first in _whole_and_last(source.numel()):
            rows = source[part].view(-1, count)
            _quantise_rows(rows, values[part].view(-1, count), scales[first : first + rows.shape[0]])

    def dequantise(self, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """`out` (fp32) becomes what `values` and `scales` stand for."""
        for part, count, first in _whole_and_last(out.numel()):
            rows = out[part].view(-1, count)
            rows.copy_(values[part].view(-1, count)).mul_(scales[first : first + rows.shape[0], None])


def _quantise_rows(rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """A block per row. No step makes a copy that another could do without: on a CPU each one takes as long."""
    maximum = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))
    largest = torch.full_like(maximum, LARGEST[values.dtype])  # torch multiplies by a number's reciprocal instead
    finite, vanishes = torch.isfinite(maximum), maximum < SMALLEST_MAXIMUM
    # One division per block and a product per element: an element's own division would take most of the time.
    inverse = torch.where(finite & ~vanishes, largest / maximum, 0.0)
    quotient = rows * inverse[:, None]
    if rows.is_cuda or not bool(finite.all()):  # a device is not asked: the host would wait for it
        quotient.masked_fill_(~finite[:, None], 0.0)
    values.copy_(quotient.round_() if values.dtype == torch.int8 else quotient)
    scales.copy_(torch.where(finite, torch.where(vanishes, 1.0, maximum / largest), float("nan")))


def num_scales(num_elements: int) -> int:
    """How many blocks of 256 hold that many elements."""
    return -(-num_elements // QUANTISED_BLOCK)


def _whole_and_last(num_elements: int) -> list[tuple[slice, int, int]]:
    """The whole blocks, and the short last one: where, elements per block, and the number of the first block."""
    whole = num_elements // QUANTISED_BLOCK
    cut, left = whole * QUANTISED_BLOCK, num_elements % QUANTISED_BLOCK
    parts = [(slice(0, cut), QUANTISED_BLOCK, 0), (slice(cut, num_elements), left, whole)]
    return [part for part in parts if part[0].stop > part[0].start]
