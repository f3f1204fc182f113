"""A process that has imported torch once and forks a fresh rank from it in milliseconds.

Started by `tests.support.ranks` as a script, it answers one request at a time on a socket: run this function in so
many ranks. It puts the package `tests` into place by its path, so that neither the server nor a rank needs the
repository root on `sys.path` (where the link `kernels` would answer for another package of that name).
"""

import ctypes
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
MADV_COLLAPSE = 25
HUGE_PAGE = 2 << 20

# What ranks import sooner or later; torch's optimizers pull in torch._dynamo, state shares scipy.optimize (seconds
# each), a look for a host's address the codec of its name (2 ms in every rank).
IMPORTS = (
    "pytest", "hypothesis", "torch", "torch.distributed", "torch._dynamo", "torch.distributed.checkpoint",
    "scipy.optimize", "encodings.idna", "hethub.communicator", "hethub.cli", "hethub.runtime.loop.train", "hethub.report.run",
)  # fmt: skip


def main() -> None:
    end_with_parent()
    channel = socket.socket(fileno=int(sys.argv[1]))
    load_package("tests", Path(__file__).resolve().parents[1])
    for name in IMPORTS:
        importlib.import_module(name)
    ask_for_queues()
    warm_up()
    gather_pages()
    stream = channel.makefile("rwb")
    while True:
        try:
            request = pickle.load(stream)
        except EOFError:
            return
        pickle.dump(run(request), stream)
        stream.flush()


def end_with_parent() -> None:
    """A killed parent takes this process with it, whatever it is in: the imports take seconds."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ask_for_queues() -> None:
    """As `detect_vendor` does: a rank loads a test's module, which may have torch call the driver, before it comes there."""
    from hethub.kernels.device import HARDWARE_QUEUES

    for variable, number in HARDWARE_QUEUES.values():
        os.environ.setdefault(variable, str(number))


def warm_up() -> None:
    """Does here, once, what would otherwise be done in every rank: what torch imports at its first comparison (1.6 s), a
    look for the installed packages, and a layout, which reads the catalogue and has pydantic build its validators. What
    is there by now is no garbage: a rank that collects need not look at it, and copy its pages.
    """
    import torch

    from hethub.spec.job import TrainSpec
    from tests.support.layouts import Case

    importlib.metadata.version("torch")
    TrainSpec.model_validate({"steps": 1})
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    replica = {"ranks": [0], "micro_batch": 8, "samples": 8}
    Case(name="alone", stages=[{"layers": [[0, 4]], "replicas": [replica]}]).layout()
    gc.collect()
    gc.freeze()


def gather_pages() -> None:
    """Has the kernel put this process's memory into pages of 2 MiB, where it can (Linux 6.1).

    A fork copies the table of pages and a rank's end frees its own: 17 ms of processor time a rank with pages of 4 KiB,
    6 ms with these. What a rank then writes to is copied by 4 KiB as before.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, _, *file = line.split()
        start, stop = (int(address, 16) for address in place.split("-"))
        first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, stop // HUGE_PAGE * HUGE_PAGE
        if rights == "rw-p" and file in ([], ["[heap]"]) and first < last:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)


def load_package(name: str, folder: Path) -> ModuleType:
    return load_module(name, folder / "__init__.py", [str(folder)])


def load_module(name: str, path: Path, search: list[str] | None = None) -> ModuleType:
    """The module of the file at `path` under `name`, as pytest's importlib mode names it."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Per rank: exit code, pickled value or traceback, and what it wrote to stderr."""
    size = request["world_size"]
    listener = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("fork")
    hold, release = os.pipe()
    read_ends, processes = [], []
    for rank in range(size):
        # A pipe made here is in no rank's hands but its own, so it closes with that rank.
        read_end, write_end = os.pipe()
        processes.append(context.Process(target=rank_main, args=(rank, request, listener, write_end, hold, release)))
        processes[-1].start()
        os.close(write_end)
        read_ends.append(read_end)
    listener.close()
    outputs = collect(dict(zip(read_ends, processes, strict=True)), time.monotonic() + request["timeout_seconds"])
    os.close(release)
    os.close(hold)
    outcomes = []
    for process, output in zip(processes, outputs, strict=True):
        process.join(0 if output is None else 60)  # a loaded machine ends a process when it can
        timed_out = process.is_alive()
        if timed_out:
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
        result = pickle.loads(output) if output else {}
        outcomes.append({"exit_code": process.exitcode, "timed_out": timed_out, **result})
    for outcome, path in zip(outcomes, stderr_paths(request), strict=True):
        outcome["stderr"] = path.read_text(errors="replace") if path.exists() else ""
    return outcomes


