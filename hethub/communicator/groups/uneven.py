"""Uneven reduce-scatter and all-gather: who gets which range of a flat tensor is the caller's choice.

Both work on any group of the world. Inside a CPU island they exchange directly between ranks, which is faster than
Gloo's own reduce-scatter and all-gather, and add in ascending rank order: the same bits on all ranks and in every run.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.communicator.context import spanning_name
from hethub.communicator.groups.backend import context_of
from hethub.communicator.groups.process_group import HethubGroup
from hethub.communicator.work import AllOf, HethubWork
from hethub.spec.ranges import Range, covers_exactly, from_sizes


def reduce_scatter_by_ranges(
    group: dist.ProcessGroup,
    flat_input: torch.Tensor,
    ranges: Sequence[Range],
    output: torch.Tensor | None = None,
    *,
    op: Any = dist.ReduceOp.SUM,
    async_op: bool = True,
) -> HethubWork:
    """A Work after which `output` holds the sum over members of `flat_input[ranges[i]]`, i this rank's place.

    The ranges cover the one-dimensional input, may be empty and of any sizes, and are the same on all members.
    `output` may be that very slice of `flat_input`, which is also the default: the sum is then made in place.
    """
    if _stays_on_device(group, flat_input, op):
        result = _result(flat_input, ranges, output, group)
        return native_reduce_scatter(group, result, flat_input, ranges, async_op=async_op)
    spanning, name = _spanning(group), "reduce_scatter_by_ranges"
    with spanning.counting_refusals(name):
        result = _result(flat_input, ranges, output, group)
    return _waited(spanning.reduce_scatter_ranges(result, [flat_input], ranges, op, name), async_op=async_op)


def all_gather_by_ranges(
    group: dist.ProcessGroup, flat_output: torch.Tensor, ranges: Sequence[Range], *, async_op: bool = True
) -> HethubWork:
    """A Work after which every member's `flat_output` holds member i's `flat_output[ranges[i]]`, for all i."""
    if _stays_on_device(group, flat_output, dist.ReduceOp.SUM):
        _check(flat_output, ranges, group.size())
        return native_all_gather(group, flat_output, ranges, async_op=async_op)
    spanning, name = _spanning(group), "all_gather_by_ranges"
    with spanning.counting_refusals(name):
        _check(flat_output, ranges, group.size())
    return _waited(spanning.all_gather_ranges(flat_output, ranges, name), async_op=async_op)


def _stays_on_device(group: dist.ProcessGroup, flat: torch.Tensor, op: Any) -> bool:
    """Whether the vendor's library does it: ranks of one island, on devices."""
    return not isinstance(group, HethubGroup) and flat.device.type != "cpu" and op == dist.ReduceOp.SUM


def native_reduce_scatter(
    group: dist.ProcessGroup, output: torch.Tensor, flat: torch.Tensor, ranges: Sequence[Range], *, async_op: bool
) -> Any:
    """`output` becomes this member's range of the sum, by the group's own library."""
    equal, rest = _equal_and_rest(ranges)
    works, own = [], rest[group.rank()]
    if own:
        kept = output[output.numel() - own.size :]
        if kept.data_ptr() != flat[own.start : own.stop].data_ptr():
            kept.copy_(flat[own.start : own.stop])
    if equal:
        part = output[: output.numel() - own.size]
        works.append(
            torch_private.reduce_scatter_single(part, flat[: equal * len(ranges)], group=group, async_op=True),
        )
    works += [
        dist.reduce(
            kept if owner == group.rank() else flat[theirs.start : theirs.stop],
            group=group,
            group_dst=owner,
            async_op=True,
        )
        for owner, theirs in enumerate(rest)
        if theirs
    ]
    return _all_of(works, async_op=async_op)


def native_all_gather(group: dist.ProcessGroup, flat: torch.Tensor, ranges: Sequence[Range], *, async_op: bool) -> Any:
    """Every member's range of `flat` reaches all members, by the group's own library."""
    equal, rest = _equal_and_rest(ranges)
    works, place = [], group.rank()
    if equal:
        whole, part = flat[: equal * len(ranges)], flat[equal * place : equal * (place + 1)]
        works.append(torch_private.all_gather_single(whole, part, group=group, async_op=True))
    works += [
        dist.broadcast(flat[own.start : own.stop], group=group, group_src=owner, async_op=True)
        for owner, own in enumerate(rest)
        if own
    ]
    return _all_of(works, async_op=async_op)


