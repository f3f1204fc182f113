"""The process group that spans islands: c10d's operations on top of the bridge.

Operations of one group run in submission order in a thread of their own, so a caller is never blocked before `wait`.
Whatever moves data without arithmetic among host tensors of unequal shapes goes over the group's own Gloo group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hethub.communicator import fingerprint, torch_private
from hethub.communicator.context import Context
from hethub.communicator.native_legs import NativeLegs
from hethub.communicator.point_to_point import PointToPoint
from hethub.communicator.reduction import Reduction, make_reduction
from hethub.communicator.staging import Staged, join
from hethub.communicator.work import HethubWork, Job, Operation, Worker
from hethub.spec.ranges import Range, from_sizes, split

_ALIKE = {
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
}
"""Operations whose result tensors have the same shape on every rank."""

Tensors = list[torch.Tensor]
Run = Callable[[], None]


class HethubGroup(torch_private.GroupBase):
    """A c10d group over two islands or more (or the default group of a world)."""

    def __init__(
        self,
        context: Context,
        members: Sequence[int],
        name: str,
        gloo: torch_private.GlooGroup,
        timeout_seconds: float,
    ) -> None:
        rank = members.index(context.rank)
        super().__init__(rank, len(members))
        self.context = context
        self.members = list(members)
        self._rank, self._size = rank, len(members)
        self._label = f"group {name!r} (ranks {_brief(members)})"
        self._gloo = gloo
        # A group with a shorter timeout than its world gives up by itself; the relays know the world's only.
        self._timeout_seconds = timeout_seconds if timeout_seconds < context.timeout_seconds else None
        self._bridge = context.bridge(name, members)
        self._legs = self._make_legs(name, timeout_seconds)
        self._worker = Worker(f"hethub-{name}")
        self._num_operations = 0
        self.point_to_point = PointToPoint(gloo, context.device, context.callbacks)
        torch_private.attach_backend(self, gloo)

    def getBackendName(self) -> str:
        return "hethub"

    # ---- reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> HethubWork:
        if tensors[0].is_sparse:
            return self._submit("all_reduce", lambda: _completed(self._gloo.allreduce(tensors, opts)), tensors)
        return self._all_reduce(tensors, opts, "all_reduce")

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> HethubWork:
        return self._all_reduce(tensors, opts, "all_reduce_coalesced")

    def _all_reduce(self, tensors: Tensors, opts: Any, name: str) -> HethubWork:
        staged = [self._stage(tensor) for tensor in tensors]
        reductions = [self._reduction(_op(opts), tensor.dtype) for tensor in tensors]

        def job() -> None:
            for tensor, place, reduction in zip(tensors, staged, reductions, strict=True):
                if self._legs is not None and place.is_on_device and self._reduces_natively(tensor, reduction):
                    self._legs.all_reduce(tensor.view(-1), place.ready, reduction)
                    continue
                flat = place.load()
                contribution = reduction.prepared(flat)
                if contribution is not flat:
                    flat.copy_(contribution)
                self._bridge.all_reduce(flat, reduction)
                place.store()

        return self._submit(name, job, tensors, opts)

    def all_reduce_with_feedback(self, tensor: torch.Tensor, residual: torch.Tensor, op: Any) -> HethubWork:
        """As all-reduce; what a narrow wire rounds away on this rank is kept in `residual` and added next time."""
        staged, kept = self._stage(tensor), self._stage(residual)
        reduction = self._reduction(op, tensor.dtype)

        def job() -> None:
            self._bridge.all_reduce(staged.load(), reduction, kept.load())
            _store([staged, kept])

        return self._submit("all_reduce_with_feedback", job, [tensor])

    def _reduces_natively(self, tensor: torch.Tensor, reduction: Reduction) -> bool:
        """Whether the island's library does its leg: large contiguous tensors; all ranks of the island agree."""
        assert self._legs is not None
        large = not self._bridge.is_small(tensor, reduction) and tensor.numel() > 0
        return large and tensor.is_contiguous() and self._legs.can_reduce(reduction)

    def _make_legs(self, name: str, timeout_seconds: float) -> NativeLegs | None:
        if not self.context.device.is_gpu or self._bridge.num_islands != 2:
            return None
        island = self._bridge.home
        native = None
        if len(island) > 1:
            store = dist.PrefixStore(f"native/{name}/{island[0]}", self.context.rendezvous.store)
            native = torch_private.create_nccl_group(store, island.index(self._rank), len(island), timeout_seconds)
        return NativeLegs(self._bridge, native, self.context.device)

    def reduce(self, tensors: Tensors, opts: Any) -> HethubWork:
        ranges = self._all_at(opts.rootRank, tensors[0].numel())
        staged = self._stage(tensors[0])
        reduction = self._reduction(opts.reduceOp, tensors[0].dtype)

        def job() -> None:
            flat = reduction.prepared(staged.load())
            mine = ranges[self._rank]
            self._bridge.reduce_scatter(flat, ranges, staged.flat[mine.start : mine.stop], reduction)
            if mine:
                staged.store()

        return self._submit("reduce", job, tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> HethubWork:
        ranges = from_sizes([part.numel() for part in inputs[0]])
        return self.reduce_scatter_ranges(outputs[0], inputs[0], ranges, _op(opts), "reduce_scatter")

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> HethubWork:
        return self._scatter_equally([output], [source], opts, "reduce_scatter_tensor")

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HethubWork:
        return self._scatter_equally(outputs, inputs, opts, "reduce_scatter_tensor_coalesced")

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scatter_equally(self, outputs: Tensors, inputs: Tensors, opts: Any, name: str) -> HethubWork:
        jobs = [
            self._scatter_job(out, [source], from_sizes([out.numel()] * self._size), _op(opts))
            for out, source in zip(outputs, inputs, strict=True)
        ]
        return self._submit(name, _in_turn(jobs), outputs, opts)

    def reduce_scatter_ranges(
        self, output: torch.Tensor, sources: Tensors, ranges: Sequence[Range], op: Any, name: str
    ) -> HethubWork:
        """`output` becomes this rank's range of the reduction over the joined, flat `sources`."""
        return self._submit(name, self._scatter_job(output, sources, ranges, op), [output])

    def _scatter_job(self, output: torch.Tensor, sources: Tensors, ranges: Sequence[Range], op: Any) -> Run:
        staged = [self._stage(source) for source in sources]
        out = self._stage(output)
        reduction = self._reduction(op, output.dtype)

        def job() -> None:
            flat = reduction.prepared(join([place.load() for place in staged]))
            self._bridge.reduce_scatter(flat, ranges, out.empty(), reduction)
            out.store()

        return job

    # ---- copies

    def broadcast(self, tensors: Tensors, opts: Any) -> HethubWork:
        tensor = tensors[opts.rootTensor]
        ranges = self._all_at(opts.rootRank, tensor.numel())
        staged = self._stage(tensor)

        def job() -> None:
            flat = staged.load()
            self._bridge.all_gather(flat, ranges)
            staged.store()

        return self._submit("broadcast", job, tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> HethubWork:
        return self._submit("all_gather", self._gather_job(outputs[0], inputs[0]), outputs[0], opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> HethubWork:
        """`outputs[rank][i]` becomes rank's `inputs[i]`."""
        jobs = [self._gather_job([row[index] for row in outputs], source) for index, source in enumerate(inputs)]
        return self._submit("all_gather_coalesced", _in_turn(jobs), [tensor for row in outputs for tensor in row])

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> HethubWork:
        return self._submit("all_gather_into_tensor", self._gather_job([output], source), [output], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HethubWork:
        jobs = [self._gather_job([out], source) for out, source in zip(outputs, inputs, strict=True)]
        return self._submit("all_gather_into_tensor_coalesced", _in_turn(jobs), outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _gather_job(self, outputs: Tensors, source: torch.Tensor) -> Run:
        """The outputs, one per rank or one for all, become every rank's source in rank order."""
        sizes = [out.numel() for out in outputs] if len(outputs) == self._size else [source.numel()] * self._size
        ranges = from_sizes(sizes)
        places = [self._stage(out) for out in outputs]
        own = self._stage(source)

        def job() -> None:
            flats = [place.empty() for place in places]
            whole = flats[0] if len(flats) == 1 else torch.empty(sum(sizes), dtype=source.dtype)
            mine = ranges[self._rank]
            whole[mine.start : mine.stop].copy_(own.load())
            self._bridge.all_gather(whole, ranges)
            if len(flats) > 1:
                for flat, piece in zip(flats, ranges, strict=True):
                    flat.copy_(whole[piece.start : piece.stop])
            _store(places)

        return job

    def all_gather_ranges(self, flat_output: torch.Tensor, ranges: Sequence[Range], name: str) -> HethubWork:
        """Every rank's range of the flat tensor is written to all ranks' tensors in place."""
        staged = self._stage(flat_output)

        def job() -> None:
            self._bridge.all_gather(staged.load(), ranges)
            staged.store()

        return self._submit(name, job, [flat_output])

    # ---- data that only changes place

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> HethubWork:
        places = [self._stage(out) for out in outputs[0]] if outputs else []
        source = self._stage(inputs[0])

        def job() -> None:
            received = {rank: place.empty() for rank, place in enumerate(places)}
            self._bridge.exchange({opts.rootRank: source.load()}, received)
            _store(places)

        return self._submit("gather", job, outputs[0] if outputs else inputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> HethubWork:
        place = self._stage(outputs[0])
        sources = [self._stage(tensor) for tensor in inputs[0]] if inputs else []

        def job() -> None:
            sent = {rank: source.load() for rank, source in enumerate(sources)}
            self._bridge.exchange(sent, {opts.rootRank: place.empty()})
            _store([place])

        return self._submit("scatter", job, outputs)

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> HethubWork:
        place, own = self._stage(output), self._stage(source)
        receive_ranges = self._row_ranges(output, output_sizes)
        send_ranges = self._row_ranges(source, input_sizes)

        def job() -> None:
            self._bridge.exchange(_by_rank(own.load(), send_ranges), _by_rank(place.empty(), receive_ranges))
            _store([place])

        return self._submit("all_to_all_single", job, [output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HethubWork:
        places = [self._stage(out) for out in outputs]
        sources = [self._stage(source) for source in inputs]

        def job() -> None:
            sent = {rank: source.load() for rank, source in enumerate(sources)}
            self._bridge.exchange(sent, {rank: place.empty() for rank, place in enumerate(places)})
            _store(places)

        return self._submit("all_to_all", job, outputs)

    def barrier(self, opts: Any = None) -> HethubWork:
        return self._submit("barrier", lambda: _completed(self._gloo.barrier()), [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._gloo.monitored_barrier(timeout, wait_all_ranks)

    # ---- point to point

    def send(self, tensors: Tensors, peer: int, tag: int) -> torch_private.WorkBase:
        return self.point_to_point.send(tensors[0], peer, tag, self._operation("send", tensors))

    def recv(self, tensors: Tensors, peer: int, tag: int) -> torch_private.WorkBase:
        return self.point_to_point.receive(tensors[0], peer, tag, self._operation("recv", tensors))

    def recv_anysource(self, tensors: Tensors, tag: int) -> torch_private.WorkBase:
        return self.point_to_point.receive_any(tensors[0], tag, self._operation("recv from any rank", tensors))

    # ---- the rest

    def abort(self) -> None:
        torch_private.break_gloo_group(self._gloo, self._rank, self._size)

    def shutdown(self) -> None:
        self._worker.stop()
        self.point_to_point.close()

    def _compared(self, name: str, job: Run, tensors: Tensors) -> Run:
        """The job, run once all members have said that they are about to do the same."""
        self._num_operations += 1
        own = fingerprint.describe(name, self._num_operations, tensors, alike=name in _ALIKE)

        def compared() -> None:
            fingerprint.compare(self._gloo, own, self.context.rank, self.members)
            job()

        return compared

    def _reduction(self, op: Any, dtype: torch.dtype) -> Reduction:
        return make_reduction(op, dtype, self._size, self.context.wire)

    def _stage(self, tensor: torch.Tensor) -> Staged:
        return Staged(tensor, self.context.device)

    def _all_at(self, root: int, num_elements: int) -> list[Range]:
        return from_sizes([num_elements if rank == root else 0 for rank in range(self._size)])

    def _row_ranges(self, tensor: torch.Tensor, num_rows: list[int]) -> list[Range]:
        """Per rank its rows of `tensor` as elements of the flat tensor; no sizes given means equal ones."""
        if not num_rows:
            return split(tensor.numel(), self._size)
        row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
        return from_sizes([rows * row for rows in num_rows])

    def _operation(self, name: str, tensors: Tensors) -> Operation:
        return Operation(name=name, group=self._label, rank=self.context.rank, explainer=self.context)

    def _submit(self, name: str, job: Run, tensors: Tensors, opts: Any = None) -> HethubWork:
        if self.context.debug:
            job = self._compared(name, job, tensors)
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        work = HethubWork(self._operation(name, tensors), tensors, self.context.callbacks, self._timeout_seconds)
        work.end_profiled = torch_private.profiled_range(f"hethub:{name}")
        count = self.context.counters.count_operation
        return self._worker.submit(
            Job(run=job, work=work, count=lambda seconds: count(self._label, name, num_bytes, seconds)),
            caller_waits=opts is not None and not opts.asyncOp,
        )


def _op(opts: Any) -> Any:
    return opts.reduceOp if opts is not None else dist.ReduceOp.SUM


def _completed(work: Any) -> None:
    work.wait()


def _store(places: Sequence[Staged]) -> None:
    for place in places:
        place.store()


def _by_rank(flat: torch.Tensor, ranges: Sequence[Range]) -> dict[int, torch.Tensor]:
    return {rank: flat[piece.start : piece.stop] for rank, piece in enumerate(ranges)}


def _in_turn(jobs: Sequence[Run]) -> Run:
    def job() -> None:
        for each in jobs:
            each()

    return job


def _brief(ranks: Sequence[int]) -> str:
    """Ranks as `0-3` where they are consecutive, else listed."""
    consecutive = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}-{ranks[-1]}" if consecutive else ", ".join(map(str, ranks))
