"""What an island's partial looks like on the bridge: exact by default, narrower where the user asks for it.

Whatever the wire, an island uses its own partial as the others receive it, so all ranks add the same numbers. A
narrow wire applies to sums of fp32; everything else crosses in its own type. Nothing inside an island changes.
"""

from typing import Protocol, get_args

import torch

from hethub.kernels.reference import TorchKernels, num_scales
from hethub.spec.errors import BadInput, suggest
from hethub.spec.network import WireName

WIRES: tuple[str, ...] = get_args(WireName)
_BLOCKWISE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Wire(Protocol):
    """Turns a flat partial into a message and back."""

    dtype: torch.dtype

    def num_elements(self, num_elements: int) -> int:
        """Elements of `dtype` in the message for that many elements of the partial."""

    def encode(self, partial: torch.Tensor) -> torch.Tensor:
        """The message; may be the partial's own memory."""

    def decode(self, message: torch.Tensor, num_elements: int) -> torch.Tensor:
        """What the message stands for, in a type that adds to the partial's; may be the message's own memory."""


class Rounded:
    """The partial in a float type, rounded to nearest even; in its own type it crosses unchanged."""

    def __init__(self, dtype: torch.dtype, kernels: TorchKernels) -> None:
        self.dtype = dtype
        self._kernels = kernels

    def num_elements(self, num_elements: int) -> int:
        return num_elements

    def encode(self, partial: torch.Tensor) -> torch.Tensor:
        if partial.dtype == self.dtype:
            return partial
        message = torch.empty_like(partial, dtype=self.dtype)
        self._kernels.cast(partial, message)
        return message

    def decode(self, message: torch.Tensor, num_elements: int) -> torch.Tensor:
        return message


class Blockwise:
    """Blocks of 256 elements in an 8-bit type, the fp32 scale of each block in front."""

    dtype = torch.uint8

    def __init__(self, values_dtype: torch.dtype, kernels: TorchKernels) -> None:
        self._values_dtype = values_dtype
        self._kernels = kernels

    def num_elements(self, num_elements: int) -> int:
        return 4 * num_scales(num_elements) + num_elements

    def encode(self, partial: torch.Tensor) -> torch.Tensor:
        message = torch.empty(self.num_elements(partial.numel()), dtype=torch.uint8, device=partial.device)
        scales, values = self._parts(message, partial.numel())
        self._kernels.quantise(partial, values, scales)
        return message

    def decode(self, message: torch.Tensor, num_elements: int) -> torch.Tensor:
        scales, values = self._parts(message, num_elements)
        out = torch.empty(num_elements, device=message.device)
        self._kernels.dequantise(values, scales, out)
        return out

    def _parts(self, message: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = 4 * num_scales(num_elements)
        return message[:start].view(torch.float32), message[start:].view(self._values_dtype)


def check_wire(name: str) -> str:
    """The name. Raises BadInput if there is no such wire."""
    if name not in WIRES:
        raise BadInput(f"communicator.wire (in a program HETHUB_WIRE) is {name!r}; {suggest(name, WIRES)}")
    return name


def make_wire(name: str, dtype: torch.dtype, kernels: TorchKernels) -> Wire:
    """The wire `name` for a sum of `dtype`; exact for all types but fp32. Messages are made where the partial lies."""
    if name == "exact" or dtype != torch.float32:
        return Rounded(dtype, kernels)
    if name == "bf16":
        return Rounded(torch.bfloat16, kernels)
    return Blockwise(_BLOCKWISE[name], kernels)
