"""Random faults at random moments of real runs: does anything hang, stay behind, keep silent or get lost?

python benchmarks/faults.py [--count 300] [--seed 1]

Each fault is a run of four ranks in float64 under mpirun, torchrun or a plain shell, with data parallelism, a pipeline
or ZeRO 1 to 3, over one of the relays. One rank is killed or stopped, or its links are cut, or its disk is full, or a
file of the newest checkpoint is damaged before it is killed, at a moment drawn from the whole run. Then the same command
is given again (or `--resume`, where it says so), and the losses are compared with those of an undisturbed run. Prints a
table by phase and fault; ends with 1 where a run hung, a process stayed, a survivor said nothing, a checkpoint that was
complete is not whole, or a loss differs by more than 1e-9.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind site-packages: only `tests` is meant

from tests.support.command import MPIRUN, Running  # noqa: E402
from tests.support.hosts.sockets import free_port  # noqa: E402
from tests.support.job_files import OTHER_STAGES, STAGES, plan, write_job  # noqa: E402

RANKS, STEPS, TIMEOUT_SECONDS = 4, 8, 8
HANGS_SECONDS = 150  # for a machine that does much else; the ranks' own timeout is what they are held to by tests
LIMIT = 1e-9

# Where a fault strikes: (module, attribute to wrap), and at which of its calls at most.
PHASES: dict[str, tuple[str, str, int]] = {
    "start": ("hethub.runtime.loop.train", "meet", 1),
    "plan": ("hethub.runtime.loop.train", "choose_plan", 1),
    "forward": ("hethub.runtime.pipeline.executor", "Executor._forward", STEPS),
    "backward": ("hethub.runtime.pipeline.executor", "Executor._backward", STEPS),
    "reduce": ("hethub.runtime.state.reduction", "Reducer.finish", STEPS),
    "step": ("hethub.runtime.loop.trainer", "Trainer._update", STEPS),
    "checkpoint": ("hethub.runtime.checkpoint.manager", "CheckpointManager._finish_files", STEPS // 2),
    "end": ("hethub.runtime.loop.steps", "TrainingLoop._finish", 1),
}
FAULTS = ("kill", "stop", "cut link", "full disk", "damage")
LAUNCHERS = ("mpirun", "torchrun", "plain")
RELAYS = ("auto", "gloo", "shm", "mpi")


def data_parallel(zero: int) -> list[dict[str, Any]]:
    replicas = [{"ranks": [rank], "micro_batch": 2, "samples": 2} for rank in range(RANKS)]
    return [{"layers": [[0, 4]], "replicas": replicas, "zero": zero}]


def pipeline() -> list[dict[str, Any]]:
    return [
        {"layers": [[rank, rank + 1]], "replicas": [{"ranks": [rank], "micro_batch": 2, "samples": 8}]}
        for rank in range(RANKS)
    ]


PLANS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "dp": functools.partial(data_parallel, 0), "pp": pipeline, "mixed": lambda: STAGES, "tp": lambda: OTHER_STAGES,
    **{f"zero{zero}": functools.partial(data_parallel, zero) for zero in (1, 2, 3)},
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One fault: how the run is started, what is done to which rank, and when."""

    launcher: str
    layout: str
    relay: str
    phase: str
    fault: str
    rank: int
    call: int

    @classmethod
    def by(cls, draw: random.Random) -> "Drawn":
        launcher = draw.choice(LAUNCHERS)
        relays = RELAYS if launcher == "mpirun" else RELAYS[:3]
        phase = draw.choice(list(PHASES))
        return cls(
            launcher, draw.choice(list(PLANS)), draw.choice(relays), phase, draw.choice(FAULTS),
            draw.randrange(RANKS), draw.randint(1, PHASES[phase][2]),
        )  # fmt: skip


# -- in a rank -----------------------------------------------------------------------------------------------------------


