"""Native groups: one launch order with all others, and tensors of any layout.

What is not plain memory is copied, and results are copied back.

torch's Gloo takes a tensor's memory as it lies, whatever its strides: all-reduce, reduce, broadcast, scatter and
reduce-scatter of `base[::2]` end without an error and with wrong numbers (torch 2.13). NCCL and RCCL refuse most such
tensors, but add two ranks' memory as it lies where one rank's is contiguous and the other's is channels-last. Groups
over islands stage every layout themselves.

torch's Gloo compares the shapes of a reduce-scatter's tensors dimension by dimension, also beyond those that the smaller
has, and cuts an all-to-all's tensor into equal parts without asking whether it can (torch 2.13): an output without
dimensions ends the process, an input that stacks the parts is refused or read beyond its end, and the rest of an
all-to-all goes nowhere. An all-gather whose output stacks the parts is refused. A message to or from a rank that the group
does not have waits until the timeout, or ends the process. So these are checked here, and tensors of unlike dimensions
passed flat.

NCCL and RCCL gather the messages of `batch_isend_irecv` and send them at its end, with one Work for all: results are
copied back behind that one.

Collectives of device tensors launch in a turn (`bridge.launch_order`). Messages take none: they have communicators of
their own, and a send that waited for a turn could be what another rank needs before it submits what the turn waits for.
"""

import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hethub.communicator import torch_private
from hethub.communicator.bridge.staging import is_plain
from hethub.communicator.groups.arguments import check_member, check_parts, rows_of
from hethub.communicator.work import WaitedWork, writing

_WRITTEN = {
    "allreduce": "w",
    "allreduce_coalesced": "w",
    "reduce": "w",
    "broadcast": "w",
    "reduce_scatter": "wr",
    "_reduce_scatter_base": "wr",
    "reduce_scatter_single": "wr",
    "reduce_scatter_tensor_coalesced": "wr",
    "reduce_scatter_single_coalesced": "wr",
    "allgather": "wr",
    "allgather_coalesced": "wr",
    "_allgather_base": "wr",
    "all_gather_single": "wr",
    "allgather_into_tensor_coalesced": "wr",
    "all_gather_single_coalesced": "wr",
    "gather": "wr",
    "scatter": "wr",
    "alltoall": "wr",
    "alltoall_base": "wr",
    "all_to_all_single": "wr",
    "barrier": "",
    "send": "r",
    "recv": "w",
    "recv_anysource": "w",
}
"""The first arguments of each operation: tensors, or lists of them, that are written (w) or only read (r)."""

