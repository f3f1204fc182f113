"""What an operation's own tensors must be to each other: c10d leaves that to the backend.

Unchecked, parts that do not fill their whole leave old numbers in the result, one element is copied to many, and a type
turns into another without a word. What other ranks give is not known here; debug mode compares what
all must give alike.
"""

from collections.abc import Sequence

import torch

from hethub.spec.errors import BadInput


def check_parts(name: str, part: torch.Tensor, whole: torch.Tensor, size: int) -> None:
    """Raises BadInput unless `whole` holds one `part` for each of the group's ranks."""
    if part.numel() * size != whole.numel() or part.dtype != whole.dtype:
        raise BadInput(
            f"{name} was given a part of {_said(part)} and a whole of {_said(whole)}; the whole must be as many elements as"
            f" the part for each of the group's {size} ranks, {part.numel() * size}, of the same type."
        )


def check_row(name: str, row: Sequence[torch.Tensor], own: torch.Tensor, rank: int, size: int) -> None:
    """Raises BadInput unless `row` has a tensor for each of the group's ranks, and `rank`'s fits this rank's `own`."""
    check_count(name, row, size)
    unlike = [place for place, tensor in enumerate(row) if tensor.dtype != own.dtype]
    if row[rank].numel() != own.numel():
        unlike.append(rank)
    if unlike:
        raise BadInput(
            f"{name} was given a tensor of {_said(own)} and a list with one of {_said(row[unlike[0]])} in place {unlike[0]}; all must"
            f" be of one type, and this rank's place in the list, {rank}, as large as the tensor."
        )


def check_count(name: str, row: Sequence[torch.Tensor], size: int) -> None:
    """Raises BadInput unless `row` has a tensor for each of the group's ranks."""
    if len(row) != size:
        raise BadInput(f"{name} was given a list of {len(row)} tensors; pass one for each of the group's {size} ranks.")


def check_member(name: str, rank: int, size: int, written: Sequence[torch.Tensor] = ()) -> None:
    """Raises BadInput unless `rank` is a place in the group (else nobody would be a broadcast's root, and nothing be copied)
    and what this rank writes to can be written to."""
    if not 0 <= rank < size:
        raise BadInput(
            f"{name} was given rank {rank} of the group, whose ranks are 0 to {size - 1}; name one of these."
        )
    check_memory(name, written)


def check_memory(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises BadInput unless each tensor is dense and has a place of its own for every element: a failure while it is
    written would end the group."""
    for tensor in tensors:
        if kind := _unlike_plain_memory(tensor):
            raise BadInput(f"{name} was given a tensor that {kind}; pass a dense one with a place for every element.")


def _unlike_plain_memory(tensor: torch.Tensor) -> str | None:
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}"
    if tensor.is_quantized:
        return "is quantized"
    if tensor.is_meta:
        return "is on device meta and holds nothing"
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return f"has shape {tuple(tensor.shape)} and strides {tensor.stride()}, so several elements lie in one place"
    return None


def rows_of(name: str, tensor: torch.Tensor, num_rows: Sequence[int], size: int) -> Sequence[torch.Tensor]:
    """For each of the group's ranks its rows of the tensor, equally many where no numbers are given. Raises BadInput."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if tensor.dim() and (len(num_rows) == size and sum(num_rows) == rows if num_rows else rows % size == 0):
        return tensor.split(list(num_rows) or [rows // size] * size)
    said = f"split sizes {list(num_rows)}" if num_rows else "no split sizes, so equal ones"
    raise BadInput(
        f"{name} was given a tensor of shape {tuple(tensor.shape)} and {said}; pass one for each of the group's {size} ranks,"
        f" {rows} together."
    )


def _said(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"
