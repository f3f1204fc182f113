"""What ranks say of an operation, so that no two different ones are taken for one.

Every message of a bridged operation carries its `mark`. In debug mode the ranks compare before each operation what they are
about to do, and name it.
"""

import functools
import json
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hethub.communicator import torch_private
from hethub.spec.errors import RunFailed
from hethub.spec.ranges import Range

_ALIKE = {
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
}
"""Operations whose result tensors have the same shape on every rank."""

_BYTES = 256
_MAX_CHARACTERS = 150


def mark(name: str, tensors: Sequence[torch.Tensor], opts: Any) -> int:
    """A number for what must be the same on all ranks of an operation. The reduction adds its own where it is run."""
    sizes = [tensor.numel() for tensor in tensors] if name in _ALIKE else []
    return _mark(name, getattr(opts, "rootRank", None), tensors[0].dtype if tensors else None, *sizes)


@functools.lru_cache(1 << 12)
def _mark(*what: Any) -> int:
    return zlib.crc32(repr(what).encode())


def describe(name: str, number: int, tensors: Sequence[torch.Tensor], chosen: Sequence[str]) -> str:
    """What an operation is, as far as it must be the same on all ranks: `chosen` is what must agree beside the tensors of
    some, the words of options, reduction and ranges."""
    shapes = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors] if name in _ALIKE else []
    words = ", ".join([*chosen, *shapes])
    if len(words) > _MAX_CHARACTERS:  # what is left out may be what differs
        words = f"{words[:_MAX_CHARACTERS]}... (checksum {zlib.crc32(words.encode()):08x})"
    return json.dumps([name, number, words])


def option_words(opts: Any) -> list[str]:
    """Reduction and root of c10d's options, where they have them."""
    words = [reduction_word(opts.reduceOp)] if hasattr(opts, "reduceOp") else []
    return [*words, f"root {opts.rootRank}"] if hasattr(opts, "rootRank") else words


def reduction_word(op: Any) -> str:
    return str(torch_private.reduce_op_kind(op).name)


def range_words(ranges: Sequence[Range]) -> list[str]:
    """How many elements each rank gets."""
    return [f"sizes {' '.join(str(own.size) for own in ranges)}"]


def compare(gloo: Any, own: str, rank: int, members: Sequence[int]) -> None:
    """Returns when all members say the same. Raises RunFailed naming the first rank that differs from this one."""
    padded = torch.zeros(_BYTES, dtype=torch.uint8)
    data = own.encode()[:_BYTES]
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in members]
    gloo.allgather([rows], [padded]).wait()
    for member, row in zip(members, rows, strict=True):
        theirs = bytes(row.numpy()).rstrip(b"\0").decode()
        if theirs != own:
            raise RunFailed(
                f"rank {rank} enters {_readable(own)} while rank {member} enters {_readable(theirs)}: all ranks of a"
                " group must call the same operations in the same order with equal tensors."
            )


def _readable(text: str) -> str:
    name, number, tensors = json.loads(text)
    return f"{name} (operation {number} of the group{', ' + tensors if tensors else ''})"