_MESSAGES = {"send", "recv", "recv_anysource"}
_SCATTERS = {"_reduce_scatter_base": "reduce_scatter_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
_SCATTERS |= dict.fromkeys(
    ["reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"], "reduce_scatter_tensor_coalesced"
)
_GATHERS = dict.fromkeys(["_allgather_base", "all_gather_single"], "all_gather_into_tensor")
_GATHERS |= dict.fromkeys(
    ["allgather_into_tensor_coalesced", "all_gather_single_coalesced"], "all_gather_into_tensor_coalesced"
)
_EXCHANGES = {"alltoall_base", "all_to_all_single"}

TurnOf = Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]]
"""The turn to launch a collective of these tensors in."""

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors as they were given, each with its copy in plain memory."""

_gathered: "weakref.WeakKeyDictionary[dist.ProcessGroup, Copies]" = weakref.WeakKeyDictionary()
"""What the operations write to that a group is gathering at present."""

_ours: "weakref.WeakKeyDictionary[dist.ProcessGroup, TurnOf]" = weakref.WeakKeyDictionary()


def watch_group(group: dist.ProcessGroup, turn_of: TurnOf) -> None:
    """From here on the native group's operations take tensors of any layout, and its collectives launch in turn.

    A native group is torch's own class (`backend` says why), so the methods of that class are replaced, once; what they
    do to groups that others have made stays as it was.
    """
    if not _ours:
        for name, uses in _WRITTEN.items():
            native = getattr(dist.ProcessGroup, name, None)
            if native is not None and not isinstance(native, types.FunctionType):
                setattr(dist.ProcessGroup, name, watched(name, checked(name, native), uses))
        for moment, wrap in (("begin", begun_gathering), ("end", ended_gathering)):
            name = torch_private.COALESCING[moment]
            setattr(dist.ProcessGroup, name, wrap(getattr(dist.ProcessGroup, name)))
    _ours[group] = turn_of


def watched(name: str, native: Callable[..., Any], uses: str) -> Callable[..., Any]:
    """The operation of a native group, with what this file adds for groups of ours."""

    def method(self: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
        if self not in _ours:
            return native(self, *args, **named)
        given = args[: len(uses)]
        tensors = list(_tensors(given))
        with nullcontext() if name in _MESSAGES else _ours[self](tensors):
            if all(_is_plain(tensor) for tensor in tensors):
                return native(self, *args, **named)
            written: Copies = []
            with torch.no_grad():
                passed = [_copied(each, written if use == "w" else []) for each, use in zip(given, uses, strict=False)]
                work = native(self, *passed, *args[len(uses) :], **named)
            return _landed(self, work, written)

    # A class derived from torch's in Python reaches this through C++, which tells such a call from an override by the
    # name of the calling function's code.
    method.__code__ = method.__code__.replace(co_name=name)
    return method


def checked(name: str, native: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, which raises BadInput where Gloo would end with wrong numbers or with the process, or wait in vain."""
    said = _SCATTERS.get(name, _GATHERS.get(name, ""))

    def share(group: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
        if group in _ours and len(args) > 1:
            pairs = list(zip(_tensors(args[0]), _tensors(args[1]), strict=True))
            for out, source in pairs:
                part, whole = (out, source) if name in _SCATTERS else (source, out)
                check_parts(said, part, whole, group.size())
            if any(out.dim() != source.dim() or out.dim() == 0 for out, source in pairs):
                args = (_flat(args[0]), _flat(args[1]), *args[2:])
        return native(group, *args, **named)

    def exchange(group: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
        if group in _ours and len(args) > 3:
            for tensor, num_rows in zip(args[:2], args[2:4], strict=True):
                rows_of("all_to_all_single", tensor, num_rows, group.size())
        return native(group, *args, **named)

    def message(group: dist.ProcessGroup, tensors: Any, peer: int, *args: Any, **named: Any) -> Any:
        if group in _ours:
            check_member(name, peer, group.size())
        return native(group, tensors, peer, *args, **named)

    if said:
        return share
    return exchange if name in _EXCHANGES else message if name in ("send", "recv") else native


def _flat(given: Any) -> Any:
    return given.view(-1) if isinstance(given, torch.Tensor) else [each.view(-1) for each in given]


def begun_gathering(native: Callable[..., Any]) -> Callable[..., Any]:
    """The call that begins to gather operations, which remembers from here on what they write to."""

    def method(self: dist.ProcessGroup, *args: Any) -> Any:
        if self in _ours:
            _gathered[self] = []
        return native(self, *args)

    return method


def ended_gathering(native: Callable[..., Any]) -> Callable[..., Any]:
    """The call that ends it: its Work, behind which the results are where they were asked for."""

    def method(self: dist.ProcessGroup, *args: Any) -> Any:
        copies, work = _gathered.pop(self, []), native(self, *args)
        return CopiedBack(work, copies) if copies and work is not None else work

    return method


def _landed(group: dist.ProcessGroup, work: Any, written: Copies) -> Any:
    """The operation's Work, behind which the results are where they were asked for.

    None where the library orders the operation on the current stream (NCCL, where the caller does not ask for a Work)
    or gathers it: of a gathered one the results come at the end, whether it has a Work or not.
    """
    if group in _gathered:
        _gathered[group].extend(written)
    elif work is None:
        _copy_back(written)
    return work if work is None else CopiedBack(work, written)


def _copy_back(copies: Copies) -> None:
    with writing(given for given, _ in copies):
        for given, plain in copies:
            given.copy_(plain)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout != torch.strided or is_plain(tensor)


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _tensors(each)


def _copied(given: Any, copies: Copies) -> Any:
    """The tensors of `given` as plain memory; `copies` gets each with its copy."""
    if isinstance(given, list | tuple):
        return [_copied(each, copies) for each in given]
    if not isinstance(given, torch.Tensor) or _is_plain(given):
        return given
    plain = given.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    copies.append((given, plain))
    return plain


class CopiedBack(WaitedWork):
    """An operation on copies; when it is seen to be done, the results are where they were asked for."""

    def __init__(self, inner: Any, copies: Copies) -> None:
        super().__init__()
        self._inner = inner
        self._given = {id(plain): (given, plain) for given, plain in copies}
        self._copies = copies
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._inner.wait() if timeout is None else self._inner.wait(timeout)
        self._copy()
        return True

    def is_completed(self) -> bool:
        done = bool(self._inner.is_completed())
        if done:
            self.is_success()
        return done

    def is_success(self) -> bool:
        success = torch_private.succeeded(self._inner)
        if success:
            self._copy()
        return success

    def exception(self) -> Any:
        return self._inner.exception()

    def source_rank(self) -> int:
        return int(self._inner._source_rank())

    _source_rank = source_rank

    def result(self) -> Any:
        return self._as_given(self._inner.result())

    def get_future(self) -> Any:
        def copied(done: Any) -> Any:
            value = done.value()
            self._copy()
            return self._as_given(value)

        return self._inner.get_future().then(copied)

    def _copy(self) -> None:
        with self._lock:
            copies, self._copies = self._copies, []
            _copy_back(copies)

    def _as_given(self, value: Any) -> Any:
        """A result in which the caller's tensors stand for their copies."""
        if isinstance(value, list | tuple):
            return [self._as_given(each) for each in value]
        return self._given.get(id(value), (value, None))[0]
