"""A rank of `benchmarks/faults.py`: `hethub`, which a fault strikes at a moment that was drawn for it.

python benchmarks/struck_rank.py FOLDER ARGUMENTS_OF_HETHUB ...
python benchmarks/struck_rank.py --plain RANKS PORT FOLDER ARGUMENTS_OF_HETHUB ...    all ranks, as a shell starts them

FOLDER/fault.json names phase, call, fault and rank, if there is to be one. The rank writes its process to FOLDER/pid-R,
what it says to FOLDER/stderr-R, and right before the fault FOLDER/struck: the time and the checkpoints that are complete.
"""

import contextlib
import functools
import importlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Where a fault strikes: right before a call of this attribute of this module.
PHASES = {
    "start": ("hethub.runtime.loop.train", "meet"),
    "plan": ("hethub.runtime.loop.train", "choose_plan"),
    "forward": ("hethub.runtime.pipeline.executor", "Executor._forward"),
    "backward": ("hethub.runtime.pipeline.executor", "Executor._backward"),
    "reduce": ("hethub.runtime.state.reduction", "Reducer.finish"),
    "step": ("hethub.runtime.loop.trainer", "Trainer._update"),
    "checkpoint": ("hethub.runtime.checkpoint.manager", "CheckpointManager._finish"),
    "end": ("hethub.runtime.loop.steps", "TrainingLoop._finish"),
}


def main(folder: Path, arguments: list[str]) -> int:
    rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    found = folder / "fault.json"
    if found.exists() and (drawn := json.loads(found.read_text()))["rank"] == rank:
        arm(folder, drawn["phase"], drawn["call"], drawn["fault"])
    from hethub.cli import main as hethub

    sys.argv = ["hethub", *arguments]
    return hethub()


def arm(folder: Path, phase: str, call: int, fault: str) -> None:
    """Wraps what the phase calls; the fault comes right before the call of that number, or now where that is 0."""
    if call == 0:
        return strike(folder, fault)
    module, attribute = PHASES[phase]
    *owners, name = attribute.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            strike(folder, fault)
        return original(*arguments, **named)

    setattr(owner, name, wrapped)


def strike(folder: Path, fault: str) -> None:
    complete = complete_checkpoints(folder / "run")
    (folder / "struck").write_text(json.dumps({"time": time.time(), "complete": complete}))
    if fault == "damage" and complete:
        flip(folder / "run" / "checkpoints" / complete[-1])
    if fault in ("kill", "damage"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "cut link":
        for entry in Path("/proc/self/fd").iterdir():
            cut(int(entry.name))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))


def flip(checkpoint: Path) -> None:
    """Another bit in the middle of the largest file."""
    path = max(checkpoint.glob("__*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(descriptor: int) -> None:
    """Shuts a connection down, as a network that drops it would."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as end:
                if end.type == socket.SOCK_STREAM:
                    end.shutdown(socket.SHUT_RDWR)


def complete_checkpoints(run: Path) -> list[str]:
    return sorted(path.parent.name for path in (run / "checkpoints").glob("step-[0-9]/COMPLETE"))


def plain(ranks: int, port: str, program: list[str]) -> int:
    """The ranks as a shell would start them in the background; the worst of their ends."""
    started = []
    for rank in range(ranks):
        names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        environment = {name: str(value) for name, value in names.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(subprocess.Popen([sys.executable, *program], env={**os.environ, **environment}))
    return max(abs(process.wait()) for process in started)


if __name__ == "__main__":
    if sys.argv[1] == "--plain":
        sys.exit(plain(int(sys.argv[2]), sys.argv[3], [__file__, *sys.argv[4:]]))
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
