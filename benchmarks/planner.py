"""What the planner is worth, in figures; every one beside what is asked of it.

python benchmarks/planner.py [MODE ...] [--clusters N] [--first SEED]

hethub      hethub-768 with Llama-140B: % of the makers alone at 2,048 and 512 sequences, and over AMD:NVIDIA layer-rate
            ratios
joint       joint-16 with Llama 3 8B: % of the makers alone (configs/jobs/joint-16.yaml: batch 512)
families    mixed clusters x models: auto against every family, how much the search beat its start, the gap closed
times       search_seconds in fresh processes, median of 5, by number of accelerators; unseen random speeds; --explain
links       the mixed clusters: the answer where links give 60 % of their rate, beside the fastest plan found for such
            links
growth      search_seconds from 8 to 10,240 accelerators, drawn in docs/search_time.svg
exhaustive  auto, inside the grid and with all that it may do, against the whole grid of N random clusters of 3 and 4 unlike
            accelerators, 6 layers (default 200)
bounded     the same for N clusters of 6 accelerators, 8 layers (default 20): billions of points, all but a few left out
            by their bound

All times of steps are predicted by hethub.predictor; nothing here runs on an accelerator. Exits with 1 where a figure misses
its bound.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import search_times  # noqa: E402
from benchmarks.search_times import cluster_named, model_named  # noqa: E402
from hethub.planner import PlanResult, plan  # noqa: E402
from hethub.planner.estimate.costs import UnitCosts  # noqa: E402
from hethub.planner.evaluate.outlook import LEAST_LINKS  # noqa: E402
from hethub.planner.problem.pose import pose  # noqa: E402
from hethub.planner.problem.problem import Batch  # noqa: E402
from hethub.planner.problem.scaled import Scale, scaled  # noqa: E402
from hethub.spec.cluster import ClusterSpec  # noqa: E402
from hethub.spec.errors import BadInput  # noqa: E402
from hethub.spec.job import ConstraintsSpec  # noqa: E402
from hethub.spec.model import ModelSpec  # noqa: E402

# Cluster, model, global batch, sequence length, precision. On clusters of a paper its own sequence length, precision
# and batch: 1 M tokens (Zorse), 2 M (Poplar), 16 sequences per accelerator (Cephalo).
CASES = [
    ("zorse-a", "llama2-7b", 256, 4096, "fp16"),
    ("zorse-a", "llama2-13b", 256, 4096, "fp16"),
    ("zorse-b", "llama-7b", 1024, 1024, "fp16"),
    ("zorse-b", "llama-13b", 1024, 1024, "fp16"),
    ("zorse-c", "llama-7b", 2048, 512, "fp16"),
    ("zorse-c", "llama-13b", 2048, 512, "fp16"),
    ("poplar-a", "tinyllama-1.1b", 1024, 2048, "bf16"),
    ("poplar-a", "llama-7b", 1024, 2048, "bf16"),
    ("poplar-b", "gpt3-350m", 1024, 2048, "fp16"),
    ("poplar-b", "tinyllama-1.1b", 1024, 2048, "fp16"),
    ("poplar-c", "tinyllama-1.1b", 1024, 2048, "fp16"),
    ("poplar-c", "llama-7b", 1024, 2048, "fp16"),
    ("cephalo-paper", "gpt3-350m", 128, 512, "fp32"),
    ("cephalo-paper", "tinyllama-1.1b", 128, 512, "fp32"),
    ("cephalo-aws", "gpt3-2.7b", 1024, 512, "fp16"),
    ("cephalo-aws", "llama-7b", 1024, 512, "fp16"),
    ("hap-64", "gpt3-1.3b", 512, 1024, "fp16"),
    ("hap-64", "llama-7b", 512, 1024, "fp16"),
    ("joint-16", "llama3-8b", 512, 8192, "bf16"),
    ("hetu-48", "llama2-13b", 512, 4096, "bf16"),
    ("hetu-48", "llama-33b", 512, 2048, "bf16"),
    ("sailor-mixed", "gpt3-350m", 256, 2048, "fp16"),
    ("sailor-mixed", "gpt3-1.3b", 256, 2048, "fp16"),
    ("hethub-768", "llama-140b", 2048, 4096, "bf16"),
]
OWN_CLUSTER = {
    "zorse": ("zorse-a", "zorse-b", "zorse-c"),
    "poplar": ("poplar-a", "poplar-b", "poplar-c"),
    "cephalo": ("cephalo-paper", "cephalo-aws"),
    "hethub": ("hethub-768",),
}


def line(name: str, found: PlanResult) -> None:
    p = found.prediction
    bound = "-" if p.percent_of_makers_alone is None else f"{p.percent_of_makers_alone:.2f}"
    print(
        f"{name:44s} step {p.step_seconds:9.4f} s  {bound:>7s} % of makers alone  {p.percent_of_ceiling:6.2f} % of ceiling  "
        f"{found.candidates:4d} judged  {found.search_seconds:6.2f} s",
        flush=True,
    )


def layer_ratio(cluster: ClusterSpec, model: ModelSpec, batch: Batch) -> float:
    """Layer rate of the cluster's first node's accelerators over the last's."""
    problem = pose(model, cluster, batch)
    costs = UnitCosts(problem)
    rates = {own.accelerator.name: costs.layer_rate(index) for index, own in enumerate(problem.device_types)}
    return rates[cluster.nodes[0].device.name] / rates[cluster.nodes[-1].device.name]


