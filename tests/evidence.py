"""Runs the proofs that take too long for every change, and keeps what they print in docs/evidence, to be committed.

python tests/evidence.py [NAME ...]     all where none is named; exits with 1 where one fails

Each file begins with the date, the commit, the machine and the command, and ends with how the command ended.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "evidence"
LATE_DEVICE = "tests/communicator/bridge/test_late_device.py"
LATE_TRAINING = "tests/runtime/loop/test_late_device.py"
LAWS = ["tests/predictor/pipeline/test_laws.py", "tests/predictor/pipeline/test_descriptions.py"]
RANDOM_LAYOUTS = "tests/runtime/pipeline/test_random_layouts.py"
RANDOM_CLUSTERS = "tests/synthesis/test_random_clusters.py"
PLANNED = "tests/planner/test_plans_train.py"
PROGRAM_MEMORY = "tests/synthesis/test_memory.py"
PROGRAMS = {
    "vgg19": "vgg19", "vit": "vit and not vit12", "bert": "bert and not bert12 and not moe", "bert-moe": "moe and not moe12",
    "deep": "vit12 or bert12 or moe12",
}  # fmt: skip

PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "--timeout=0"]

PROOFS = {
    "reference": ["benchmarks/reference.py"],
    "faults": ["benchmarks/faults.py"],
    "random-kills": [*PYTEST, "-q", "-s", "tests/faults/test_random_kills.py"],
    "stragglers": ["benchmarks/stragglers.py"],
    "planner-exhaustive": ["benchmarks/planner.py", "exhaustive", "--first", "95000"],
    "planner-bounded": ["benchmarks/planner.py", "bounded", "--first", "94000"],
    "planner-effort": ["benchmarks/searches.py", "effort"],
    "planner-annealing": ["benchmarks/searches.py", "annealing"],
    "planner-laws": ["benchmarks/laws.py"],
    "planner-ablation": ["benchmarks/ablation.py"],
    "planned-training": [*PYTEST, "-q", "-rP", "-n", "2", PLANNED, "-k", "random"],
    "planner-recipes": ["benchmarks/recipes.py"],
    "planner-peers": ["benchmarks/peers.py"],
    "rehearsed": ["benchmarks/rehearsed.py", "--plans", "60", "--seed", "50"],
    "links": ["benchmarks/links.py"],
    "memory": ["benchmarks/memory.py"],
    "planned-memory": ["benchmarks/memory.py", "--planned", "12", "--first", "1200"],
    "wire": ["benchmarks/wire.py"],
    "laws": [*PYTEST, "-v", "-n", "2", *LAWS],
    "late-device": [*PYTEST, "-q", LATE_DEVICE, "-k", "no_order"],
    "late-training": [*PYTEST, "-q", LATE_TRAINING, "-k", "equals"],
    "compilers": [*PYTEST, "-rA", "tests/kernels/test_compilers.py"],
    "late-mutants": [*PYTEST, "-rA", LATE_DEVICE, "-k", "taken_away"],
    "random-layouts": [*PYTEST, "-q", RANDOM_LAYOUTS],
    **{
        f"programs-{name}": [*PYTEST, "-q", "-rP", "-m", "slow", RANDOM_CLUSTERS, "-k", chosen]
        for name, chosen in PROGRAMS.items()
    },
    "program-memory": [*PYTEST, "-q", "-rP", "-n", "2", PROGRAM_MEMORY],
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "RANDOM_LAYOUTS": "1000", "RANDOM_CLUSTERS": "50", "RANDOM_LIMITS": "100", "RANDOM_SEED": "1",
    "RANDOM_PLANS": "40", "LAWS": "10000", "LAWS_SEED": "1", "LATE_SEEDS": "1000", "KILLS": "20",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROOFS))
    names = parser.parse_args().names or list(PROOFS)
    if unknown := set(names) - PROOFS.keys():
        parser.error(f"no proof is called {', '.join(sorted(unknown))}; there are {', '.join(PROOFS)}")
    failed = [name for name in names if not prove(name)]
    return 1 if failed else 0


def prove(name: str) -> bool:
    """Whether the proof holds; docs/evidence/NAME.txt tells."""
    command = PROOFS[name]
    lines = [
        f"date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"commit: {commit()}",
        f"machine: {machine()}",
        f"command: python {' '.join(command)}",
        "",
    ]
    began, path = time.monotonic(), FOLDER / f"{name}.txt"
    FOLDER.mkdir(exist_ok=True)
    with path.open("w") as file:  # what a proof that is cut off has shown stays
        print(*lines, sep="\n", file=file, flush=True)
        ended = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=file,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    said = path.read_text().replace(f"{ROOT}/", "").replace(str(ROOT), ".").rstrip()
    how = f"exit code {ended.returncode} after {time.monotonic() - began:.0f} s"
    path.write_text(f"{said}\n\n{how}\n")
    print(f"{name}: {how}", flush=True)
    return ended.returncode == 0


def commit() -> str:
    """The commit that is checked out; said too where the files differ from it, earlier evidence aside."""
    here = _git("rev-parse", "--short=12", "HEAD")
    return f"{here}, with changes" if _git("status", "--porcelain", "--", ":!docs/evidence") else here


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    information = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", information.read_text()) if information.exists() else None
    processor = found[1] if found else platform.machine()
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}"


if __name__ == "__main__":
    sys.exit(main())
