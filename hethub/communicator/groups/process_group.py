"""The process group that spans islands: c10d's operations on top of the bridge.

Whatever moves data without arithmetic among host tensors of unequal shapes goes over the group's own Gloo group.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.communicator.bridge.arithmetic import Reduction
from hethub.communicator.bridge.staging import Staged
from hethub.communicator.groups.arguments import check_count, check_member, check_parts, check_row, rows_of
from hethub.communicator.groups.debug import option_words, range_words, reduction_word
from hethub.communicator.groups.operations import GroupCore, Run, Tensors, Words, counted
from hethub.communicator.work import HethubWork
from hethub.spec.ranges import Range, from_sizes

__all__ = ["HethubGroup", "Run", "Tensors", "Words"]


@torch_private.run_as_written
@counted
class HethubGroup(GroupCore):
    """A c10d group of ours: over several islands, or inside one for the uneven collectives."""

    # ---- reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> HethubWork:
        if tensors[0].is_sparse:
            return self._queue("all_reduce", lambda: _completed(self._gloo.allreduce(tensors, opts)), tensors)
        return self._all_reduce(tensors, opts, "all_reduce")

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> HethubWork:
        return self._all_reduce(tensors, opts, "all_reduce_coalesced")

    def _all_reduce(self, tensors: Tensors, opts: Any, name: str) -> HethubWork:
        """Tensors of one type are reduced as one, so a list of small ones pays one latency."""
        by_type: dict[torch.dtype, Tensors] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        parts = [(self._stager.stage(*alike), self._reduction(_op(opts), dtype)) for dtype, alike in by_type.items()]
        if self._legs is not None and len(tensors) == 1 and self._reduces_natively(tensors[0], parts[0][1]):
            return self._all_reduce_natively(tensors[0], *parts[0], name, opts)

        def job() -> None:
            for staged, reduction in parts:
                self._bridge.all_reduce(self._load_whole(staged), reduction)
                self._store([staged])

        return self._submit(name, job, tensors, opts)

    def _all_reduce_natively(
        self, tensor: torch.Tensor, staged: Staged, reduction: Reduction, name: str, opts: Any
    ) -> HethubWork:
        """Do what `_all_reduce` does, with legs on the island's library, in the turn taken here."""
        legs = self._legs
        assert legs is not None
        run = partial(legs.all_reduce, tensor, staged.ready, reduction)
        return self._submit_natively(name, partial(legs.take_turn, staged.ready), run, [tensor], opts)

    def all_reduce_with_feedback(self, tensor: torch.Tensor, residual: torch.Tensor, op: Any) -> HethubWork:
        """As all-reduce; what a narrow wire rounds away on this rank is kept in `residual` and added next time."""
        staged, kept = self._stager.stage(tensor), self._stager.stage(residual)
        reduction = self._reduction(op, tensor.dtype)

        def job() -> None:
            self._bridge.all_reduce(self._load_whole(staged), reduction, self._load_whole(kept))
            self._store([staged, kept])

        return self._submit("all_reduce_with_feedback", job, [tensor], chosen=lambda: [reduction_word(op)])

    def _reduces_natively(self, tensor: torch.Tensor, reduction: Reduction) -> bool:
        """Whether the island's library does its leg: for large tensors, whatever their strides, in which ranks may differ."""
        assert self._legs is not None
        large = not self._bridge.is_small(tensor, reduction) and tensor.numel() > 0
        return large and self._stager.on_device(tensor) and self._legs.library.can_reduce(reduction)

    def reduce(self, tensors: Tensors, opts: Any) -> HethubWork:
        tensor, reduction = tensors[0], self._reduction(opts.reduceOp, tensors[0].dtype)
        ranges = self._all_at("reduce", opts.rootRank, tensor)
        if self._legs is not None and self._stager.on_device(tensor) and self._legs.library.can_reduce(reduction):
            out = tensor if self._rank == opts.rootRank else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return self._scatter_natively(out, [tensor], ranges, reduction, "reduce", None, opts, told=tensors)
        staged = self._stager.stage(tensor)

        def job() -> None:
            flat = self._load_whole(staged)
            mine = ranges[self._rank]
            out = flat[mine.start : mine.stop]
            self._bridge.reduce_scatter(reduction.prepared(flat), ranges, out, reduction)
            if mine:
                self._store([staged])

        return self._submit("reduce", job, tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> HethubWork:
        check_row("reduce_scatter", inputs[0], outputs[0], self._rank, self._size)
        ranges = from_sizes([part.numel() for part in inputs[0]])
        return self.reduce_scatter_ranges(outputs[0], inputs[0], ranges, _op(opts), "reduce_scatter")

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> HethubWork:
        return self._scatter_equally([output], [source], opts, "reduce_scatter_tensor")

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HethubWork:
        return self._scatter_equally(outputs, inputs, opts, "reduce_scatter_tensor_coalesced")

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scatter_equally(self, outputs: Tensors, inputs: Tensors, opts: Any, name: str) -> HethubWork:
        for out, source in zip(outputs, inputs, strict=True):
            check_parts(name, out, source, self._size)
        if len(outputs) == 1:
            ranges = from_sizes([outputs[0].numel()] * self._size)
            return self._scatter(outputs[0], inputs, ranges, _op(opts), name, lambda: option_words(opts), opts)
        jobs = [
            self._scatter_job(out, [source], from_sizes([out.numel()] * self._size), _op(opts))
            for out, source in zip(outputs, inputs, strict=True)
        ]
        return self._submit(name, _in_turn(jobs), outputs, opts)

    def reduce_scatter_ranges(
        self, output: torch.Tensor, sources: Tensors, ranges: Sequence[Range], op: Any, name: str
    ) -> HethubWork:
        """`output` becomes this rank's range of the reduction over the joined, flat `sources`."""
        return self._scatter(output, sources, ranges, op, name, lambda: [reduction_word(op), *range_words(ranges)])

    def _scatter(
        self,
        output: torch.Tensor,
        sources: Tensors,
        ranges: Sequence[Range],
        op: Any,
        name: str,
        chosen: Words,
        opts: Any = None,
    ) -> HethubWork:
        """Tensors of a device are reduced by the island's library, in the turn taken here."""
        reduction = self._reduction(op, output.dtype)
        if self._legs is not None and self._stager.on_device(sources[0]) and self._legs.library.can_reduce(reduction):
            return self._scatter_natively(output, sources, ranges, reduction, name, chosen, opts)
        job = self._scatter_job(output, sources, ranges, op)
        return self._submit(name, job, [output], opts, chosen=chosen)

    def _scatter_natively(
        self,
        output: torch.Tensor,
        sources: Tensors,
        ranges: Sequence[Range],
        reduction: Reduction,
        name: str,
        chosen: Words | None,
        opts: Any,
        told: Tensors | None = None,
    ) -> HethubWork:
        """`told` are the operation's tensors, where they are not `output`: all ranks' must be alike."""
        legs, ready = self._legs, self._stager.device.current_stream().record()
        assert legs is not None
        begin = partial(legs.begin_reduce_scatter, sources, ranges, ready, reduction)
        run = partial(legs.reduce_scatter, first=ranges[self._rank].start, out=output, reduction=reduction)
        return self._submit_natively(name, begin, run, told or [output], opts, chosen)

    def _scatter_job(self, output: torch.Tensor, sources: Tensors, ranges: Sequence[Range], op: Any) -> Run:
        staged, out = self._stager.stage(*sources), self._stager.stage(output)
        reduction = self._reduction(op, output.dtype)

        def job() -> None:
            flat = reduction.prepared(self._load_whole(staged))
            self._bridge.reduce_scatter(flat, ranges, out.empty_whole(), reduction)
            self._store([out])

        return job

    # ---- copies

    def broadcast(self, tensors: Tensors, opts: Any) -> HethubWork:
        tensor = tensors[opts.rootTensor]
        return self._gather_in_place("broadcast", tensor, self._all_at("broadcast", opts.rootRank, tensor), opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> HethubWork:
        check_row("all_gather", outputs[0], inputs[0], self._rank, self._size)
        if self._moves_natively(inputs[0]):
            ranges = from_sizes([output.numel() for output in outputs[0]])
            return self._gather_natively("all_gather", outputs[0], ranges, inputs[0], opts)
        return self._submit("all_gather", self._gather_job(outputs[0], inputs[0]), outputs[0], opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> HethubWork:
        """`outputs[rank][i]` becomes rank's `inputs[i]`."""
        name, columns = "all_gather_coalesced", [list(column) for column in zip(*outputs, strict=True)]
        for column, source in zip(columns, inputs, strict=True):
            check_row(name, column, source, self._rank, self._size)
        jobs = [self._gather_job(column, source) for column, source in zip(columns, inputs, strict=True)]
        return self._submit(name, _in_turn(jobs), [tensor for row in outputs for tensor in row])

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> HethubWork:
        name, ranges = "all_gather_into_tensor", from_sizes([source.numel()] * self._size)
        check_parts(name, source, output, self._size)
        if self._moves_natively(output):
            return self._gather_natively(name, [output], ranges, source, opts)
        return self._submit(name, self._gather_job([output], source), [output], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HethubWork:
        name = "all_gather_into_tensor_coalesced"
        for out, source in zip(outputs, inputs, strict=True):
            check_parts(name, source, out, self._size)
        jobs = [self._gather_job([out], source) for out, source in zip(outputs, inputs, strict=True)]
        return self._submit(name, _in_turn(jobs), outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _gather_job(self, outputs: Tensors, source: torch.Tensor) -> Run:
        """The outputs, one per rank or one for all, become every rank's source in rank order."""
        sizes = [out.numel() for out in outputs] if len(outputs) == self._size else [source.numel()] * self._size
        ranges = from_sizes(sizes)
        places, own = self._stager.stage(*outputs), self._stager.stage(source)

        def job() -> None:
            whole = places.empty_whole()
            mine = ranges[self._rank]
            whole[mine.start : mine.stop].copy_(self._load_whole(own))
            self._bridge.all_gather(whole, ranges)
            self._store([places])

        return job

    def all_gather_ranges(self, flat_output: torch.Tensor, ranges: Sequence[Range], name: str) -> HethubWork:
        """Every rank's range of the flat tensor is written to all ranks' tensors in place."""
        return self._gather_in_place(name, flat_output, ranges, chosen=lambda: range_words(ranges))

    def _gather_in_place(
        self, name: str, tensor: torch.Tensor, ranges: Sequence[Range], opts: Any = None, chosen: Words | None = None
    ) -> HethubWork:
        if self._moves_natively(tensor):
            return self._gather_natively(name, [tensor], ranges, opts=opts, chosen=chosen)
        staged = self._stager.stage(tensor)

        def job() -> None:
            self._bridge.all_gather(self._load_whole(staged), ranges)
            self._store([staged])

        return self._submit(name, job, [tensor], opts, chosen)

    def _moves_natively(self, tensor: torch.Tensor) -> bool:
        """Whether the island's library does its leg; all ranks of the island agree."""
        return self._legs is not None and self._stager.on_device(tensor)

    def _gather_natively(
        self,
        name: str,
        outputs: Tensors,
        ranges: Sequence[Range],
        own: torch.Tensor | None = None,
        opts: Any = None,
        chosen: Words | None = None,
    ) -> HethubWork:
        legs, ready = self._legs, self._stager.device.current_stream().record()
        assert legs is not None

        run = partial(legs.all_gather, outputs, ranges, own, ready)
        return self._submit_natively(name, partial(legs.take_turn, ready), run, outputs, opts, chosen)

    # ---- data that only changes place

    def _move_natively(
        self, name: str, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor], tensors: Tensors, opts: Any
    ) -> HethubWork:
        legs, ready = self._legs, self._stager.device.current_stream().record()
        assert legs is not None

        begin = partial(legs.begin_all_to_all, sent, received, ready)
        run = partial(legs.all_to_all, received=received)
        return self._submit_natively(name, begin, run, tensors, chosen=lambda: option_words(opts))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> HethubWork:
        tensors = outputs[0] if outputs else inputs
        check_member("gather", opts.rootRank, self._size, outputs[0] if outputs else [])
        if outputs:
            check_row("gather", tensors, inputs[0], self._rank, self._size)
        if self._moves_natively(inputs[0]):
            received = dict(enumerate(outputs[0])) if outputs else {}
            return self._move_natively("gather", {opts.rootRank: inputs[0]}, received, tensors, opts)
        places = [self._stager.stage(*outputs[0])] if outputs else []
        source = self._stager.stage(inputs[0])

        def job() -> None:
            received = dict(enumerate(place for staged in places for place in staged.empty()))
            self._bridge.all_to_all({opts.rootRank: self._load_whole(source)}, received)
            self._store(places)

        return self._submit("gather", job, tensors, chosen=lambda: option_words(opts))

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> HethubWork:
        check_member("scatter", opts.rootRank, self._size)
        if inputs:
            check_row("scatter", inputs[0], outputs[0], self._rank, self._size)
        if self._moves_natively(outputs[0]):
            given = dict(enumerate(inputs[0])) if inputs else {}
            return self._move_natively("scatter", given, {opts.rootRank: outputs[0]}, outputs, opts)
        place = self._stager.stage(outputs[0])
        sources = [self._stager.stage(*inputs[0])] if inputs else []

        def job() -> None:
            sent = dict(enumerate(source for staged in sources for source in self._load(staged)))
            self._bridge.all_to_all(sent, {opts.rootRank: place.empty_whole()})
            self._store([place])

        return self._submit("scatter", job, outputs, chosen=lambda: option_words(opts))

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> HethubWork:
        name = "all_to_all_single"
        sources, places = (rows_of(name, *of, self._size) for of in ((source, input_sizes), (output, output_sizes)))
        check_row(name, places, sources[self._rank], self._rank, self._size)
        if self._moves_natively(output):
            return self._move_natively(name, dict(enumerate(sources)), dict(enumerate(places)), [output], opts)
        place, own = self._stager.stage(output), self._stager.stage(source)
        send_ranges, receive_ranges = (from_sizes([rows.numel() for rows in of]) for of in (sources, places))

        def job() -> None:
            sent = _by_rank(self._load_whole(own), send_ranges)
            self._bridge.all_to_all(sent, _by_rank(place.empty_whole(), receive_ranges))
            self._store([place])

        return self._submit(name, job, [output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HethubWork:
        check_count("all_to_all", outputs, self._size)
        check_row("all_to_all", inputs, outputs[self._rank], self._rank, self._size)
        if self._moves_natively(outputs[0]):
            given, received = dict(enumerate(inputs)), dict(enumerate(outputs))
            return self._move_natively("all_to_all", given, received, outputs, opts)
        places, sources = self._stager.stage(*outputs), self._stager.stage(*inputs)

        def job() -> None:
            sent = dict(enumerate(self._load(sources)))
            self._bridge.all_to_all(sent, dict(enumerate(places.empty())))
            self._store([places])

        return self._submit("all_to_all", job, outputs)

    def barrier(self, opts: Any = None) -> HethubWork:
        return self._submit("barrier", lambda: _completed(self._gloo.barrier()), [], opts)

    def monitored_barrier(self, *given: Any, **named: Any) -> None:
        self._gloo.monitored_barrier(*given, **named)

    # ---- point to point

    def send(self, tensors: Tensors, peer: int, tag: int) -> torch_private.WorkBase:
        return self.point_to_point.send(tensors[0], peer, tag, self._message("send", peer))

    def recv(self, tensors: Tensors, peer: int, tag: int) -> torch_private.WorkBase:
        return self.point_to_point.receive(tensors[0], peer, tag, self._message("recv", peer, tensors))

    def recv_anysource(self, tensors: Tensors, tag: int) -> torch_private.WorkBase:
        return self.point_to_point.receive_any(tensors[0], tag, self._operation("recv from any rank"))

    # ---- the rest

    def _all_at(self, name: str, root: int, tensor: torch.Tensor) -> list[Range]:
        check_member(name, root, self._size)
        return from_sizes([tensor.numel() if rank == root else 0 for rank in range(self._size)])


def _op(opts: Any) -> Any:
    return opts.reduceOp if opts is not None else dist.ReduceOp.SUM


def _completed(work: Any) -> None:
    work.wait()


def _by_rank(flat: torch.Tensor, ranges: Sequence[Range]) -> dict[int, torch.Tensor]:
    return {rank: flat[piece.start : piece.stop] for rank, piece in enumerate(ranges)}


def _in_turn(jobs: Sequence[Run]) -> Run:
    def job() -> None:
        for each in jobs:
            each()

    return job