def with_ratio(cluster: ClusterSpec, model: ModelSpec, batch: Batch, wanted: float) -> ClusterSpec:
    """The cluster with its first node's accelerators scaled until their layer rate is `wanted` of the last's."""
    name = cluster.nodes[0].device.name
    low, high = 0.05, 20.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        if layer_ratio(scaled(cluster, Scale(compute={name: middle})), model, batch) < wanted:
            low = middle
        else:
            high = middle
    return scaled(cluster, Scale(compute={name: high}))


missed: list[str] = []


def verdict(what: str, figure: float, bound: float, *, at_most: bool = False, unit: str = "") -> None:
    """A line with a figure, its bound and whether it is kept; what is not is among `missed`."""
    kept = figure <= bound if at_most else figure >= bound
    missed.extend([] if kept else [what])
    sign = "at most" if at_most else "at least"
    print(f"{what}: {figure:.4g}{unit}, to reach {sign} {bound:g}{unit}: {'yes' if kept else 'MISSED'}", flush=True)


def hethub() -> None:
    cluster, model = cluster_named("hethub-768"), model_named("llama-140b")
    for size, least in ((2048, 99.0), (512, 97.5)):
        found = plan(model, cluster, Batch(size, 4096, "bf16"))
        line(f"hethub-768 llama-140b batch {size}", found)
        verdict("  % of the makers alone", found.prediction.percent_of_makers_alone or 0.0, least, unit=" %")
    batch = Batch(2048, 4096, "bf16")
    print(f"layer-rate ratio AMD:NVIDIA as fitted: {layer_ratio(cluster, model, batch):.3f}")
    percents = []
    for ratio in (0.35, 0.5, 0.61, 0.75, 0.9):
        found = plan(model, with_ratio(cluster, model, batch, ratio), batch)
        line(f"hethub-768 llama-140b batch 2048 ratio {ratio}", found)
        percents.append(found.prediction.percent_of_makers_alone or 0.0)
    verdict(
        "mean over ratios (HETHUB's own best case: 97.49 % of its bound)", statistics.mean(percents), 98.5, unit=" %"
    )


def joint() -> None:
    for size in (256, 512, 1024, 2048):
        found = plan(model_named("llama3-8b"), cluster_named("joint-16"), Batch(size, 8192, "bf16"))
        line(f"joint-16 llama3-8b batch {size} sequence 8192", found)
        verdict("  % of the makers alone", found.prediction.percent_of_makers_alone or 0.0, 98.5, unit=" %")


