"""The arithmetic of a bridged reduction: which type adds, in which order, and when it is rounded.

Sums are taken in ascending rank order inside an island of CPUs and ascending island order between islands; inside an
island of devices its library adds, in the tensor's own type and an order of its own. Types narrower than fp32 are added
in fp32 here; an island's partial is rounded to the wire type once, also at its own side, and the total is rounded once.
So all ranks hold the same bits, whatever the chunks, lanes or relay.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hethub.communicator import torch_private
from hethub.communicator.bridge.wire import Wire, make_wire
from hethub.communicator.torch_private import ReduceKind as _KIND
from hethub.kernels.reference import TorchKernels
from hethub.spec.errors import BadInput

Combine = Callable[..., torch.Tensor]

_COMBINE: dict[Any, Combine] = {
    _KIND.SUM: torch.add,
    _KIND.AVG: torch.add,
    _KIND.PREMUL_SUM: torch.add,
    _KIND.PRODUCT: torch.mul,
    _KIND.MIN: torch.minimum,
    _KIND.MAX: torch.maximum,
    _KIND.BAND: torch.bitwise_and,
    _KIND.BOR: torch.bitwise_or,
    _KIND.BXOR: torch.bitwise_xor,
}
_BITWISE = {_KIND.BAND, _KIND.BOR, _KIND.BXOR}
_SUMS = {_KIND.SUM, _KIND.AVG, _KIND.PREMUL_SUM}
_ADDED_BY_KERNELS = {torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One operation over `num_ranks` tensors of `dtype`."""

    kind: Any
    combine: Combine
    dtype: torch.dtype
    accumulate_dtype: torch.dtype
    wire: Wire
    num_ranks: int
    kernels: TorchKernels
    factor: Any = None

    @functools.cached_property
    def mark(self) -> int:
        """A number for what is computed, which all ranks must give alike."""
        return zlib.crc32(self.kind.name.encode())

    def prepared(self, flat: torch.Tensor) -> torch.Tensor:
        """What this rank contributes: `flat` itself, or a scaled copy for PREMUL_SUM."""
        return (flat * self.factor).to(flat.dtype) if self.is_scaled else flat

    @property
    def is_scaled(self) -> bool:
        """Whether what is contributed is a scaled copy."""
        return self.kind == _KIND.PREMUL_SUM

    @property
    def is_native(self) -> bool:
        """Whether NCCL, RCCL and Gloo all know the operation on what is `prepared` (the first two have none by bits)."""
        return self.kind not in _BITWISE

    @property
    def native_op(self) -> Any:
        """What the native library computes inside an island on what is `prepared`: the division of AVG comes last, over
        all ranks."""
        return _KIND.SUM if self.kind in _SUMS else self.kind

    @property
    def num_contributions(self) -> int:
        """What one rank's value is divided by in the result: 1 but for AVG."""
        return self.num_ranks if self.kind == _KIND.AVG else 1

    def partial(self, sources: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """`out` (of the tensor's type) becomes the island's partial of `sources`, given in ascending rank order."""
        self._fold(sources, out)

    def total(self, partials: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """`out` (of the tensor's type) becomes the total of the islands' partials, given in ascending island order."""
        divide = self.kind == _KIND.AVG
        if divide and out.dtype != self.accumulate_dtype:
            wide = torch.empty_like(out, dtype=self.accumulate_dtype)
            self._fold(partials, wide)
            self.kernels.cast(_divided(wide, self.num_ranks), out)
            return
        self._fold(partials, out)
        if divide:
            _divided(out, self.num_ranks)

    def _fold(self, sources: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combines left to right in the accumulation type; `out` may be the memory of any source."""
        first, *rest = sources
        if not rest:
            out.copy_(first)  # which torch leaves out where both are the same memory
            return
        direct = out.dtype == self.accumulate_dtype and all(source.dtype == out.dtype for source in sources)
        if direct and all(out.data_ptr() != source.data_ptr() for source in rest[1:]):
            self.combine(first, rest[0], out=out)
            for source in rest[1:]:
                self.combine(out, source, out=out)
            return
        wide = first.to(self.accumulate_dtype, copy=True)
        for source in rest:
            if self.kind in _SUMS and source.dtype in _ADDED_BY_KERNELS:
                self.kernels.add(wide, source)
            else:
                self.combine(wide, source.to(self.accumulate_dtype), out=wide)
        self.kernels.cast(wide, out)


def _divided(tensor: torch.Tensor, number: int) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        # By a tensor of the same device: by a plain number, a GPU multiplies with the rounded reciprocal instead.
        return tensor.div_(torch.full((), number, dtype=tensor.dtype, device=tensor.device))
    return tensor.div_(number, rounding_mode="trunc")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that adds: fp32 for narrower floats, else the tensor's own."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@functools.cache
def _has_meaning(kind: Any, dtype: torch.dtype) -> bool:
    """Whether torch computes it, seen on one element: it does not order complex numbers, say, or add uint16. A factor is for
    floats that torch multiplies, as NCCL has it: integers would pass through fp32, and lose what is above 2^24 or cut off."""
    if kind == _KIND.PREMUL_SUM and not (dtype.is_floating_point and dtype.itemsize > 1):
        return False
    one = torch.ones(1, dtype=accumulate_dtype(dtype), device="cpu")
    try:
        combined = _COMBINE[kind](one, one)
        if kind == _KIND.AVG:
            _divided(combined, 2)
    except RuntimeError:
        return False
    return True


def make_reduction(
    op: object, dtype: torch.dtype, num_ranks: int, wire: str = "exact", kernels: TorchKernels | None = None
) -> Reduction:
    """The reduction for a torch ReduceOp, by torch's arithmetic where no kernels are given.

    Raises BadInput where the operation has no meaning for the type.
    """
    kernels = kernels or TorchKernels()
    kind = torch_private.reduce_op_kind(op)
    if kind not in _COMBINE:
        raise BadInput(f"ReduceOp.{kind.name} is not one of {', '.join(sorted(k.name for k in _COMBINE))}.")
    if not _has_meaning(kind, dtype):
        raise BadInput(f"ReduceOp.{kind.name} has no meaning for {dtype}; choose an operation the type has.")
    return Reduction(
        kind=kind,
        combine=_COMBINE[kind],
        dtype=dtype,
        accumulate_dtype=accumulate_dtype(dtype),
        wire=make_wire(wire if kind in _SUMS else "exact", dtype, kernels),
        num_ranks=num_ranks,
        kernels=kernels,
        factor=torch_private.premul_factor(op) if kind == _KIND.PREMUL_SUM else None,
    )
