"""One job, killed at random again and again, each time gone on with under another plan on another number of ranks.

KILLS=20 python -m pytest -s tests/faults/test_random_kills.py     as `make evidence` runs it; prints a line a kill

With KILLS_FOLDER the job lies there, and what was interrupted goes on: an interruption is one kill more, not counted.
"""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.command import HETHUB, Running, needs_mpirun, one, ranks, start_mpirun, start_torchrun
from tests.support.job_files import ALONE, CLUSTER, OTHER_STAGES, STAGES, plan, write_job, write_yaml

KILLS = int(os.environ.get("KILLS", "3"))
SEED = int(os.environ.get("KILLS_SEED", "1"))
FOLDER = os.environ.get("KILLS_FOLDER")
STEPS = 40 + 20 * KILLS  # more than are trained before the last kill
MOMENTS = ("start", "step", "checkpoint", "checkpoint")  # what a kill comes behind; the first behind a checkpoint
MOST_STEPS, MOST_SECONDS, START_SECONDS = 8, 0.2, 6.0  # trained by then, at most; seconds behind that moment
ALL_SECONDS = 1200.0  # for all steps, on a loaded machine
LIMIT = 1e-9


def shared(size, **more):
    """A stage of all layers, its eight samples spread over replicas of one rank."""
    samples = {2: (6, 2), 3: (4, 2, 2), 4: (2, 2, 2, 2)}[size]
    replicas = [{"ranks": [rank], "micro_batch": 2, "samples": own} for rank, own in enumerate(samples)]
    return [{"layers": [[0, 4]], "replicas": replicas, **more}]


def pipeline(*ends):
    """A stage of one rank up to each of these layers."""
    starts = (0, *ends[:-1])
    return [
        {"layers": [[start, end]], "replicas": [{"ranks": [rank], "micro_batch": 2, "samples": 8}]}
        for rank, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


PLANS = {
    4: {"uneven pipeline": STAGES, "tensor parallel": OTHER_STAGES, "zero 3": shared(4, zero=3)},
    3: {"pipeline": pipeline(1, 2, 4), "zero 2": shared(3, zero=2)},
    2: {"pipeline": pipeline(3, 4), "zero 1": shared(2, zero=1), "zero 3": shared(2, zero=3)},
    1: {"one rank": ALONE},
}


def write_all(folder):
    """The job, for whichever plan; a cluster file for each number of ranks, and a plan file each."""
    job = write_job(folder, train={"steps": STEPS, "precision": "fp64"}, checkpoint={"every_steps": 3, "keep": 2})
    for size, own in PLANS.items():
        makers = zip(CLUSTER["nodes"], (-(-size // 2), size // 2), strict=True)
        nodes = [{**node, "accelerators": count} for node, count in makers if count]
        write_yaml(folder / f"cluster-{size}.yaml", {**CLUSTER, "nodes": nodes})
        for name, stages in own.items():
            write_yaml(folder / f"{size} {name}.yaml", plan(stages, precision="fp64"))
    return job


def arguments(job, size, name):
    return ["train", job, "--set", f"cluster=cluster-{size}.yaml", "--plan", job.parent / f"{size} {name}.yaml"]


def start(launcher, size, words, cwd):
    """`hethub …` in so many ranks, as a shell would start it."""
    if size == 1:
        return Running([HETHUB, *words], cwd, {"RANK": "0"})
    return {"mpirun": start_mpirun, "torchrun": start_torchrun}[launcher](size, *words, cwd=cwd)


def steps_said(running):
    return len(re.findall(r"^step [0-9]+/", running.stdout(), re.MULTILINE))


def checkpoints(folder):
    return set(folder.glob("runs/*/checkpoints/step-*[0-9]/COMPLETE"))


def kill_at_random(running, draw, folder, size, moment):
    """Kills a rank, or all there is, launcher first; what was killed, and when."""
    victim, before = draw.choice([*range(size), "all"]), checkpoints(folder)
    if moment == "start":
        running.wait_until(lambda: all(running.rank_pids(rank) for rank in range(size)))
        seconds = draw.random() * START_SECONDS
    else:
        wanted, seconds = draw.randint(1, MOST_STEPS), draw.random() * MOST_SECONDS
        running.wait_until(lambda: steps_said(running) >= wanted)
        running.wait_until(lambda: moment == "step" or checkpoints(folder) - before)
    time.sleep(seconds)
    steps = steps_said(running)
    if victim == "all" or size == 1:
        running.process.kill()
        running.kill()
    else:
        os.kill(running.rank_pid(victim), signal.SIGKILL)
    return victim, f"{steps} steps"


def final_losses(folder):
    """Those of the only run that came to its end; every step once."""
    found = [path.read_text().splitlines() for path in folder.glob("runs/*/metrics.jsonl")]
    rows = [json.loads(line) for line in one([lines for lines in found if len(lines) == STEPS])]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


def run_and_kill(job, folder, number):
    """Starts the job under a plan drawn for this number, kills it where it is not the last: what is to be told."""
    draw, size = random.Random(f"{SEED}, {number}"), (4, 3, 2, 1)[number % 4]
    name, launcher = draw.choice(list(PLANS[size])), draw.choice(["mpirun", "torchrun"]) if size > 1 else "alone"
    moment = draw.choice(MOMENTS) if number else "checkpoint"
    running, began = start(launcher, size, [*arguments(job, size, name), "--resume", "auto"], folder), time.monotonic()
    try:
        killed = kill_at_random(running, draw, folder, size, moment) if number < KILLS else None
        running.process.wait(ALL_SECONDS)
        ended = running.end(patience_seconds=60)
    finally:
        running.kill()
    found = re.search(r"resumed behind step ([0-9]+)", ended.stdout)
    resumed = f"resumed behind step {found[1]}" if found else "said no step"
    what = "not killed" if killed is None else f"killed {killed[0]}, behind a {moment}, {killed[1]} said"
    text = f"{number + 1}: {name} on {size}, {launcher}: {resumed}; {what}; exit code {ended.exit_code}"
    return ended, f"{text}, {time.monotonic() - began:.0f} s"


@pytest.mark.slow
@needs_mpirun
@pytest.mark.timeout(300 * KILLS + 2 * ALL_SECONDS)
def test_a_job_killed_at_random_ends_with_the_losses_of_one_that_was_not(tmp_path):
    folder = Path(FOLDER) if FOLDER else tmp_path
    job, told = write_all(folder / "job"), folder / "told"
    told.touch()
    for number in range(len(told.read_text().splitlines()), KILLS + 1):
        ended, text = run_and_kill(job, folder, number)
        assert (ended.exit_code == 0) == (number == KILLS), ended.stderr
        with told.open("a") as file:
            file.write(f"{text}\n")
    assert "resumed behind step" in text
    alone = one(
        ranks(
            1,
            *arguments(job, 1, "one rank"),
            "--run-dir",
            tmp_path / "alone",
            cwd=tmp_path,
            timeout_seconds=ALL_SECONDS,
        )
    )
    assert alone.exit_code == 0, alone.stderr
    wanted = [json.loads(line)["loss"] for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
    losses = final_losses(folder)
    furthest = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    print(
        f"\n{told.read_text()}{len(losses)} losses, at most {furthest:.1e} from those of one process that nobody killed"
    )
    assert furthest <= LIMIT