def rank_main(folder: Path, arguments: list[str]) -> int:
    """`hethub` on a rank, its errors in a file of its own; strikes where the fault in `folder` is this rank's."""
    rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    found = folder / "fault.json"
    if found.exists() and (drawn := Drawn(**json.loads(found.read_text()))).rank == rank:
        arm(drawn, folder)
    from hethub.cli import main as hethub

    sys.argv = ["hethub", *arguments]
    return hethub()


def arm(drawn: Drawn, folder: Path) -> None:
    """Wraps what the phase calls; the fault comes right before the call of that number."""
    module, attribute, _ = PHASES[drawn.phase]
    *owners, name = attribute.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == drawn.call:
            (folder / "struck").write_text(json.dumps(complete_checkpoints(folder / "run")))
            strike(drawn.fault, folder)
        return original(*arguments, **named)

    setattr(owner, name, wrapped)


def strike(fault: str, folder: Path) -> None:
    if fault == "damage" and (found := complete_checkpoints(folder / "run")):
        flip(folder / "run" / "checkpoints" / found[-1])
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


# -- beside the ranks ----------------------------------------------------------------------------------------------------


def command(launcher: str, folder: Path, arguments: list[str]) -> list[str]:
    program = ["-W", "ignore", __file__, "--rank", str(folder), *arguments]
    if launcher == "mpirun":
        options = ["--oversubscribe", "--bind-to", "none", "--continuous", "-n", str(RANKS)]
        return [str(MPIRUN), *options, sys.executable, *program]
    if launcher == "torchrun":
        options = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--nproc-per-node", str(RANKS)]
        return [sys.executable, "-m", "torch.distributed.run", *options, *program[2:]]
    return [sys.executable, __file__, "--plain", *program]


def plain(program: list[str]) -> int:
    """The ranks as a shell would start them in the background; the worst of their ends."""
    port, started = str(free_port()), []
    for rank in range(RANKS):
        names = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
        environment = {name: str(value) for name, value in names.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(subprocess.Popen([sys.executable, *program], env={**os.environ, **environment}))
    return max(abs(process.wait()) for process in started)


def start(launcher: str, folder: Path, arguments: list[Any]) -> Running:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Running(command(launcher, folder, ["train", *map(str, arguments)]), folder, as_root)


def ended(running: Running, victim: int | None) -> bool:
    """Whether all ranks but a stopped one ended in time; wakes that one, to see that it ends too."""
    deadline = time.monotonic() + HANGS_SECONDS
    while running.process.poll() is None and time.monotonic() < deadline:
        if victim is not None and (living := others(running, victim)) is not None and not living:
            for pid in running.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    return running.process.poll() is not None


def others(running: Running, victim: int) -> list[int] | None:
    """The living ranks beside the victim, None before any rank is seen."""
    ranks = {pid: env.get("RANK") or env.get("OMPI_COMM_WORLD_RANK") for pid, env in running.pids().items()}
    known = {pid: int(rank) for pid, rank in ranks.items() if rank is not None}
    return [pid for pid, rank in known.items() if rank != victim] if known else None


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows] if [row["step"] for row in rows] == list(range(1, STEPS + 1)) else []


