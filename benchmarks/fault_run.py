"""One fault of `benchmarks/faults.py`: a run that it strikes, the judgement of how that ended, and the run after it."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.struck_rank import complete_checkpoints
from tests.support.command import MPIRUN, Running, ranks
from tests.support.hosts.sockets import free_port
from tests.support.job_files import plan, write_job

STEPS = 8
TIMEOUT_SECONDS = 20  # of the ranks, on a machine that does much else
START_SECONDS, HANG_SECONDS = 300, 120  # for the moment to come; from it to the end of all
LIMIT = 1e-9
PROGRAM = Path(__file__).with_name("struck_rank.py")

COLUMNS = ("tried", "struck", "by torchrun", "refused", "hang", "orphan", "silent", "lost", "differ", "alarm")
BAD = COLUMNS[4:]
"""Ranks that did not end; processes left behind; survivors that said nothing; complete checkpoints that are not whole;
losses that are not those of an undisturbed run, or a run that did not go on; an end without a fault.

`by torchrun` is none of them: survivors that torchrun ended before hethub could speak in them, where torchrun's own
report names the rank that failed. Nor is `refused`: the only checkpoint was damaged, a paragraph says so, and without it
the same command starts anew."""


class Drawn(NamedTuple):
    """One fault: how the run is started, what is done to which rank and when, and who goes on with the run."""

    number: int
    launcher: str
    ranks: int
    layout: str
    relay: str
    phase: str
    fault: str
    rank: int
    call: int
    again: str


def shared(*members: int, **more: Any) -> dict[str, Any]:
    """A stage of all layers, its samples spread over its replicas."""
    samples = {1: (8,), 2: (4, 4), 3: (4, 2, 2), 4: (2, 2, 2, 2)}[len(members)]
    replicas = [{"ranks": [rank], "micro_batch": 2, "samples": own} for rank, own in zip(members, samples, strict=True)]
    return {"layers": [[0, 4]], "replicas": replicas, **more}


def stages(*groups: tuple[int, int, list[list[int]]]) -> list[dict[str, Any]]:
    """A stage of layers [first, last) for each group; its replicas have these ranks."""
    return [
        {"layers": [[first, last]],
         "replicas": [{"ranks": own, "micro_batch": 2, "samples": 8 // len(replicas)} for own in replicas]}
        for first, last, replicas in groups
    ]  # fmt: skip


# By layout and number of ranks: how many of them are of the first of two makers, and the stages. Between makers every
# byte has one owner (ZeRO 1 at least), so plain data parallelism stays within one.
LAYOUTS: dict[str, dict[int, tuple[int, list[dict[str, Any]]]]] = {
    "dp": {
        2: (2, [shared(0, 1)]),
        3: (2, stages((0, 2, [[0], [1]]), (2, 4, [[2]]))),
        4: (2, stages((0, 2, [[0], [1]]), (2, 4, [[2], [3]]))),
    },
    "pp": {
        2: (1, stages((0, 2, [[0]]), (2, 4, [[1]]))),
        3: (2, stages((0, 1, [[0]]), (1, 2, [[1]]), (2, 4, [[2]]))),
        4: (2, stages(*((rank, rank + 1, [[rank]]) for rank in range(4)))),
    },
    "tp": {
        2: (2, stages((0, 4, [[0, 1]]))),
        3: (2, stages((0, 3, [[0, 1]]), (3, 4, [[2]]))),
        4: (2, stages((0, 2, [[0, 1]]), (2, 4, [[2], [3]]))),
    },
    **{f"zero{zero}": {size: (size // 2, [shared(*range(size), zero=zero)]) for size in (2, 3, 4)} for zero in (1, 2, 3)},
}  # fmt: skip
ALONE = (1, [shared(0)])


def job_in(folder: Path, size: int, layout: tuple[int, list[dict[str, Any]]], relay: str) -> Path:
    first, own = layout
    nodes = [
        {"name": maker, "vendor": maker, "accelerator": "CPU-core", "accelerators": count, "gbps_per_nic": 8}
        for maker, count in (("amd", first), ("nvidia", size - first)) if count
    ]  # fmt: skip
    return write_job(
        folder, cluster={"nodes": nodes}, plan_file=plan(own, precision="fp64"),
        train={"steps": STEPS, "precision": "fp64"}, checkpoint={"every_steps": 2, "keep": 3},
        communicator={"timeout_seconds": TIMEOUT_SECONDS, "relay": relay},
    )  # fmt: skip


def losses_alone(folder: Path) -> list[float]:
    """Those of an undisturbed run of one process."""
    job = job_in(folder / "job", 1, ALONE, "auto")
    (ended,) = ranks(1, "train", job, "--run-dir", folder / "run", cwd=folder)
    assert ended.exit_code == 0, ended.stderr
    return losses(folder / "run")


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows] if [row["step"] for row in rows] == list(range(1, STEPS + 1)) else []


def command(drawn: Drawn, folder: Path, arguments: list[str]) -> list[str]:
    program = [str(PROGRAM), str(folder), *arguments]
    if drawn.launcher == "mpirun":
        options = ["--oversubscribe", "--bind-to", "none", "--continuous", "-n", str(drawn.ranks)]
        return [str(MPIRUN), *options, sys.executable, *program]
    port = str(free_port())
    if drawn.launcher == "torchrun":
        options = ["--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", str(drawn.ranks)]
        return [sys.executable, "-m", "torch.distributed.run", *options, *program]
    return [sys.executable, str(PROGRAM), "--plain", str(drawn.ranks), port, *program[1:]]


def try_fault(drawn: Drawn, folder: Path, wanted: list[float]) -> dict[str, Any]:
    """The columns of one fault; beside them the seconds until all had spoken, and in bad cases what ranks said last."""
    job = job_in(folder / "job", drawn.ranks, LAYOUTS[drawn.layout][drawn.ranks], drawn.relay)
    (folder / "fault.json").write_text(json.dumps(drawn._asdict()))
    struck, run, row = folder / "struck", folder / "run", dict.fromkeys(COLUMNS[1:], 0)
    running = start(drawn, folder, [job, "--run-dir", run])
    try:
        row["hang"] = int(not ends(running, drawn, struck))
        if not row["hang"]:
            row["orphan"] = len(left_behind(running))
        launcher_said = running.stderr()
    finally:
        running.kill()
    code = running.process.returncode
    at = json.loads(struck.read_text()) if struck.exists() else None
    row["struck"], row["alarm"] = int(at is not None), int(at is None and code != 0)
    seconds = None
    if at is not None and code != 0:
        row |= heard(drawn, folder, launcher_said)
        seconds = max(last_word(folder, rank) for rank in range(drawn.ranks) if rank != drawn.rank) - at["time"]
        damaged = set(at["complete"][-1:]) if drawn.fault == "damage" else set()
        row["lost"] = len(set(at["complete"]) - damaged - kept(run))
    said = {**{f"rank {rank}": tail(folder, rank) for rank in range(drawn.ranks)}, "launcher": launcher_said[-600:]}
    (folder / "fault.json").unlink()
    fine, words = goes_on(drawn, folder, job, run, wanted)
    if (
        not fine
        and drawn.fault == "damage"
        and at is not None
        and len(at["complete"]) == 1
        and is_refused(words, at["complete"][0])
    ):
        shutil.rmtree(run / "checkpoints" / at["complete"][0])
        row["refused"] = 1
        fine, words = goes_on(drawn, folder, job, run, wanted)
    row["differ"] = int(not fine)
    said = {**said, "again": words[-600:]} if any(row[column] for column in BAD) else {}
    return {**row, "exit_code": code, "seconds": seconds if seconds and seconds > 0 else None, "said": said}


def start(drawn: Drawn, folder: Path, arguments: list[Any]) -> Running:
    environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONSAFEPATH"] = "1"  # the benchmarks are no modules of the ranks'
    return Running(command(drawn, folder, ["train", *map(str, arguments)]), folder, environment)


def ends(running: Running, drawn: Drawn, struck: Path) -> bool:
    """Whether all ranks but a stopped one ended in time; wakes that one then, to see that it ends too."""
    deadline = time.monotonic() + START_SECONDS
    seen = False
    while running.process.poll() is None and time.monotonic() < deadline:
        if not seen and struck.exists():
            seen, deadline = True, time.monotonic() + HANG_SECONDS
        if seen and drawn.fault == "stop" and not living_survivors(running, drawn.rank):
            for pid in running.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
    return running.process.poll() is not None


def living_survivors(running: Running, victim: int) -> list[int]:
    found = {pid: env.get("RANK") or env.get("OMPI_COMM_WORLD_RANK") for pid, env in running.pids().items()}
    return [pid for pid, rank in found.items() if rank is not None and int(rank) != victim]


def left_behind(running: Running) -> list[int]:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (left := list(running.pids())) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def heard(drawn: Drawn, folder: Path, launcher_said: str) -> dict[str, int]:
    """How many survivors said nothing, and how many of those torchrun ended, naming a rank whose failure is known."""
    dumb = [rank for rank in range(drawn.ranks) if rank != drawn.rank and "hethub: " not in words_of(folder, rank)]
    # A checkpoint that one rank cannot write is a failure that all ranks learn of together; one tells it for all of them.
    told = rf"checkpoint of step \d+ could not be written: .*rank {drawn.rank}: "
    if any(re.search(told, words_of(folder, rank)) for rank in range(drawn.ranks)):
        dumb = []
    by_torchrun = 0
    cause = re.search(r"Root Cause.*?rank\s*:\s*(\d+)", launcher_said, re.DOTALL)
    if drawn.launcher == "torchrun" and cause is not None:
        first = int(cause[1])
        known = first == drawn.rank or "hethub: " in words_of(folder, first)
        ended = [rank for rank in dumb if f"process {pid_of(folder, rank)} closing signal SIGTERM" in launcher_said]
        by_torchrun = len(ended) if known else 0
    return {"by torchrun": by_torchrun, "silent": len(dumb) - by_torchrun}


def words_of(folder: Path, rank: int) -> str:
    path = folder / f"stderr-{rank}"
    return path.read_text(errors="replace") if path.exists() else ""


def pid_of(folder: Path, rank: int) -> str:
    path = folder / f"pid-{rank}"
    return path.read_text() if path.exists() else "that never began"


def last_word(folder: Path, rank: int) -> float:
    path = folder / f"stderr-{rank}"
    return path.stat().st_mtime if path.exists() else 0.0


def tail(folder: Path, rank: int) -> str:
    return " / ".join(line[:300] for line in words_of(folder, rank).splitlines()[-3:])


def kept(run: Path) -> set[str]:
    """The checkpoints that are whole now, and all that newer ones have replaced."""
    from hethub.runtime.checkpoint.integrity import candidates, faults

    whole = {path.name for path in candidates(run / "checkpoints") if not faults(path)}
    newest = max((int(name.removeprefix("step-")) for name in whole), default=0)
    return whole | {f"step-{step}" for step in range(1, newest - 4)}


def goes_on(drawn: Drawn, folder: Path, job: Path, run: Path, wanted: list[float]) -> tuple[bool, str]:
    """Whether the same command, or the one that it names, ends well with the losses wanted; else what was said."""
    words = ""
    resume = complete_checkpoints(run) != []
    for arguments in ([job, "--resume", run], [job, "--run-dir", run])[:: 1 if resume else -1]:
        code, said = again(drawn, folder, arguments)
        if code == 0:
            found = losses(run)
            fits = len(found) == STEPS and max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)) <= LIMIT
            return fits, said if fits else f"{said} metrics: {(run / 'metrics.jsonl').read_text()}"
        words += said
    return False, words


def again(drawn: Drawn, folder: Path, arguments: list[Any]) -> tuple[int | None, str]:
    """Exit code (None: it hangs) and stderr of the ranks together."""
    if drawn.again == "forked" and drawn.relay != "mpi":
        try:
            ended = ranks(drawn.ranks, "train", *arguments, cwd=folder, timeout_seconds=START_SECONDS)
        except AssertionError as error:
            return None, str(error)
        return max(abs(each.exit_code) for each in ended), "".join(each.stderr for each in ended)
    running = start(drawn, folder, arguments)
    try:
        deadline = time.monotonic() + START_SECONDS
        while running.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        code = running.process.poll()
    finally:
        running.kill()
    return code, "".join(words_of(folder, rank) for rank in range(drawn.ranks))


def is_refused(words: str, checkpoint: str) -> bool:
    return "hethub: " in words and checkpoint in words and "Traceback" not in words