def families() -> None:
    """Auto against every family; geometric means."""
    over_best, over_uniform, closed = [], [], []
    own: dict[str, list[tuple[str, float, float | None]]] = {name: [] for name in OWN_CLUSTER}
    for name, model, global_batch, seq_len, precision in CASES:
        cluster, batch = cluster_named(name), Batch(global_batch, seq_len, precision)  # type: ignore[arg-type]
        try:
            found = plan(model_named(model), cluster, batch, explain=True)
        except BadInput as error:
            print(f"{name} {model}: {error}")
            continue
        line(f"{name} {model}", found)
        step = found.prediction.step_seconds
        times = {row.strategy: row.step_seconds for row in found.families if row.step_seconds}
        print("    " + "  ".join(f"{k} {v / step:.3f}x" for k, v in times.items()), flush=True)
        if not times:
            continue
        best = min(times.values())
        over_best.append(best / step)
        if "uniform" in times:
            if rates_differ(cluster, model_named(model), batch):
                over_uniform.append(times["uniform"] / step)
            for family, clusters in OWN_CLUSTER.items():
                if name in clusters and family in times:
                    even = even_data_parallel(cluster, model_named(model), batch) if family in DATA_PARALLEL else None
                    over_even = even and even / times[family]
                    own[family].append((f"{name} {model}", times["uniform"] / times[family], over_even))
        tokens = global_batch * seq_len
        bound = min(found.prediction.makers_alone_tokens_per_second or 1e99, found.prediction.ceiling_tokens_per_second)
        if best * bound / tokens > 1.02:
            closed.append(max(1e-3, (best - step) / (best - min(best, tokens / bound))))
    mean = statistics.geometric_mean
    verdict("auto over the best family, the worst case", min(over_best), 1.0, unit="x")
    verdict(f"auto over the best family, geometric mean of {len(over_best)}", mean(over_best), 1.05, unit="x")
    verdict(f"auto over uniform where rates differ >= 1.5x, of {len(over_uniform)}", mean(over_uniform), 1.5, unit="x")
    verdict(f"gap to min(upper bound, ceiling) closed, of {len(closed)}", 100 * mean(closed), 50.0, unit=" %")
    for family, ratios in own.items():
        for where, ratio, over_even in ratios:
            beside = f"; {over_even:.3g}x over even data parallelism" if over_even else ""
            verdict(f"{family} over uniform on {where} (paper: {CLAIMS[family]}{beside})", ratio, 1.0, unit="x")


def links() -> None:
    """How far the answers are behind where links turn out to give 60 %, the least of the scenarios."""
    behind = {}
    for cluster, model, size, seq_len, precision in CASES:
        on, batch = cluster_named(cluster), Batch(size, seq_len, precision)  # type: ignore[arg-type]
        found = plan(model_named(model), on, batch, with_bounds=False)
        slow = scaled(on, Scale(in_node=LEAST_LINKS, network=LEAST_LINKS, bridge=LEAST_LINKS))
        known = plan(model_named(model), slow, batch, with_bounds=False)
        own = found.outlook.links_at_60_percent_seconds
        best = min(own, known.prediction.step_seconds, *(p.step_seconds for p in [known.best_on_point] if p))
        name = f"{cluster} {model} {size}"
        behind[name] = 100.0 * (own / best - 1.0)
        print(
            f"{name:44s} {found.prediction.step_seconds:9.4f} s, links at 60 % {own:9.4f} s, best then {best:9.4f} s, "
            f"behind {behind[name]:5.1f} %",
            flush=True,
        )
    print(f"behind in the mean {statistics.fmean(behind.values()):.1f} %")
    verdict("behind the best plan for such links, worst", max(behind.values()), 10.0, at_most=True, unit=" %")


