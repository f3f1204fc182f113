"""Random faults at random moments of real runs: does anything hang, stay behind, keep silent or get lost?

python benchmarks/faults.py [--count 300] [--seed 1] [--results FILE] [--beside 2] [--again NUMBER,...]

Each fault is a run of two to four ranks in float64 under mpirun, torchrun or a plain shell, with data parallelism, a
pipeline, tensor parallelism or ZeRO 1 to 3, over one of the relays. One rank is killed or stopped, or its connections are
cut, or what it writes is refused as on a full disk, or a file of the newest checkpoint is damaged before it is killed. The
faults go round phases and kinds evenly, in an order drawn from the seed; all else of a fault is drawn. Then the same
command is given again (or with `--resume`, where there are checkpoints), by the same launcher or, three times in four, to
ranks forked from a warm process; the losses are compared with those of an undisturbed run of one process.

Each result is appended to the results file (JSON lines, with seed and commit) as it comes: the same command goes on with
what is missing, and --again runs faults of these numbers once more. Prints a table by phase and fault of the newest result
of each; ends with 1 where one is bad.
"""

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind site-packages: only `tests` and `benchmarks` are meant

from benchmarks.fault_run import BAD, COLUMNS, LAYOUTS, STEPS, Drawn, losses_alone, try_fault  # noqa: E402
from benchmarks.struck_rank import PHASES  # noqa: E402
from tests.evidence import commit  # noqa: E402

RESULTS = ROOT / "docs" / "evidence" / "faults.jsonl"
FAULTS = ("kill", "stop", "cut link", "full disk", "damage")
LAUNCHERS = ("mpirun", "torchrun", "plain")
RELAYS = ("auto", "gloo", "shm", "mpi")
# At which of its calls a phase is struck, at most; 0 of "start" is before anything is imported.
LAST_CALL = {"start": 1, "plan": 1, "forward": 2 * STEPS, "backward": 2 * STEPS, "reduce": STEPS, "step": STEPS,
             "checkpoint": STEPS // 2, "end": 1}  # fmt: skip


def drawn(seed: int, number: int) -> Drawn:
    """The fault of this number: phase and fault from a shuffled deck of all pairs, the rest at random."""
    deck = [(phase, fault) for phase in PHASES for fault in FAULTS]
    turn, place = divmod(number, len(deck))
    random.Random(f"{seed}, turn {turn}").shuffle(deck)
    phase, fault = deck[place]
    draw = random.Random(f"{seed}, number {number}")
    launcher, ranks = draw.choice(LAUNCHERS), draw.choices((2, 3, 4), (6, 3, 1))[0]
    return Drawn(
        number=number,
        launcher=launcher,
        ranks=ranks,
        layout=draw.choice(list(LAYOUTS)),
        relay=draw.choice(RELAYS if launcher == "mpirun" else RELAYS[:3]),
        phase=phase,
        fault=fault,
        rank=draw.randrange(ranks),
        call=draw.randint(0 if phase == "start" else 1, LAST_CALL[phase]),
        again=draw.choice(("launcher", *["forked"] * 3)),
    )


def newest(results: Path, seed: int) -> dict[int, dict[str, Any]]:
    """By number, the last result of this seed; `tries` says how many there are."""
    found: dict[int, dict[str, Any]] = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        row = json.loads(line)
        if row["seed"] == seed:
            found[row["number"]] = {**row, "tries": found.get(row["number"], {"tries": 0})["tries"] + 1}
    return found


def one(number: int, seed: int, wanted: list[float]) -> dict[str, Any]:
    """Runs in a process of its own beside others."""
    fault = drawn(seed, number)
    folder = Path(tempfile.mkdtemp(prefix=f"fault-{number}-"))
    try:
        return {"seed": seed, "commit": commit(), **fault._asdict(), **try_fault(fault, folder, wanted)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--beside", type=int, default=2, help="how many faults run side by side")
    parser.add_argument("--again", default="", help="numbers, or `bad`: all that went badly")
    options = parser.parse_args()
    done = newest(options.results, options.seed)
    bad = [number for number, row in done.items() if any(row[column] for column in BAD)]
    again = bad if options.again == "bad" else [int(number) for number in options.again.split(",") if number]
    missing = again + [number for number in range(options.count) if number not in done]
    if missing:
        with tempfile.TemporaryDirectory() as name:
            wanted = losses_alone(Path(name))
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.beside, mp_context=context) as pool, options.results.open("a") as file:
            for future in as_completed([pool.submit(one, number, options.seed, wanted) for number in missing]):
                row = future.result()
                print(json.dumps(row), file=file, flush=True)
                print(told(row), flush=True)
    return show(
        {number: row for number, row in newest(options.results, options.seed).items() if number < options.count}
    )


def told(row: dict[str, Any]) -> str:
    bad = ", ".join(column for column in BAD if row[column])
    where = f"{row['phase']} {row['fault']}, {row['launcher']}, {row['layout']} on {row['ranks']}, relay {row['relay']}"
    return f"{row['number']}: {where}, rank {row['rank']}: {bad or 'well'}"


def show(rows: dict[int, dict[str, Any]]) -> int:
    """Prints the table, as Markdown, and what went badly; 1 where something did."""
    print(f"\n| phase | fault | {' | '.join(COLUMNS)} |")
    print("|---|---|" + "---:|" * len(COLUMNS))
    for phase in PHASES:
        for fault in FAULTS:
            print_row(phase, fault, [row for row in rows.values() if (row["phase"], row["fault"]) == (phase, fault)])
    print_row("**all**", "", list(rows.values()))
    for key in ("launcher", "layout", "relay", "ranks", "commit"):
        counts = {
            value: sum(row[key] == value for row in rows.values()) for value in sorted({r[key] for r in rows.values()})
        }
        print(f"{key}: " + ", ".join(f"{value} {count}" for value, count in counts.items()))
    again = sorted(number for number, row in rows.items() if row["tries"] > 1)
    print(f"run more than once: {', '.join(map(str, again)) or 'none'}")
    seconds = sorted(row["seconds"] for row in rows.values() if row["seconds"] is not None)
    if seconds:
        print(
            f"seconds from a fault to the last survivor's word: median {seconds[len(seconds) // 2]:.1f}, most {seconds[-1]:.1f}"
        )
    bad = [row for row in rows.values() if any(row[column] for column in BAD)]
    for row in bad:
        print(told(row))
        for rank, text in row["said"].items():
            print(f"    {rank}: {text}")
    return int(bool(bad))


def print_row(phase: str, fault: str, rows: list[dict[str, Any]]) -> None:
    counts = [len(rows), *(sum(row[column] for row in rows) for column in COLUMNS[1:])]
    print(f"| {phase} | {fault} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    sys.exit(main())