def _equal_and_rest(ranges: Sequence[Range]) -> tuple[int, Sequence[Range]]:
    """The size of the members' equal parts, which the library's own tensor operations know, and what each has beside its
    own: of parts that are equal but for the last (`nearly_equal`), the end of that; else everything."""
    size, last = ranges[0].size, ranges[-1]
    if list(ranges) != from_sizes([size] * (len(ranges) - 1) + [max(size, last.size)]):
        return 0, ranges
    nothing = Range(0, 0)
    return size, [*[nothing] * (len(ranges) - 1), Range(last.start + size, last.stop)]


def _all_of(works: list[Any], *, async_op: bool) -> AllOf:
    work = AllOf(works)
    if not async_op:
        work.wait()
    return work


def prepare_by_ranges(group: dist.ProcessGroup) -> None:
    """Connects what these operations need; all members call it together.

    Otherwise their first call does, which then blocks until all members make it: inside a backward pass that may be
    for ever, when another member waits for this rank's result first.
    """
    _spanning(group)


def all_reduce_with_feedback(
    group: dist.ProcessGroup,
    tensor: torch.Tensor,
    residual: torch.Tensor,
    *,
    op: Any = dist.ReduceOp.SUM,
    async_op: bool = True,
) -> HethubWork:
    """A Work after which `tensor` holds the sum over members, rounding errors of a narrow wire kept in `residual`.

    `residual` (fp32, the tensor's shape, zero before the first call) belongs to the caller, who passes the same one for
    the same tensor each step. With the exact wire it stays zero.
    """
    spanning = _spanning(group)
    with spanning.counting_refusals("all_reduce_with_feedback"):
        if residual.shape != tensor.shape or residual.dtype != torch.float32:
            raise ValueError(
                f"the residual is {residual.dtype} {tuple(residual.shape)}; make it fp32 {tuple(tensor.shape)}"
            )
    return _waited(spanning.all_reduce_with_feedback(tensor, residual, op), async_op=async_op)


def _spanning(group: dist.ProcessGroup) -> HethubGroup:
    """Our own operations over the members of `group`, made at the first call for a native group."""
    if isinstance(group, HethubGroup):
        return group
    default = torch_private.default_group()
    assert default is not None, "there is no default process group: call connect() first"
    context = context_of(default)
    name = spanning_name(group.group_name)
    if name not in context.spanning:
        members = dist.get_process_group_ranks(group)
        context.spanning[name] = HethubGroup(
            context, members, name, context.gloo_group(name, members), context.timeout_seconds
        )
    spanning: HethubGroup = context.spanning[name]
    return spanning


def _result(
    flat: torch.Tensor, ranges: Sequence[Range], output: torch.Tensor | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """Where this rank's range is written. Raises ValueError."""
    _check(flat, ranges, group.size())
    mine = ranges[group.rank()]
    result = flat[mine.start : mine.stop] if output is None else output
    if result.numel() != mine.size or result.dtype != flat.dtype:
        raise ValueError(
            f"the output has {result.numel()} elements of {result.dtype}, but this rank's range {mine.size} of"
            f" {flat.dtype}; make it as large and of that type"
        )
    return result


def _check(flat: torch.Tensor, ranges: Sequence[Range], size: int) -> None:
    if flat.dim() != 1:
        raise ValueError(f"the tensor has the shape {tuple(flat.shape)}; pass a flat one (view(-1))")
    if len(ranges) != size or not covers_exactly(ranges, Range(0, flat.numel())):
        raise ValueError(
            f"{len(ranges)} ranges {[tuple(r) for r in ranges]} must hold each of the {flat.numel()} elements once,"
            f" one range per member of the group of {size}"
        )


def _waited(work: HethubWork, *, async_op: bool) -> HethubWork:
    if not async_op:
        work.wait()
    return work
