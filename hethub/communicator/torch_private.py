"""Every use of torch's unpublished interfaces, in one place; tests/communicator/test_torch_private.py guards them."""

import atexit
import contextlib
import errno
import inspect
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp as CReduceOp
from torch._C._dynamo import eval_frame
from torch.distributed import distributed_c10d as c10d

from hethub.kernels.device import Device
from hethub.spec.errors import BadInput

# torch's type stubs lack what these classes have in Python, so they are untyped for the checker.
GlooGroup: Any = dist.ProcessGroupGloo
GroupBase: Any = dist.ProcessGroup
WorkBase: Any = dist.Work
ReduceKind: Any = CReduceOp.RedOpType

# torch 2.13 renames them and warns at the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

NUM_GLOO_TAGS = 2**31 - 1
_UNUSED_TAG = NUM_GLOO_TAGS
_INTERNET = (socket.AF_INET, socket.AF_INET6)

# What a Gloo group opens: its device's listener and loop; a socket each way to a peer and, where the store is served, the
# peer's connection to it.
GLOO_DESCRIPTORS, GLOO_DESCRIPTORS_OF_A_PEER = 6, 3

_LETTING_GO_SECONDS = 0.1  # they wait for the lock by then, or are about to


def create_gloo_group(
    store: dist.Store, rank: int, size: int, timeout_seconds: float, hostname: str | None = None
) -> GlooGroup:
    """A Gloo group that torch's registry does not know, over the interface that has the address `hostname`.

    It leaves nothing in the store: its members connect here, not at their first messages, and the last one to have
    read the others' addresses deletes them. Raises DistError where they do not meet or cannot connect, and OSError where
    the process may not open as many files as that takes.
    """
    require_descriptors(GLOO_DESCRIPTORS + GLOO_DESCRIPTORS_OF_A_PEER * size)
    options = GlooGroup._Options()
    make_device = partial(GlooGroup.create_device, hostname=hostname) if hostname else GlooGroup.create_default_device
    options._devices = [make_device(lazy_init=False)]
    options._timeout = timedelta(seconds=timeout_seconds)
    try:
        group = GlooGroup(store, rank, size, options)
    except dist.DistError:
        raise
    except RuntimeError as error:  # Gloo's own
        raise dist.DistNetworkError(str(error)) from error
    delete_when_read(store, [f"0/{member}" for member in range(size)], size)
    _end_behind_gloo()
    return group


@cache
def _end_behind_gloo() -> None:
    """From here on the interpreter's end waits a moment, in which Gloo's threads let go of the last operation's tensors.

    They need the interpreter's lock for that, and torch 2.13 ends a process by SIGABRT where they come for it too late:
    every second program that ended right behind a collective, over plain Gloo as well.
    """
    atexit.register(time.sleep, _LETTING_GO_SECONDS)


def require_descriptors(number: int) -> None:
    """Raises OSError unless this process may open so many files more. Gloo finds that out in a thread of its own, where
    it ends the process without a word."""
    opened: list[int] = []
    try:
        for _ in range(number):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        what = f"{error.strerror}, {number} more are needed. Raise the limit of open files (ulimit -n)"
        raise OSError(errno.EMFILE, what) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def delete_when_read(store: dist.Store, keys: Sequence[str], num_readers: int) -> None:
    """Each reader calls it when it has read; the last one deletes. `store` is for these keys alone."""
    if store.add("read", 1) == num_readers:
        for key in (*keys, "read"):
            store.delete_key(key)


def gloo_of(group: dist.ProcessGroup) -> GlooGroup:
    """The Gloo group within one that torch made."""
    return group._get_backend(torch.device("cpu"))


