"""A rank's pieces of tensors: an operator run on them, and moves between states by collectives of uneven pieces."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hethub.communicator import all_gather_by_ranges, reduce_scatter_by_ranges
from hethub.communicator.torch_private import all_gather_single
from hethub.spec.errors import BadInput
from hethub.spec.ranges import Range
from hethub.synthesis.costs import Move
from hethub.synthesis.graph import Operator, schema_of
from hethub.synthesis.rules import CARRIED_AS, PARTIAL, WHOLE, Cut, Rule, State
from hethub.synthesis.table import in_order, order_of

# Arguments that say the shape of the output; a piece of it is smaller.
OUTPUT_SIZES = ("size", "shape", "input_sizes")


def local_shape(shape: Sequence[int], state: State, share: int, atoms: int) -> tuple[int, ...]:
    """The shape of a rank's part of a tensor in `state`, where the rank has `share` of the axis's `atoms`."""
    if not isinstance(state, Cut):
        return tuple(shape)
    return tuple(size // atoms * share if d == state.dim else size for d, size in enumerate(shape))


def bounds(shape: Sequence[int], cut: Cut, shares: Sequence[int]) -> list[tuple[int, int]]:
    """Each rank's range of every block of the cut dimension."""
    unit = shape[cut.dim] // cut.blocks // max(sum(shares), 1)
    ends = [unit * sum(shares[: rank + 1]) for rank in range(len(shares))]
    return list(zip([0, *ends], ends, strict=False))