def even_data_parallel(cluster: ClusterSpec, model: ModelSpec, batch: Batch) -> float | None:
    """The step of the best even data parallelism at any ZeRO level, what systems without pipelines are compared with in
    their papers; None where it does not fit."""
    steps = []
    for zero in (1, 2, 3):
        try:
            found = plan(
                model, cluster, batch, ConstraintsSpec(pp=1, tp=1, zero=zero), strategy="uniform", with_bounds=False
            )
        except BadInput:
            continue
        steps.append(found.prediction.step_seconds)
    return min(steps, default=None)


DATA_PARALLEL = ("poplar", "cephalo")
CLAIMS = {
    "zorse": "up to 3x over other systems", "poplar": "1.02-3.92x over DeepSpeed and Whale",
    "cephalo": "1.2-10.8x over other systems", "hethub": "97.49 % of its upper bound",
}  # fmt: skip


def rates_differ(cluster: ClusterSpec, model: ModelSpec, batch: Batch) -> bool:
    problem = pose(model, cluster, batch)
    costs = UnitCosts(problem)
    rates = [costs.layer_rate(index) for index in range(len(problem.device_types))]
    return max(rates) >= 1.5 * min(rates)


NEAR = 1.005  # times the optimum


def exhaustive(number: int, first: int, accelerators: tuple[int, ...] = (3, 4), layers: int = 6) -> None:
    """So many clusters from seed `first` on, a line each, so that a run can be done in parts."""
    from tests.planner.search.test_against_oracle import compare

    slower, free = ({size: list[float]() for size in accelerators} for _ in range(2))
    points = timed = predicted = 0
    for seed in range(first, first + number):
        started = time.process_time()
        size = accelerators[seed % len(accelerators)]
        found = compare(seed, size, layers=layers)
        outcome = found.outcome
        slower[size].append(found.slower)
        free[size].append(found.slower_free)
        points, timed, predicted = points + outcome.points, timed + outcome.timed, predicted + outcome.predicted
        print(
            f"seed {seed}: {size} accelerators, auto {found.slower:.4f}x the optimum, with all it "
            f"may do {found.slower_free:.4f}x, {outcome.points:,} points, "
            f"{outcome.timed:,} timed, {outcome.predicted} predicted, CPU {time.process_time() - started:.0f} s",
            flush=True,
        )
    print(
        f"{number} clusters: {points:,} points; {timed:,} left by the bounds and timed action by action, {predicted:,} "
        "predicted; the others have a bound no shorter than the optimum"
    )
    for size, own in ((size, own) for size, own in slower.items() if own):
        near = 100.0 * sum(ratio <= NEAR for ratio in own) / len(own)
        verdict(f"{len(own)} of {size} accelerators, within 0.5 % of the optimum", near, 95.0, unit=" %")
        verdict("auto over the optimum, worst", max(own), 1.02, at_most=True, unit="x")
        verdict("with all it may do, worst", max(free[size]), 1.02, at_most=True, unit="x")


MODES: dict[str, Callable[[argparse.Namespace], None]] = {
    "hethub": lambda _: hethub(),
    "joint": lambda _: joint(),
    "families": lambda _: families(),
    "times": lambda _: search_times.times(verdict),
    "links": lambda _: links(),
    "growth": lambda _: search_times.growth(),
    "exhaustive": lambda options: exhaustive(options.clusters or 200, options.first),
    "bounded": lambda options: exhaustive(options.clusters or 20, options.first, (6,), 8),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "modes", nargs="*", metavar="MODE", help=f"of {', '.join(MODES)}; the first four where none is named"
    )
    parser.add_argument("--clusters", type=int, help="how many of them; 200, of `bounded` 20")
    parser.add_argument("--first", type=int, default=0, help="seed of the first cluster")
    options = parser.parse_args()
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"no mode {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    for name in options.modes or ("hethub", "joint", "families", "times"):
        MODES[name](options)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