def break_gloo_group(group: GlooGroup, rank: int, size: int) -> None:
    """Makes every pending wait on `group` in this process raise, and closes its connections.

    ProcessGroupGloo.abort does nothing in torch 2.13. A receive that times out, though, closes all pairs of its
    context ("Application timeout caused pair closure"), which wakes every waiter here and at the peers.
    """
    if size == 1:
        return
    try:
        group.recv([torch.empty(1)], (rank + 1) % size, _UNUSED_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


def pass_over(group: GlooGroup) -> None:
    """The group's next collective goes without this rank, as Gloo counts them: who began it waits for this rank in vain, and
    is not met by the one that comes next. Gloo counts a sum of no elements, and sends nothing for it."""
    group.allreduce([torch.empty(0)], dist.AllreduceOptions()).wait()


class CountedByGloo:
    """Blocks that each begin a collective of Gloo's, which is counted also where its arguments are refused before Gloo does
    it: by us, by the binding, or by what names itself and comes before Gloo takes a number."""

    def __init__(self, group: GlooGroup) -> None:
        self._group = group

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if isinstance(error, BadInput | TypeError) or (kind is not None and "ProcessGroupGloo::" in str(error)):
            pass_over(self._group)


def serves_store(store: dist.Store) -> bool:
    """Whether this process is the store's server, which torch tells in words only."""
    return "server=<nullptr>" not in repr(_innermost(store))


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def break_store(store: dist.Store) -> None:
    """Ends this process's connections to the store's server: who waits for it raises.

    TCPStore waits without end, whatever its timeout, for a server that is stopped: its kernel still takes requests.
    """
    store = _innermost(store)
    if not isinstance(store, dist.TCPStore):
        return
    found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
    servers = {_plain_address(str(address[0]), int(address[1])) for *_, address in found}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # no socket, or none that is connected
            connection = socket.socket(fileno=descriptor)
            try:
                if connection.family in _INTERNET and _plain_address(*connection.getpeername()[:2]) in servers:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()


def _plain_address(host: str, port: int) -> tuple[str, int]:
    """An IPv4 address as itself: torch's sockets are IPv6, and call it ::ffff:127.0.0.1."""
    return host.removeprefix("::ffff:"), port


def register_backend(name: str, creator: Callable[..., Any]) -> None:
    """Makes `init_process_group(name)` call `creator(options, backend_options)`."""
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, creator, extended_api=True, devices=["cpu", "cuda"])


def attach_backend(group: dist.ProcessGroup, inner: Any) -> None:
    """Registers a C++ backend on a Python group: FSDP2, DTensor and functional collectives look it up, and so does
    `init_process_group(device_id=…)`, by the device's type."""
    for device_type in ("cpu", "cuda"):
        group._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.CUSTOM, inner)


def attach_native(group: dist.ProcessGroup, gloo: GlooGroup, device: Device, options: Any, store: dist.Store) -> Any:
    """Gives a plain group the island's native backends: Gloo for host tensors, NCCL or RCCL for the device's, which meets
    in `store` and is returned; None on a CPU."""
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo._set_sequence_number_for_group()
    if not device.is_gpu:
        return None
    nccl = create_nccl_group(store, options.group_rank, options.group_size, options.timeout.total_seconds())
    nccl._set_sequence_number_for_group()
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    return nccl


COALESCING = {"begin": "_start_coalescing", "end": "_end_coalescing"}
"""The methods of a process group between which NCCL only gathers operations; each of those then returns nothing, or what
nobody waits for, and the end returns the Work of all."""


def default_group() -> dist.ProcessGroup | None:
    return c10d._get_default_group() if dist.is_initialized() else None


def reduce_op_kind(op: Any) -> Any:
    """SUM, AVG, …: the operation without its factor, from whichever form torch passes."""
    return getattr(op, "op", op)


def premul_factor(op: Any) -> Any:
    """The factor of a PREMUL_SUM as a number, also where it was given as a one-element tensor of whatever device."""
    _, state = op.__getstate__()
    return state.item() if isinstance(state, torch.Tensor) else state


def op_options(options_type: type, **fields: Any) -> Any:
    """A c10d options object with `fields` set."""
    options = options_type()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def native_reduce_scatter(native: Any, part: torch.Tensor, whole: torch.Tensor, op: Any) -> None:
    """NCCL's or Gloo's reduce-scatter; on a device it is ordered on the current stream when this returns."""
    native._reduce_scatter_base(part, whole, op_options(dist.ReduceScatterOptions, reduceOp=op)).wait()


def native_all_gather(native: Any, whole: torch.Tensor, part: torch.Tensor) -> None:
    """Do for the all-gather what `native_reduce_scatter` does."""
    native._allgather_base(whole, part).wait()


def native_reduce(native: Any, tensor: torch.Tensor, root: int, op: Any) -> None:
    """Do the same for the reduction to the member `root`. What the others' tensors hold afterwards is undefined."""
    native.reduce([tensor], op_options(dist.ReduceOptions, reduceOp=op, rootRank=root)).wait()


def native_broadcast(native: Any, tensor: torch.Tensor, root: int) -> None:
    """Do the same for the broadcast from the member `root`."""
    native.broadcast([tensor], op_options(dist.BroadcastOptions, rootRank=root)).wait()


