"""The legs of bridged collectives inside an island: its native library, on the device's current stream.

The library knows equal parts only, so unlike ones are padded, or moved one by one where that would be too much.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from hethub.communicator import torch_private
from hethub.communicator.bridge.arithmetic import Reduction
from hethub.kernels.device import Device
from hethub.spec.ranges import Range, from_sizes

# What NCCL and RCCL add; torch has more types.
_NATIVE_TYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}

Placed = tuple[Range, torch.Tensor]
"""A range of the collective's flat tensor, and its elements on the device."""
Tensors = Mapping[int, torch.Tensor]
"""By rank of the group."""


class IslandLibrary:
    """`group` is the library's, None for a rank alone in its island; `home` are the island's ranks and `rank` is this one,
    in the bridged group's numbers."""

    def __init__(self, group: Any, home: Sequence[int], rank: int, device: Device) -> None:
        self.group = group
        self._home = home
        self._rank = rank
        self._device = device

    def can_reduce(self, reduction: Reduction) -> bool:
        """Whether the library knows the operation and the type."""
        return self.group is None or (reduction.is_native and reduction.dtype in _NATIVE_TYPES)

    def shutdown(self) -> None:
        """Frees the library's group."""
        if self.group is not None:
            self.group.shutdown()

    def sum(self, flat: torch.Tensor, held: Sequence[Sequence[Range]], reduction: Reduction) -> list[Placed]:
        """The island's sums of all that this rank holds of them, by one native reduce-scatter.

        The library knows equal parts only, so each member's pieces are joined and padded to the size of the longest;
        where that would more than double them, each holder's are reduced to it by themselves.
        """
        pieces, home = held[self._rank], self._home
        if self.group is None:
            return [(piece, _sub(flat, piece)) for piece in pieces]
        sizes = [_size(held[rank]) for rank in home]
        if _are_unlike(sizes):
            sums = [torch.cat([_sub(flat, piece) for piece in held[rank]]) for rank in home]
            for place, whole in enumerate(sums):
                if sizes[place]:
                    torch_private.native_reduce(self.group, whole, place, reduction.native_op)
            part = sums[home.index(self._rank)]
        else:
            part = torch.empty(max(sizes), dtype=flat.dtype, device=flat.device)
            if max(sizes):
                joined = _joined(flat, [held[rank] for rank in home], max(sizes))
                torch_private.native_reduce_scatter(self.group, part, joined, reduction.native_op)
        return [
            (piece, _sub(part, place))
            for piece, place in zip(pieces, from_sizes([piece.size for piece in pieces]), strict=True)
        ]

    def gather(self, flat: torch.Tensor, held: Sequence[Sequence[Range]], part: torch.Tensor | None = None) -> None:
        """Writes what each of the island holds to its place in `flat`; this rank's is there already, or in `part`.

        As `sum`, by one all-gather of padded parts, or where that is too much by broadcasts. Bytes are moved,
        so the library need not know the type.
        """
        home = self._home
        sizes = [_size(held[rank]) for rank in home]
        size = max(sizes)
        if self.group is None or not size:
            return
        if part is None and _are_unlike(sizes):
            for place, rank in enumerate(home):
                for piece in held[rank]:
                    if piece:
                        torch_private.native_broadcast(self.group, _bytes(_sub(flat, piece)), place)
            return
        if part is None or part.numel() < size:
            own = torch.zeros(size, dtype=flat.dtype, device=flat.device)
            sources = [_sub(flat, piece) for piece in held[self._rank]] if part is None else [part]
            for at_own, source in zip(from_sizes([source.numel() for source in sources]), sources, strict=True):
                _sub(own, at_own).copy_(source)
            part = own
        whole = torch.empty(size * len(home), dtype=flat.dtype, device=flat.device)
        torch_private.native_all_gather(self.group, _bytes(whole), _bytes(part))
        for place, rank in enumerate(home):
            start = place * size
            for piece in held[rank]:
                _sub(flat, piece).copy_(whole[start : start + piece.size])
                start += piece.size

    def exchange(self, sources: Tensors, places: Tensors) -> None:
        """What the island's other ranks are sent and send, by one native all-to-all of bytes."""
        if self.group is None:
            return
        others = [rank if rank != self._rank else None for rank in self._home]
        given, taken = ([of.get(rank) if rank is not None else None for rank in others] for of in (sources, places))
        leaving = [
            torch.empty(0, dtype=torch.uint8, device=self._device.torch_device) if each is None else _bytes(each)
            for each in given
        ]
        sizes = [0 if each is None else each.nbytes for each in taken]
        arriving = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device.torch_device)
        torch_private.native_all_to_all(
            self.group, arriving, torch.cat(leaving), sizes, [each.numel() for each in leaving]
        )
        for place, piece in zip(taken, from_sizes(sizes), strict=True):
            if place is not None:
                _bytes(place).copy_(_sub(arriving, piece))


def _are_unlike(sizes: Sequence[int]) -> bool:
    """Whether parts padded to the largest would be more than twice as much."""
    return max(sizes) * len(sizes) > 2 * sum(sizes)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _size(pieces: Sequence[Range]) -> int:
    return sum(piece.size for piece in pieces)


def _sub(flat: torch.Tensor, piece: Range) -> torch.Tensor:
    return flat[piece.start : piece.stop]


def _joined(flat: torch.Tensor, held: Sequence[Sequence[Range]], size: int) -> torch.Tensor:
    """Each member's pieces, one member after another, padded to `size` each: `flat` itself where it lies so."""
    pieces = [piece for of_member in held for piece in of_member if piece]
    in_order = all(before.stop == after.start for before, after in pairwise(pieces))
    if in_order and all(_size(of_member) == size for of_member in held):
        return _sub(flat, Range(pieces[0].start, pieces[-1].stop))
    joined = torch.zeros(size * len(held), dtype=flat.dtype, device=flat.device)
    for place, of_member in enumerate(held):
        start = place * size
        for piece in of_member:
            joined[start : start + piece.size].copy_(_sub(flat, piece))
            start += piece.size
    return joined