def regions(whole: torch.Tensor, cut: Cut, shares: Sequence[int]) -> list[torch.Tensor]:
    """Every rank's piece where it lies in the whole tensor, the cut dimension as one of blocks and one inside them."""
    blocks = whole.unflatten(cut.dim, (cut.blocks, whole.shape[cut.dim] // cut.blocks))
    return [blocks.narrow(cut.dim + 1, start, stop - start) for start, stop in bounds(whole.shape, cut, shares)]


def piece(whole: torch.Tensor, cut: Cut, shares: Sequence[int], rank: int) -> torch.Tensor:
    """`rank`'s piece, in memory of its own."""
    mine = regions(whole, cut, shares)[rank].clone(memory_format=torch.contiguous_format)
    return mine.flatten(cut.dim, cut.dim + 1)


def packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of one part after the other."""
    sizes = [part.numel() for part in parts]
    flat = parts[0].new_empty(sum(sizes))
    for part, into in zip(parts, flat.split(sizes), strict=True):
        into.view(part.shape).copy_(part)
    return flat


def joined(pieces: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """The whole tensor of every rank's piece."""
    apart = [part.unflatten(cut.dim, (cut.blocks, part.shape[cut.dim] // cut.blocks)) for part in pieces]
    return torch.cat(apart, cut.dim + 1).flatten(cut.dim, cut.dim + 1).contiguous()


class OwnCall:
    """An operator as a rank with `share` of the axis's `atoms` calls it: from its parts of the inputs to its parts of
    what is made, whose `shapes` and `dtypes` are of the whole. What no step changes is settled once.

    A rank without a share calls nothing: many kernels refuse empty tensors, and what it would make is empty, or a sum
    of nothing.
    """

    def __init__(
        self,
        operator: Operator,
        rule: Rule,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        share: int,
        atoms: int,
    ) -> None:
        self._operator, self._dtypes, self._is_cut = operator, dtypes, rule.is_cut
        self._local = [
            local_shape(shape, state, share, atoms) for shape, state in zip(shapes, rule.outputs, strict=True)
        ]
        # addmm adds its own part of the bias without a share
        self._is_idle = rule.is_cut and not share and PARTIAL not in rule.inputs
        self._order = order_of(operator)
        self._makes_all = None not in operator.outputs
        self._call: Callable[[list[torch.Tensor]], tuple[Any, ...]] | None = None

    def __call__(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if self._is_idle:
            device = tensors[0].device
            return tuple(torch.zeros(s, dtype=d, device=device) for s, d in zip(self._local, self._dtypes, strict=True))
        if self._order != "any":
            tensors = [in_order(tensor, self._order) for tensor in tensors]
        operator = self._operator
        if self._call is None:
            args = local_arguments(operator, self._local, tensors) if self._is_cut else operator.args
            self._call = operator.caller(args)
        results = self._call(tensors)
        if self._makes_all:
            return results
        return tuple(result for result, number in zip(results, operator.outputs, strict=True) if number is not None)


def local_arguments(
    operator: Operator, local: Sequence[tuple[int, ...]], tensors: list[torch.Tensor]
) -> tuple[Any, ...]:
    """The operator's arguments with the shape of the rank's output in place of the whole one's."""
    args = list(operator.args)
    for number, argument in enumerate(schema_of(operator.target).arguments[: len(args)]):
        if argument.name in OUTPUT_SIZES:
            args[number] = list(local[0])
        elif argument.name == "N":  # group norm's samples
            args[number] = tensors[0].shape[0]
        elif argument.name == "bias_sizes" and args[number] is not None:
            args[number] = [tensors[0].shape[1]]
    return tuple(args)


class Summing:
    """A sum over all ranks that is under way, or a tensor that is there already."""

    def __init__(self, tensors: list[torch.Tensor], work: Any = None) -> None:
        self.tensors, self._work = tensors, work  # what it holds, this rank's part of the sum first
        self.is_scattered = len(tensors) > 1

    def result(self) -> torch.Tensor:
        """This rank's part of the sum."""
        if self._work is not None:
            self._work.wait()
        self._work = None
        del self.tensors[1:]
        return self.tensors[0]


class Exchange:
    """The collectives of one rank's part of a program, over a group that all ranks of the program are in."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def require_same(self, number: int, fault: str) -> None:
        """Raises BadInput(`fault`) on every rank where ranks have unlike numbers."""
        ends = torch.tensor([number, -number])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        if int(ends[0]) != -int(ends[1]):
            raise BadInput(fault)

    def move(
        self, move: Move, held: torch.Tensor, shape: Sequence[int], before: Sequence[int], after: Sequence[int]
    ) -> torch.Tensor:
        """This rank's part of a tensor of `shape` in the target state, `held` being its part in the source state.

        `before` and `after` are the ranks' shares of the axes of both states, where these are cuts.
        """
        source, target = move.source, move.target
        if isinstance(source, Cut):
            if target == WHOLE:
                return self._gather(held, source, shape, before, padded=move.collective == "padded all-gather")
            if isinstance(target, Cut):
                return self._exchange(held, source, target, shape, before, after)
            return self._among_zeros(held, source, shape, before)
        if source == PARTIAL:
            return self.start(held, target, after).result()
        if isinstance(target, Cut):
            return piece(held, target, after, self.rank)
        return held if self.rank == 0 else torch.zeros_like(held)

    def start(self, held: torch.Tensor, target: State, after: Sequence[int]) -> Summing:
        """Begins to add up all ranks' `held`, for this rank's part of the sum in `target`; all ranks begin their sums
        in the same order."""
        if not isinstance(target, Cut):
            result = held.clone(memory_format=torch.contiguous_format)
            return Summing([result], dist.all_reduce(result, group=self.group, async_op=True))
        is_packed = target == Cut(0, 1) and held.is_contiguous()
        flat = held.view(-1) if is_packed else packed(regions(held, target, after))
        ranges = self._ranges(held.shape, target, after)
        output = held.new_empty(local_shape(held.shape, target, after[self.rank], sum(after)))
        work = reduce_scatter_by_ranges(self.group, flat, ranges, output.view(-1), async_op=True)
        return Summing([output, flat], work)

    def _gather(
        self, held: torch.Tensor, cut: Cut, shape: Sequence[int], shares: Sequence[int], padded: bool
    ) -> torch.Tensor:
        narrow = held.view(CARRIED_AS.get(held.dtype, held.dtype))
        ranges, shapes = self._ranges(shape, cut, shares), [local_shape(shape, cut, n, sum(shares)) for n in shares]
        if padded:
            largest = max(r.size for r in ranges)
            own = narrow.new_zeros(largest)
            own[: narrow.numel()].view(narrow.shape).copy_(narrow)
            flat = narrow.new_empty(self.size * largest)
            all_gather_single(flat, own, group=self.group)
            starts = [rank * largest for rank in range(self.size)]
        else:
            flat, starts = narrow.new_empty(ranges[-1].stop), [r.start for r in ranges]
            flat[ranges[self.rank].start : ranges[self.rank].stop].view(narrow.shape).copy_(narrow)
            all_gather_by_ranges(self.group, flat, ranges, async_op=False)
            if cut == Cut(0, 1):
                return flat.view(tuple(shape)).view(held.dtype)
        pieces = [flat.narrow(0, start, r.size).view(own) for start, r, own in zip(starts, ranges, shapes, strict=True)]
        return joined(pieces, cut).view(held.dtype)

    def _exchange(
        self, held: torch.Tensor, source: Cut, target: Cut, shape: Sequence[int], before: Sequence[int],
        after: Sequence[int],
    ) -> torch.Tensor:  # fmt: skip
        narrow = held.view(CARRIED_AS.get(held.dtype, held.dtype))
        parts = regions(narrow, target, after)
        local = local_shape(shape, target, after[self.rank], sum(after))
        shapes = [local_shape(local, source, share, sum(before)) for share in before]
        sizes = [torch.Size(part).numel() for part in shapes]
        received = narrow.new_empty(sum(sizes))
        dist.all_to_all_single(received, packed(parts), sizes, [part.numel() for part in parts], group=self.group)
        pieces = [part.view(own) for part, own in zip(received.split(sizes), shapes, strict=True)]
        return joined(pieces, source).view(held.dtype)

    def _among_zeros(self, held: torch.Tensor, cut: Cut, shape: Sequence[int], shares: Sequence[int]) -> torch.Tensor:
        whole = held.new_zeros(tuple(shape))
        mine = regions(whole, cut, shares)[self.rank]
        mine.copy_(held.unflatten(cut.dim, mine.shape[cut.dim : cut.dim + 2]))
        return whole

    @staticmethod
    def _ranges(shape: Sequence[int], cut: Cut, shares: Sequence[int]) -> list[Range]:
        """Each rank's range of the flat tensor that holds one piece after the other."""
        row = torch.Size([n for d, n in enumerate(shape) if d != cut.dim]).numel() * cut.blocks
        return [Range(start * row, stop * row) for start, stop in bounds(shape, cut, shares)]