def native_all_to_all(
    native: Any, output: torch.Tensor, source: torch.Tensor, output_sizes: list[int], input_sizes: list[int]
) -> None:
    """Do the same for the all-to-all."""
    native.alltoall_base(output, source, output_sizes, input_sizes, dist.AllToAllOptions()).wait()


def native_send(native: Any, tensor: torch.Tensor, peer: int) -> Any:
    """NCCL's or Gloo's send to the group's member `peer`; the library matches it with a receive by its order."""
    return native.send([tensor], peer, 0)


def native_receive(native: Any, tensor: torch.Tensor, peer: int) -> Any:
    """Do for the receive what `native_send` does."""
    return native.recv([tensor], peer, 0)


def succeeded(work: Any) -> bool:
    """Whether an operation is done and has not failed. NCCL's Work tells the latter by `wait` alone, which returns at
    once for what is done: its `isSuccess` raises."""
    if not work.is_completed():
        return False
    try:
        return bool(work.is_success())
    except NotImplementedError:
        pass
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


def create_nccl_group(
    store: dist.Store, rank: int, size: int, timeout_seconds: float, *, for_messages: bool = False
) -> Any:
    """An NCCL (or RCCL) group that torch's registry does not know; it connects at its first operation.

    Messages have streams of high priority: torch deals 32 of each priority in turn, and a receive that waits for its
    peer would hold up a collective that was dealt the same one.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=for_messages)
    options._timeout = timedelta(seconds=timeout_seconds)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def run_as_written(kind: type) -> type:
    """The class, into whose functions torch.compile does not look: it runs them between its graphs, as a native backend's.

    A group is opaque to Dynamo, which fails for good where it meets a member in Python. These are what
    `torch.compiler.disable` sets, without its import of all of Dynamo.
    """
    skip = eval_frame._FrameExecStrategy(*[eval_frame._FrameAction.SKIP] * 2)
    for function in vars(kind).values():
        if inspect.isfunction(function):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            eval_frame.set_code_exec_strategy(function.__code__, skip)
    return kind


def gloo_send(group: GlooGroup, tensor: torch.Tensor, peer: int, tag: int) -> Any:
    return group.send([tensor], peer, tag)


def gloo_receive(group: GlooGroup, tensor: torch.Tensor, peer: int, tag: int) -> Any:
    return group.recv([tensor], peer, tag)


def global_ranks(options: Any) -> Sequence[int]:
    """The members of a group about to be created; torch leaves the list empty for the default group."""
    return list(options.global_ranks_in_group) or list(range(options.group_size))


def profiled_range(name: str) -> Callable[[], None] | None:
    """Begins an asynchronous range in a running profiler; the function returned ends it, in any thread.

    None where no profiler runs. The range must end before the operation is reported as done, as native backends do:
    whoever stops the profiler has waited for the operation, and an end after that would reach a profiler that is gone.
    """
    if not torch.autograd._profiler_enabled():
        return None
    record = torch.autograd.profiler.record_function(name)
    ended: torch.futures.Future[None] = torch.futures.Future()
    record.__enter__()
    record._call_end_callbacks_on_future(ended)
    return lambda: ended.set_result(None)


def begin_range(name: str) -> Any:
    """A range begun in this thread's running profiler, to be ended by its `__exit__`; None where none runs."""
    if not torch.autograd._profiler_enabled():
        return None
    record = torch.autograd.profiler.record_function(name)
    record.__enter__()
    return record


def future_of(result: Sequence[torch.Tensor]) -> tuple[torch.futures.Future[Any], Callable[[Exception | None], None]]:
    """A future and the function that ends it, with `result` or with an error that C++ sees as one.

    Future.set_exception only stores the exception as a value, which DDP's reducer takes for gradients and crashes on;
    an exception raised in a callback becomes a real error. A future must be told the devices of its result.
    """
    devices: list[int | str | torch.device] = list({tensor.device for tensor in result if tensor.is_cuda})
    trigger: torch.futures.Future[None] = torch.futures.Future(devices=devices)
    error: list[Exception] = []

    def outcome(_: torch.futures.Future[None]) -> Any:
        if error:
            raise error[0]
        return result

    def end(failure: Exception | None) -> None:
        if failure is not None:
            error.append(failure)
        trigger.set_result(None)

    return trigger.then(outcome), end