def collect(ranks: dict[int, Any], deadline: float) -> list[bytes | None]:
    """What each rank wrote until it closed its end (by read end); None for those that had not by the deadline.

    Ranks that are stopped (SIGSTOP) are killed when all others have ended: nobody may wait for them.
    """
    written = {end: io.BytesIO() for end in ranks}
    pending = set(ranks)
    while pending and (left := deadline - time.monotonic()) > 0:
        for end in select.select(list(pending), [], [], min(left, 0.2))[0]:
            block = os.read(end, 1 << 20)
            if block:
                written[end].write(block)
            else:
                pending.remove(end)
        if all(is_stopped(ranks[end].pid) for end in pending):
            for end in pending:
                os.kill(ranks[end].pid, signal.SIGKILL)
    for end in ranks:
        os.close(end)
    return [None if end in pending else written[end].getvalue() for end in ranks]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stderr_paths(request: dict[str, Any]) -> list[Path]:
    return [Path(request["folder"]) / f"stderr-{rank}" for rank in range(request["world_size"])]


def rank_main(
    rank: int, request: dict[str, Any], listener: socket.socket, write_end: int, hold: int, release: int
) -> None:
    """A rank that fails ends at once; one that has a value stays, with its store, which peers may still read, until all
    end."""
    end_with_parent()
    os.close(release)
    stderr = os.open(stderr_paths(request)[rank], os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr, 2)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    try:
        store = meet(rank, request["world_size"], listener)
        value = call(rank, request, store)
        result = {"value": pickle.dumps(value)}
        code = 0
    except BaseException as error:  # noqa: BLE001  the whole failure goes back to the test that asked
        result = {"traceback": "".join(traceback.format_exception(error)), "error": describe(error)}
        code = 1
    with os.fdopen(write_end, "wb") as stream:
        stream.write(pickle.dumps(result))
    sys.stdout.flush()
    if code == 0:
        os.read(hold, 1)
    os._exit(code)


def describe(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def meet(rank: int, world_size: int, listener: socket.socket) -> Any:
    """The store that rank 0 serves, as under mpirun, once every rank has come to it."""
    import torch.distributed as dist

    port = listener.getsockname()[1]
    is_server = rank == 0
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=is_server,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if is_server else None,
    )
    wait_for_all(store, "joined", rank, world_size)
    return store


def wait_for_all(store: Any, what: str, rank: int, world_size: int) -> None:
    """Returns once every rank has called it with the same word; on rank 0, which serves the store, the last.

    Should rank 0 fail or stop at once, the others must not be left knocking.
    """
    if store.add(f"ranks/{what}", 1) == world_size:
        store.set(f"ranks/all-{what}", "")
    store.get(f"ranks/all-{what}")
    store.add(f"ranks/past-{what}", 1)
    while rank == 0 and store.add(f"ranks/past-{what}", 0) < world_size:
        time.sleep(0.001)


def call(rank: int, request: dict[str, Any], store: Any) -> Any:
    """What the requested function returns on this rank, given a connected world (or rank and store without one)."""
    import torch

    torch.set_num_threads(1)
    name, path = request["module"]
    function = getattr(load_module(name, Path(path)), request["function"])
    arguments = pickle.loads(request["arguments"])
    if request["connect"] is None:
        return function(rank, store, *arguments)

    from hethub.communicator import Rendezvous, connect

    rendezvous = Rendezvous.on_one_host(store, rank, request["world_size"])
    world = connect(rendezvous, **request["connect"])
    # Gloo's barrier ends on one rank before it does on another: who fails at once would break the others' connecting.
    wait_for_all(store, "connected", rank, request["world_size"])
    value = function(world, *arguments)
    world.close()
    return value


if __name__ == "__main__":
    main()
