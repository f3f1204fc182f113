"""Whether the order of plans holds: python benchmarks/order.py [--steps N] [--seed N] [--best N] [--random N]

Eight ranks of two makers: the planner's eight best plans and eight random ones are emulated (see benchmarks/hetero.py),
again on a slower clock where the cores could not keep the pace. Prints every plan's predicted and emulated step as it
comes, then the rank correlation over all plans and within the eight best, and how much slower the planner's choice is
than the fastest of all. Exit code 1 where a bound is missed.
"""

import argparse
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # behind site-packages: only `tests` and `benchmarks` are meant

from benchmarks.emulate import MOST_OVERRUN_PERCENT, Emulated, emulate_in_pace, pocket
from benchmarks.hetero import MODEL, PRECISION, SEQ_LEN, cluster, table, written
from hethub.planner import plan
from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout.bind import Layout, bind

GLOBAL_BATCH = 24
BEST, RANDOM = 8, 8
LEAST_OVER_ALL, LEAST_WITHIN_THE_BEST = 0.9, 0.5  # rank correlation
MOST_REGRET_PERCENT = 3.0
HEAD = ["plan", "stages", "predicted s", "emulated s", "predicted / emulated - 1, %", "overrun %", "took s"]


def best_plans(on: ClusterSpec, count: int) -> list[Layout]:
    """The planner's choice, and the best others it finds free or held to other degrees, that differ in predicted
    time."""
    wishes = [ConstraintsSpec(), *(ConstraintsSpec(pp=pp, max_micro_batch=b) for pp in (1, 2, 4) for b in (1, 2, 4))]
    found: dict[str, Layout] = {}
    for wish in wishes:
        try:
            answer = plan(MODEL, on, (GLOBAL_BATCH, SEQ_LEN, PRECISION), wish, with_bounds=False, top=20)
        except BadInput:
            continue
        for each in [answer.plan, *(other.plan for other in answer.runners_up)]:
            layout = bind(each, MODEL, on)
            found.setdefault(f"{predict(layout).step_seconds:.3g}", layout)
    return sorted(found.values(), key=lambda layout: predict(layout).step_seconds)[:count]


def random_plans(on: ClusterSpec, seed: int, count: int) -> list[Layout]:
    """Valid plans that fit, drawn at random: stages, layers, micro-batches and samples, ranks in order."""
    draw, found = random.Random(seed), list[Layout]()
    while len(found) < count:
        try:
            layout = written(on, GLOBAL_BATCH, _stages(on.size, draw))
        except BadInput:  # too few microbatches in flight, say
            continue
        if predict(layout).fits:
            found.append(layout)
    return found


def _stages(num_ranks: int, draw: random.Random) -> list[dict[str, Any]]:
    count = draw.choice([1, 2, 4])
    cuts = [0, *sorted(draw.sample(range(1, MODEL.layers), count - 1)), MODEL.layers]
    width = num_ranks // count
    stages = []
    for stage in range(count):
        samples = _parts(GLOBAL_BATCH, width, draw)
        replicas = [
            {"ranks": [stage * width + index], "micro_batch": min(own, draw.choice([1, 2, 4])), "samples": own}
            for index, own in enumerate(samples)
        ]
        stages.append({"layers": [[cuts[stage], cuts[stage + 1]]], "replicas": replicas, "zero": 1})
    return stages


def _parts(whole: int, count: int, draw: random.Random) -> list[int]:
    """`whole` in so many positive parts, none more than three times another."""
    while True:
        cuts = [0, *sorted(draw.sample(range(1, whole), count - 1)), whole]
        parts = [stop - start for start, stop in pairwise(cuts)]
        if max(parts) <= 3 * min(parts):
            return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--best", type=int, default=BEST)
    parser.add_argument("--random", type=int, default=RANDOM)
    options = parser.parse_args()
    started = time.perf_counter()
    on = cluster("makers", (pocket("A100-SXM4-80GB"), 4), (pocket("MI250X-GCD"), 4))
    best, others = best_plans(on, options.best), random_plans(on, options.seed, options.random)
    print(
        f"{len(best)} + {len(others)} plans found in {time.perf_counter() - started:.0f} s\n\n{table(HEAD, [])}",
        flush=True,
    )
    runs = [_run(f"best {index}", layout, options.steps) for index, layout in enumerate(best, 1)]
    runs += [_run(f"random {index}", layout, options.steps) for index, layout in enumerate(others, 1)]
    rows, reached = verdicts(runs, len(best))
    print(f"\n{table(['figure', 'emulated', 'to reach', 'reached'], rows)}\n\n{time.perf_counter() - started:.0f} s")
    if not reached:
        sys.exit(1)


def _run(name: str, layout: Layout, steps: int) -> Emulated:
    """One plan emulated, its row printed."""
    done = emulate_in_pace(layout, steps=steps)
    cells = [
        name, _describe(layout), f"{done.predicted_seconds:.3f}", f"{done.step_seconds:.3f}", f"{done.error_percent:+.1f}",
        f"{done.overrun_percent:.2f}", f"{done.real_seconds:.0f}",
    ]  # fmt: skip
    print(f"| {' | '.join(cells)} |", flush=True)
    return done


def verdicts(runs: list[Emulated], num_best: int) -> tuple[list[list[str]], bool]:
    """The figures with their bounds, and whether all are kept; the planner's choice comes first, its best runners-up
    next."""
    emulated = [run.step_seconds for run in runs]
    regret = 100.0 * (emulated[0] / min(emulated) - 1.0)
    overrun = max(run.overrun_percent for run in runs)
    over_all, within = _order(runs), _order(runs[:num_best])
    found = [
        ("rank correlation over all", f"{over_all:.3f}", f"≥ {LEAST_OVER_ALL}", over_all >= LEAST_OVER_ALL),
        (
            "rank correlation within the best", f"{within:.3f}", f"≥ {LEAST_WITHIN_THE_BEST}",
            within >= LEAST_WITHIN_THE_BEST,
        ),
        ("regret of the planner's choice", f"{regret:.1f} %", f"≤ {MOST_REGRET_PERCENT:g} %", regret <= MOST_REGRET_PERCENT),
        ("overrun, worst plan", f"{overrun:.2f} %", f"≤ {MOST_OVERRUN_PERCENT:g} %", overrun <= MOST_OVERRUN_PERCENT),
    ]  # fmt: skip
    rows = [[name, figure, bound, "yes" if kept else "no"] for name, figure, bound, kept in found]
    return rows, all(kept for *_, kept in found)


def _order(runs: list[Emulated]) -> float:
    """Spearman's rank correlation of predicted and emulated steps."""
    return float(spearmanr([run.predicted_seconds for run in runs], [run.step_seconds for run in runs]).statistic)


def _describe(layout: Layout) -> str:
    return "; ".join(
        f"{layout.plan.schedule} ZeRO {stage.zero} [{stage.layers[0][0]}, {stage.layers[-1][1]}): "
        + " ".join(f"{len(r.ranks)}x{r.micro_batch}/{r.samples}" for r in stage.replicas)
        for stage in layout.stages
    )


if __name__ == "__main__":
    main()
