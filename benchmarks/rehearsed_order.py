"""Whether the order of plans holds: python benchmarks/rehearsed_order.py [--steps N] [--seed N]

Eight ranks of two makers: the planner's eight best plans and eight random ones are rehearsed (see benchmarks/hetero.py).
Prints every plan's predicted and rehearsed step, the rank correlation over all plans and within the eight best, and how
much slower the planner's choice is than the fastest of all.
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

from benchmarks.hetero import MODEL, PRECISION, SEQ_LEN, cluster, table, written
from benchmarks.rehearse import pocket, rehearse
from hethub.planner import plan
from hethub.predictor import predict
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.job import ConstraintsSpec
from hethub.spec.layout import Layout, bind

GLOBAL_BATCH = 24
BEST, RANDOM = 8, 8
GOALS = {"over all": 0.9, "within the best": 0.5}
MOST_REGRET_PERCENT = 3.0


def best_plans(on: ClusterSpec) -> list[Layout]:
    """The planner's choice, and the best others it finds free or held to other degrees, that differ in predicted time."""
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
    return sorted(found.values(), key=lambda layout: predict(layout).step_seconds)[:BEST]


def random_plans(on: ClusterSpec, seed: int) -> list[Layout]:
    """Valid plans drawn at random: stages, layers, micro-batches and samples, ranks in order."""
    draw, found = random.Random(seed), list[Layout]()
    while len(found) < RANDOM:
        try:
            found.append(written(on, GLOBAL_BATCH, _stages(on.size, draw)))
        except BadInput:  # too few tiles in flight, say
            continue
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
    options = parser.parse_args()
    started = time.perf_counter()
    on = cluster("makers", (pocket("A100-SXM4-80GB"), 4), (pocket("MI250X-GCD"), 4))
    layouts = [*best_plans(on), *random_plans(on, options.seed)]
    num_best = len(layouts) - RANDOM
    print("| plan | stages | predicted s | rehearsed s | overrun % |\n|---|---|---|---|---|")
    predicted, rehearsed = list[float](), list[float]()
    for index, layout in enumerate(layouts):
        outcome = rehearse(layout, steps=options.steps)
        predicted.append(predict(layout).step_seconds)
        rehearsed.append(outcome.step_seconds)
        name = f"best {index + 1}" if index < num_best else f"random {index - num_best + 1}"
        print(
            f"| {name} | {_describe(layout)} | {predicted[-1]:.3f} | {rehearsed[-1]:.3f} | {outcome.overrun_percent:.2f} |",
            flush=True,
        )
    found = {
        "over all": float(spearmanr(predicted, rehearsed).statistic),
        "within the best": float(spearmanr(predicted[:num_best], rehearsed[:num_best]).statistic),
    }
    rows = [[f"rank correlation {name}", f"{found[name]:.3f}", f"≥ {goal}"] for name, goal in GOALS.items()]
    regret = 100.0 * (rehearsed[0] / min(rehearsed) - 1.0)
    rows.append(["regret of the planner's choice", f"{regret:.1f} %", f"≤ {MOST_REGRET_PERCENT:g} %"])
    print(f"\n{table(['figure', 'rehearsed', 'to reach'], rows)}\n\n{time.perf_counter() - started:.0f} s")


def _describe(layout: Layout) -> str:
    return "; ".join(
        f"{layout.plan.schedule} ZeRO {stage.zero} [{stage.layers[0][0]}, {stage.layers[-1][1]}): "
        + " ".join(f"{len(r.ranks)}x{r.micro_batch}/{r.samples}" for r in stage.replicas)
        for stage in layout.stages
    )


if __name__ == "__main__":
    main()
