"""Results that moving code must leave bit for bit: plans, losses and weights of every named layout, the demo's losses.

python benchmarks/reference.py [plans] [layouts] [demo] [--write]

- plans: the plan, step time and both bounds of 27 questions, beside tests/reference/plans.json
- layouts: losses, norms and weights of every layout of tests/runtime/pipeline/test_layouts*.py, beside
  tests/reference/layouts.json
- demo: the 60 losses of `make demo`, beside tests/reference/demo.json

Without --write it compares, prints a line for everything that differs and exits with 1. A change that means to alter a
result runs it with --write and says in its commit which plans changed and why. Times are hexadecimal floats: bits, not
digits. Losses depend on the processor's instructions and torch's version, which the files name.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind all packages: the link `kernels` answers for another one

from benchmarks.planner import CASES  # noqa: E402
from benchmarks.search_times import cluster_named, model_named  # noqa: E402
from hethub.commands.common import processors  # noqa: E402
from hethub.planner import plan  # noqa: E402
from hethub.planner.problem.problem import Batch  # noqa: E402
from hethub.spec.documents import dump_yaml  # noqa: E402

FOLDER = ROOT / "tests" / "reference"
QUESTIONS = [
    *CASES,
    ("hethub-768", "llama-140b", 512, 4096, "bf16"),
    ("laptop-mixed", "llama-tiny", 16, 128, "fp32"),
    ("rehearsal", "tinyllama-1.1b", 64, 2048, "bf16"),
]


def plans() -> dict[str, Any]:
    """Per question the step in seconds, both bounds and a digest of the plan file."""
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(processors()) as pool:
        for (cluster, model, size, *_), own in zip(QUESTIONS, pool.map(planned, QUESTIONS), strict=True):
            name = f"{cluster} {model} {size}"
            found[name] = own
            print(f"{name:44s} {own['about']}", flush=True)
    return found


def planned(question: tuple[str, str, int, int, str]) -> dict[str, Any]:
    """The answer to one question."""
    cluster, model, global_batch, seq_len, precision = question
    result = plan(model_named(model), cluster_named(cluster), Batch(global_batch, seq_len, precision))  # type: ignore[arg-type]
    prediction = result.prediction
    bound = prediction.makers_alone_tokens_per_second
    return {
        "step_seconds": prediction.step_seconds.hex(),
        "upper_bound_tokens_per_second": None if bound is None else bound.hex(),
        "ceiling_tokens_per_second": prediction.ceiling_tokens_per_second.hex(),
        "plan": hashlib.sha256(dump_yaml(result.plan.to_dict()).encode()).hexdigest()[:16],
        "about": f"{prediction.step_seconds:.5g} s, {result.plan.schedule}, {len(result.plan.stages)} stages",
    }


def layouts() -> dict[str, Any]:
    """Per layout a digest of its training."""
    from tests.runtime.pipeline import test_layouts, test_layouts_schedules
    from tests.support.layouts import trained

    return {case.name: trained(case) for case in [*test_layouts.CASES, *test_layouts_schedules.CASES]}


def demo() -> dict[str, Any]:
    """The loss of every step of `make demo`, whose plan is here the same whatever the ranks measure of themselves."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["-n", "4", "--oversubscribe", "--bind-to", "none", "--continuous"]
        mpirun = Path(sys.executable).with_name("mpirun")
        hethub = Path(sys.executable).with_name("hethub")
        job = ROOT / "configs/jobs/laptop-mixed.yaml"
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [mpirun, *command, hethub, "train", job, "--run-dir", run, "--set", "measure=never"],
            env={**os.environ, **root}, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {str(line["step"]): float(line["loss"]).hex() for line in lines}


SORTS: dict[str, Callable[[], dict[str, Any]]] = {"plans": plans, "layouts": layouts, "demo": demo}


def main() -> int:
    from tests.support.layouts import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sorts", nargs="*", metavar="SORT", help="plans, layouts, demo; all where none is named")
    parser.add_argument("--write", action="store_true", help="keep what is found as the reference")
    options = parser.parse_args()
    different = 0
    for sort in options.sorts or SORTS:
        path = FOLDER / f"{sort}.json"
        results, own = SORTS[sort](), machine()
        if options.write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"machine": own, "results": results}, indent=1) + "\n")
            continue
        known = json.loads(path.read_text())
        if known["machine"] != own:
            print(f"{sort}: the reference is of {known['machine']}, this is {own}")
        names = known["results"].keys() | results.keys()
        wrong = [name for name in names if known["results"].get(name) != results.get(name)]
        for name in sorted(wrong):
            print(f"{sort}, {name}: was {known['results'].get(name)}, is {results.get(name)}")
        print(f"{sort}: {len(names) - len(wrong)} of {len(names)} equal")
        different += len(wrong)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
