"""What `auto` leaves on the table on clusters that no grid reaches: beside it searches that take their time.

python benchmarks/searches.py [effort] [annealing] [--moves 60000] [--first SEED]

effort      the planner with ten times of everything that its effort counts, on twenty random clusters of 16 to 320
            accelerators: how much smaller the mean over the scenarios gets (asked: 1 % at most)
annealing   simulated annealing with nothing of the planner (tests/oracle/annealing.py) on the first eight of these, of
            16 to 64 accelerators: from plans that anyone would draw, and from the planner's answer. How much shorter
            its step is than the shortest that `auto` knows (asked: 2 % at most), and its mean than the answer's

Clusters are of two to four sorts of the catalogue's accelerators in nodes of four or eight, speeds of networks drawn.
Steps are predicted by the function that the planner decides with: this says what its search is worth and nothing about
the predictor. Exits with 1 where more is left.
"""

import argparse
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.ablation import EFFORT  # noqa: E402
from benchmarks.search_times import model_named  # noqa: E402
from hethub.commands.common import processors  # noqa: E402
from hethub.planner import PlanResult, plan  # noqa: E402
from hethub.planner.evaluate.outlook import Outlooks  # noqa: E402
from hethub.planner.problem.pose import pose  # noqa: E402
from hethub.planner.problem.problem import Batch  # noqa: E402
from hethub.planner.search.effort import Effort, effort_for  # noqa: E402
from hethub.spec.cluster import ClusterSpec  # noqa: E402
from tests.oracle.annealing import COLDEST, Walk  # noqa: E402
from tests.oracle.question import Question  # noqa: E402

SIZES = (16, 16, 24, 24, 32, 32, 48, 64, 48, 64, 96, 96, 128, 128, 192, 192, 256, 256, 320, 320)
ANNEALED = 8
SORTS = (
    "H100-SXM5-80GB", "A100-SXM4-80GB", "A100-SXM4-40GB", "V100-SXM2-32GB", "L40S", "MI300X", "MI250X-GCD", "MI210",
)  # fmt: skip
MORE, MOST_BY_EFFORT, MOST_BY_ANNEALING = 10, 1.0, 2.0  # times, percent, percent
RATES = {"uphill", "optimism"}  # of an effort; all else are counts


class Row(NamedTuple):
    """A question's line, and by how many percent `auto` was behind."""

    text: str
    behind: float


def question(index: int, first: int) -> Question:
    """The cluster of that number with a model that it may train."""
    draw, size = random.Random(first + index), SIZES[index]
    sorts = draw.sample(SORTS, draw.choice((2, 3, 3, 4)) if size > 16 else 2)
    left, nodes = size, list[dict[str, Any]]()
    for number, name in enumerate(sorts):
        last = number == len(sorts) - 1
        own = left if last else draw.choice(range(4, left - 4 * (len(sorts) - 1 - number) + 1, 4))
        left -= own
        gbps = draw.choice((50, 100, 200, 400))
        wide = {"accelerator": name, "nics": 1, "gbps_per_nic": gbps}
        if own // 8:
            nodes.append({"name": f"eights{number}", "count": own // 8, "accelerators": 8, **wide})
        if own % 8:
            nodes.append({"name": f"four{number}", "accelerators": 4, **wide})
    model = "llama-7b" if size <= 24 else "llama2-13b" if size <= 64 else "llama-33b" if size <= 128 else "llama3-70b"
    cluster = ClusterSpec.model_validate({"name": f"random {first + index}", "nodes": nodes})
    return Question(model_named(model), cluster, 8 * size, 2048, "fp16")


def answer(asked: Question) -> PlanResult:
    return plan(asked.model, asked.cluster, _batch(asked), with_bounds=False)


def _batch(asked: Question) -> Batch:
    return Batch(asked.global_batch, asked.seq_len, asked.precision)


def named(asked: Question) -> str:
    nodes = " + ".join(f"{node.count * node.accelerators} {node.device.name}" for node in asked.cluster.nodes)
    return f"{asked.cluster.name}, {asked.model.name}: {nodes}"


def more_effort(question: Any) -> Effort:
    """Ten times what the planner spends."""
    usual = effort_for(question)
    return replace(usual, **{f.name: MORE * getattr(usual, f.name) for f in fields(usual) if f.name not in RATES})


def with_effort(index: int, first: int) -> Row:
    """`auto` beside itself with more effort."""
    asked = question(index, first)
    began = time.process_time()
    usual = answer(asked)
    middle = time.process_time()
    with patch(EFFORT, more_effort):
        more = answer(asked)
    seconds = (middle - began, time.process_time() - middle)
    behind = 100.0 * (usual.outlook.objective_seconds / more.outlook.objective_seconds - 1.0)
    return Row(
        f"{named(asked)}: mean over scenarios {usual.outlook.objective_seconds:.4f} s in {seconds[0]:.0f} s of CPU, "
        f"{more.outlook.objective_seconds:.4f} in {seconds[1]:.0f}: {behind:+.2f} % behind", behind,
    )  # fmt: skip


def annealed(index: int, first: int, moves: int) -> Row:
    """`auto` beside annealing, a third of whose moves are for each of its starts."""
    asked = question(index, first)
    usual = answer(asked)
    shortest = min([usual.prediction.step_seconds, *(own.step_seconds for own in usual.runners_up)])
    outlooks = Outlooks(pose(asked.model, asked.cluster, _batch(asked)))
    words, behind = [], -100.0
    for name in ("one stage", "a stage a sort", "auto's plan"):
        walk, draw = Walk(asked), random.Random(name)
        if name == "auto's plan":
            walk.anneal(walk.near(usual.plan), draw, moves // 3, hottest=10 * COLDEST)
        else:
            walk.anneal(walk.simple(pipeline=name != "one stage"), draw, moves // 3)
        if walk.plan is None:
            words.append(f"from {name} nothing that fits of {walk.predicted}")
            continue
        own = 100.0 * (shortest / walk.seconds - 1.0)
        mean = 100.0 * (usual.outlook.objective_seconds / outlooks.of(walk.plan).objective_seconds - 1.0)
        words.append(f"from {name} {own:+.2f} %, its mean {mean:+.2f} % ({walk.predicted} predicted)")
        behind = max(behind, own)
    return Row(f"{named(asked)}: {shortest:.4f} s; auto is behind annealing {'; '.join(words)}", behind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["effort", "annealing", []], help="both where none is named")
    parser.add_argument("--moves", type=int, default=60_000, help="of annealing a question")
    parser.add_argument("--first", type=int, default=7000, help="seed of the first cluster")
    options = parser.parse_args()
    wanted, kept = options.what or ["effort", "annealing"], True
    jobs = {
        "effort": (partial(with_effort, first=options.first), len(SIZES), MOST_BY_EFFORT),
        "annealing": (partial(annealed, first=options.first, moves=options.moves), ANNEALED, MOST_BY_ANNEALING),
    }
    for name in wanted:
        ask, number, most = jobs[name]
        found = []
        with ProcessPoolExecutor(processors()) as pool:
            for row in pool.map(ask, range(number)):
                found.append(row.behind)
                print(row.text, flush=True)
        within = sum(behind <= most for behind in found)
        kept &= within == number
        print(f"{name}: {within} of {number} within {most:g} %, worst {max(found):+.2f} %", flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
