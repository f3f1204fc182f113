"""What every operation of a bridged group goes through: staging, the order of operations, counting and errors.

Operations of one group run in submission order in a thread of their own, so a caller is never blocked before `wait`.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from hethub.communicator import torch_private
from hethub.communicator.bridge.arithmetic import Reduction, make_reduction
from hethub.communicator.bridge.device_side import NativeLegs
from hethub.communicator.bridge.island_library import IslandLibrary
from hethub.communicator.bridge.launch_order import Turn
from hethub.communicator.bridge.messages import PointToPoint
from hethub.communicator.bridge.staging import Staged
from hethub.communicator.context import Context
from hethub.communicator.counters import Leg
from hethub.communicator.groups import debug
from hethub.communicator.groups.arguments import check_member, check_memory
from hethub.communicator.work import HethubWork, Job, Operation, Worker
from hethub.spec.errors import BadInput
from hethub.spec.ranges import show_ranks

_Turn = TypeVar("_Turn", bound=Turn)

Tensors = list[torch.Tensor]
Run = Callable[[], None]
Words = Callable[[], list[str]]


def counted(kind: type) -> type:
    """The class, whose operations (what torch calls and returns a HethubWork) have a number also where they are refused."""
    for name, operation in list(vars(kind).items()):
        is_called = not name.startswith("_") or name in ("_allgather_base", "_reduce_scatter_base")
        if is_called and inspect.isfunction(operation) and operation.__annotations__.get("return") is HethubWork:
            setattr(kind, name, _counted(operation))
    return kind


def _counted(operation: Callable[..., HethubWork]) -> Callable[..., HethubWork]:
    @functools.wraps(operation)
    def call(self: "GroupCore", *given: Any, **named: Any) -> HethubWork:
        with self.counting_refusals(operation.__name__):
            return operation(self, *given, **named)

    return call


class GroupCore(torch_private.GroupBase):
    """A member's part in a group of ours: over several islands, or inside one for the uneven collectives."""

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
        self._name = name
        self._label = f"group {name!r} (ranks {show_ranks(members)})"
        self._gloo = gloo
        self._is_default = gloo is context.gloo
        # A group with a shorter timeout than its world gives up by itself; the relays know the world's only.
        self._timeout_seconds = timeout_seconds if timeout_seconds < context.timeout_seconds else None
        self._bridge = context.bridge(name, members, self._label, timeout_seconds)
        self._stager = context.stager()
        self._legs = self._make_legs(name, timeout_seconds)
        self._worker = Worker(f"hethub-{name}", context.device.activate)
        self._submitting = threading.Lock()
        self._num_operations = 0
        self._reductions: dict[tuple[Any, torch.dtype], Reduction] = {}
        self.point_to_point = PointToPoint(gloo, context, members, self._label)
        torch_private.attach_backend(self, gloo)

    def getBackendName(self) -> str:
        return "hethub"

    def abort(self) -> None:
        """Makes what is under way fail, in every group where this is the default one.

        The groups of a world share its relays. So another group only closes its own connections (copies without
        arithmetic, messages, barriers); its reductions end with the world's, or at the timeout.
        """
        if self._is_default:
            self.context.abort()
            return
        self.point_to_point.abort()
        torch_private.break_gloo_group(self._gloo, self._rank, self._size)

    def shutdown(self) -> None:
        """Frees this group's threads and connections, behind what is under way; with the default group, the world is left, as
        `destroy_process_group` asks."""
        self._worker.stop(lambda: not self.context.given_up)
        self.point_to_point.close()
        legs, self._legs = self._legs, None
        if legs is not None and self.context.device.is_gpu and not self.context.given_up:
            legs.library.shutdown()
        if self._is_default:
            self.context.close()
        else:
            self.context.counters.fold(self._label)
            self.context.release(self._name)

    def _start_coalescing(self, device: torch.device) -> None:
        raise BadInput(
            f"{self._label} gathers all-reduces, all-gathers or reduce-scatters of one kind, and no other operations: call"
            " _coalescing_manager without a device."
        )

    def _compared(self, name: str, job: Run, tensors: Tensors, chosen: Sequence[str]) -> Run:
        """The job, run once all members have said that they are about to do the same."""
        own = debug.describe(name, self._num_operations, tensors, chosen)

        def compared() -> None:
            debug.compare(self._gloo, own, self.context.rank, self.members)
            job()

        return compared

    def _runs_in_callers(self, turn: Turn | None, opts: Any) -> bool:
        """Whether the caller's thread may run the job: it would wait anyway, and need not give up before the job does."""
        return turn is None and self._timeout_seconds is None and opts is not None and not opts.asyncOp

    def _behind_what_succeeded(self, name: str, job: Run, call: int) -> Run:
        """The job, which fails unrun where an operation of this rank has failed before it. Its messages carry `call`."""

        def checked() -> None:
            self.context.require_whole(f"{name} in {self._label}")
            self._bridge.links.call = call
            job()

        return checked

    @contextlib.contextmanager
    def counting_refusals(self, name: str) -> Iterator[None]:
        """The block may refuse an operation, perhaps on this rank alone: it is counted, so that what this rank calls next is
        not taken for it."""
        before = self._num_operations
        try:
            yield
        except BaseException:
            if self._num_operations == before:  # not counted yet; on the group's Gloo, too
                with contextlib.suppress(BadInput):  # the group is destroyed
                    self._queue(f"{name} (refused)", functools.partial(torch_private.pass_over, self._gloo), [])
            raise

    def _reduction(self, op: Any, dtype: torch.dtype) -> Reduction:
        kind = torch_private.reduce_op_kind(op)
        made = self._reductions.get((kind, dtype))
        if made is None:
            made = make_reduction(op, dtype, self._size, self.context.wire, self.context.kernels)
            if made.factor is None:
                self._reductions[kind, dtype] = made
        return made

    def _load(self, staged: Staged) -> Tensors:
        with self._bridge.clock(Leg.COPY):
            return staged.load()

    def _load_whole(self, staged: Staged) -> torch.Tensor:
        with self._bridge.clock(Leg.COPY):
            return staged.load_whole()

    def _store(self, places: Sequence[Staged]) -> None:
        with self._bridge.clock(Leg.COPY):
            for place in places:
                place.store()

    def _make_legs(self, name: str, timeout_seconds: float) -> NativeLegs | None:
        if not self.context.has_device or self._bridge.num_islands == 1:
            return None
        island = self._bridge.home
        native = None
        if len(island) > 1:
            ranks = [self.members[place] for place in island]  # of the world: other groups may have this one's name
            native = self.context.native_group(name, ranks, timeout_seconds)
        device = self.context.device
        library = IslandLibrary(native, island, self._rank, device)
        return NativeLegs(self._bridge, library, device, self.context.dispatcher)

    def _operation(self, name: str, peer: int | None = None) -> Operation:
        return Operation(name=name, group=self._label, rank=self.context.rank, explainer=self.context, peer=peer)

    def _message(self, name: str, peer: int, written: Sequence[torch.Tensor] = ()) -> Operation:
        """A send or receive with a place in the group. Raises BadInput."""
        check_member(name, peer, self._size, written)
        return self._operation(name, self.members[peer])

    def _submit(
        self, name: str, job: Run, tensors: Tensors, opts: Any = None, chosen: Words | None = None
    ) -> HethubWork:
        """Queues the job, behind those submitted before. `chosen` says what debug mode compares, by default the
        options."""
        self._check_written(name, tensors)
        return self._queue(name, job, tensors, opts, chosen=chosen)

    def _submit_natively(
        self,
        name: str,
        take_turn: Callable[[], _Turn],
        run: Callable[[_Turn], None],
        tensors: Tensors,
        opts: Any = None,
        chosen: Words | None = None,
    ) -> HethubWork:
        """Do what `_submit` does for an operation that launches legs on the island's library, in the turn taken here."""
        self._check_written(name, tensors)
        with self._submitting:
            turn = take_turn()
            try:
                work = self._queue(name, functools.partial(run, turn), tensors, opts, turn, chosen)
            except BaseException:
                turn.drop()
                raise
        turn.begin()  # behind the job: that deals with each chunk while the next ones are launched
        return work

    def _check_written(self, name: str, tensors: Tensors) -> None:
        """Raises BadInput where a result has no place to be written to. Of a reduce all ranks' tensors are checked, as in a
        native group: were the root alone to refuse, the group could not be used any more."""
        if name != "gather":
            check_memory(name, tensors)

    def _queue(
        self,
        name: str,
        job: Run,
        tensors: Tensors,
        opts: Any = None,
        turn: Turn | None = None,
        chosen: Words | None = None,
    ) -> HethubWork:
        """A job with a turn leaves it whatever happens, and never runs in the thread that takes turns."""
        self._num_operations += 1
        call = self._num_operations + debug.mark(name, tensors, opts)
        if self.context.debug:
            job = self._compared(name, job, tensors, chosen() if chosen else debug.option_words(opts))
        job = self._behind_what_succeeded(name, job, call)
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        work = HethubWork(self._operation(name), tensors, self.context.callbacks, self._timeout_seconds)
        work.end_profiled = torch_private.profiled_range(f"hethub:{name}")

        def count(seconds: float) -> None:
            self.context.counters.count_operation(self._label, name, num_bytes, seconds, self._bridge.clock.take())

        queued = Job(run=job, work=work, count=count, leave=None if turn is None else turn.leave)
        try:
            return self._worker.submit(queued, caller_waits=self._runs_in_callers(turn, opts))
        except RuntimeError as error:  # no thread to be had: the peers wait for this rank's part
            raise work.operation.failed_for_good(error) from error