def try_fault(drawn: Drawn, folder: Path, wanted: list[float] | None) -> dict[str, int]:
    """What went wrong with one fault, counted; `struck` is 0 where the run ended before the moment came."""
    job = write_job(
        folder / "job", train={"steps": STEPS, "precision": "fp64"}, plan_file=plan(PLANS[drawn.layout](), precision="fp64"),
        communicator={"timeout_seconds": TIMEOUT_SECONDS, "relay": drawn.relay}, checkpoint={"every_steps": 2, "keep": 3},
    )  # fmt: skip
    run, counts = folder / "run", defaultdict(int)
    (folder / "fault.json").write_text(json.dumps(drawn.__dict__))
    running = start(drawn.launcher, folder, [job, "--run-dir", run])
    try:
        counts["hangs"] += not ended(running, drawn.rank if drawn.fault == "stop" else None)
        time.sleep(TIMEOUT_SECONDS if running.pids() else 0)
        counts["orphans"] += len(running.pids()) if not counts["hangs"] else 0
    finally:
        running.kill()
    struck = folder / "struck"
    counts["struck"] = int(struck.exists())
    if struck.exists() and running.process.returncode:
        said = {
            rank: (folder / f"stderr-{rank}").read_text(errors="replace") for rank in range(RANKS) if rank != drawn.rank
        }
        counts["silent"] = sum("hethub: " not in text for text in said.values())
        if drawn.fault != "damage":
            counts["lost"] = len(set(json.loads(struck.read_text())) - kept(run))
    (folder / "fault.json").unlink()
    counts["differ"] = int(not goes_on(drawn, folder, job, run, wanted))
    return counts


def kept(run: Path) -> set[str]:
    """The checkpoints that are whole now, and all that newer ones have replaced."""
    from hethub.runtime.checkpoint.integrity import candidates, faults

    whole = {path.name for path in candidates(run / "checkpoints") if not faults(path)}
    newest = max((int(name.removeprefix("step-")) for name in whole), default=0)
    return whole | {f"step-{step}" for step in range(1, newest - 4)}


def goes_on(drawn: Drawn, folder: Path, job: Path, run: Path, wanted: list[float] | None) -> bool:
    """Whether the same command, or the one that it names, ends well with the losses of an undisturbed run."""
    for arguments in ([job, "--run-dir", run], [job, "--resume", run]):
        running = start(drawn.launcher, folder, arguments)
        try:
            if ended(running, None) and running.process.returncode == 0:
                found = losses(run)
                return len(found) == STEPS and (wanted is None or worst(found, wanted) <= LIMIT)
        finally:
            running.kill()
    return False


def worst(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


COLUMNS = ("tried", "struck", "hangs", "orphans", "silent", "lost", "differ")


def main(count: int, seed: int) -> int:
    draw, table = random.Random(seed), defaultdict(lambda: defaultdict(int))
    with tempfile.TemporaryDirectory() as name:
        reference = Drawn("plain", "dp", "auto", "end", "kill", -1, 0)
        (Path(name) / "reference").mkdir()
        undisturbed = try_fault(reference, Path(name) / "reference", None)
        if undisturbed["hangs"] or undisturbed["differ"]:
            show(Path(name) / "reference")
            return 1
        wanted = losses(Path(name) / "reference" / "run")
        for number in range(count):
            drawn, folder = Drawn.by(draw), Path(name) / str(number)
            folder.mkdir()
            found = {"tried": 1, **try_fault(drawn, folder, wanted)}
            for column, value in found.items():
                table[drawn.phase, drawn.fault][column] += value
            bad = ", ".join(column for column in COLUMNS[2:] if found.get(column))
            print(f"{number}: {drawn.__dict__}: {bad or 'well'}", flush=True)
            if bad:
                show(folder)
    print(f"\n{'phase':12}{'fault':12}" + "".join(f"{column:>9}" for column in COLUMNS))
    for (phase, fault), row in sorted(table.items()):
        print(f"{phase:12}{fault:12}" + "".join(f"{row[column]:9}" for column in COLUMNS))
    total = {column: sum(row[column] for row in table.values()) for column in COLUMNS}
    print(f"{'all':24}" + "".join(f"{total[column]:9}" for column in COLUMNS))
    return int(any(total[column] for column in COLUMNS[2:]))


def show(folder: Path) -> None:
    for path in sorted(folder.glob("stderr-*")):
        for line in path.read_text(errors="replace").splitlines()[-3:]:
            print(f"    {path.name}: {line[:300]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(rank_main(Path(sys.argv[2]), sys.argv[3:]))
    if sys.argv[1:2] == ["--plain"]:
        sys.exit(plain(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.exit(main(options.count, options.seed))
