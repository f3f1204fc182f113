"""How long the planner searches, in fresh processes: the rows and the picture of `python benchmarks/planner.py times
growth`.

Times are from the start of a process to its answer with both bounds; search_seconds, of these, from parsed specs.
`python benchmarks/search_times.py COUNT SEED EXPLAIN` prints one search as JSON.
"""

import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hethub.commands.common import processors  # noqa: E402
from hethub.planner import plan  # noqa: E402
from hethub.planner.problem.problem import Batch  # noqa: E402
from hethub.planner.problem.scaled import Scale, scaled  # noqa: E402
from hethub.report.drawing import COLOURS, svg, text  # noqa: E402
from hethub.spec.cluster import ClusterSpec, load_cluster  # noqa: E402
from hethub.spec.lookup import load_model  # noqa: E402
from hethub.spec.model import ModelSpec  # noqa: E402

TO_REACH = {64: 3.0, 320: 3.0, 768: 4.0, 10240: 30.0, 102400: 120.0}  # seconds
SIZES = (8, 16, 32, 64, 128, 320, 768, 2048, 10240)
UNSEEN = 3  # clusters of equal size with random speeds
MOST_EXPLAIN = 5.0  # times a plain plan
PICTURE = ROOT / "docs" / "search_time.svg"

Verdict = Callable[..., None]


class Question(NamedTuple):
    """What is planned."""

    model: ModelSpec
    cluster: ClusterSpec
    batch: Batch


def model_named(name: str) -> ModelSpec:
    return load_model(f"configs/models/{name}.yaml", ROOT)


def cluster_named(name: str) -> ClusterSpec:
    return load_cluster(ROOT / "configs/clusters" / f"{name}.yaml")


def question(count: int, alike: bool = False) -> Question:
    """The question of a size: one of its own for 64, 320 and 768 accelerators, else (and where `alike`, always) four
    device types in three regions."""
    if count == 64 and not alike:
        return Question(model_named("llama-7b"), cluster_named("zorse-b"), Batch(1024, 1024, "fp16"))
    if count == 768 and not alike:
        return Question(model_named("llama-140b"), cluster_named("hethub-768"), Batch(2048, 4096, "bf16"))
    if count == 320 and not alike:
        return Question(model_named("llama-33b"), _two_kinds(), Batch(1024, 2048, "fp16"))
    name = "llama3-8b" if count <= 32 else "llama3-70b" if count < 2048 else "llama3-405b"
    return Question(model_named(name), _four_kinds(count), Batch(min(4096, 32 * count), 8192, "bf16"))


def _two_kinds() -> ClusterSpec:
    shape = {"count": 20, "accelerators": 8, "gbps_per_nic": 100}
    nodes = [
        {"name": "a100", "accelerator": "A100-SXM4-40GB", "nics": 4, **shape},
        {"name": "v100", "accelerator": "V100-SXM2-16GB", "nics": 1, **shape},
    ]
    return ClusterSpec.model_validate({"name": "two of 160", "nodes": nodes})


def _four_kinds(count: int) -> ClusterSpec:
    places = {"h100": "west", "a100": "west", "mi300x": "east", "mi250x": "north"}
    names = ("H100-SXM5-80GB", "A100-SXM4-80GB", "MI300X", "MI250X-GCD")
    each = min(8, count // 4)
    shape = {"count": count // (4 * each), "accelerators": each, "nics": each, "gbps_per_nic": 200}
    nodes = [{"name": n, "accelerator": a, **shape} for n, a in zip(places, names, strict=True)]
    gbps = [[10000 if i == j else 400 for j in range(3)] for i in range(3)]
    regions = {"names": ["west", "east", "north"], "of_node": places, "gbps": gbps}
    links = {"regions": regions, "between_islands": {"gbps_per_node": 200}}
    return ClusterSpec.model_validate({"name": f"four kinds, {count}", "nodes": nodes, "links": links})


def random_speeds(cluster: ClusterSpec, seed: int) -> ClusterSpec:
    """The cluster with every device type's compute scaled at random."""
    draw = random.Random(seed)
    names = dict.fromkeys(node.device.name for node in cluster.nodes)
    return scaled(cluster, Scale(compute={name: draw.uniform(0.5, 2.0) for name in names}))


def one(count: int, seed: int, explain: bool, alike: bool) -> dict[str, float]:
    """Seconds from parsed specs to the plan with both bounds, in this process."""
    model, cluster, batch = question(count, alike)
    if seed:
        cluster = random_speeds(cluster, seed)
    wall, cpu = time.perf_counter(), time.process_time()
    found = plan(model, cluster, batch, explain=explain, processes=processors())
    return {
        "seconds": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "bound": found.prediction.percent_of_makers_alone or 0.0,
    }


def fresh(count: int, seed: int = 0, explain: bool = False, alike: bool = False) -> dict[str, float]:
    """The same in a process of its own, with `whole`: seconds from its start to its end."""
    arguments = [str(int(argument)) for argument in (count, seed, explain, alike)]
    # As where it is installed: with files of bytecode, else each process compiles hethub anew (the Makefile has it so, too).
    environment = {key: own for key, own in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True, env=environment
    )
    found: dict[str, float] = json.loads(done.stdout)
    return {**found, "whole": time.perf_counter() - started}


def _median(runs: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def times(verdict: Verdict) -> None:
    """The sizes as listed and with random speeds, and what explaining costs."""
    for count, most in TO_REACH.items():
        few = 5 if count < 10000 else 1
        for seed in range(1 + (UNSEEN if count <= 10240 else 0)):
            runs = [fresh(count, seed) for _ in range(few)]
            what = f"random speeds {seed}" if seed else "as listed"
            print(
                f"{count} accelerators, {what}: search {_median(runs, 'seconds'):.2f} s, CPU {_median(runs, 'cpu'):.2f} s, "
                f"{runs[0]['bound']:.2f} % of upper bound"
            )
            verdict(f"  start to answer, median of {few}", _median(runs, "whole"), most, at_most=True, unit=" s")
        if count > 10240:
            continue
        pairs = [(fresh(count), fresh(count, explain=True)) for _ in range(min(few, 3))]
        ratio = statistics.median(explained["seconds"] / plain["seconds"] for plain, explained in pairs)
        verdict("  --explain over a plain plan", ratio, MOST_EXPLAIN, at_most=True, unit="x")


def growth() -> None:
    """Clusters of one making over all sizes; writes the picture."""
    points = []
    for count in SIZES:
        runs = [fresh(count, alike=True) for _ in range(3 if count < 2000 else 1)]
        points.append((count, _median(runs, "seconds")))
        print(
            f"{count} accelerators of four device types: {points[-1][1]:.2f} s (CPU {_median(runs, 'cpu'):.2f} s)",
            flush=True,
        )
    (first, one_time), (last, other_time) = points[0], points[-1]
    exponent = math.log(other_time / one_time) / math.log(last / first)
    print(f"seconds grow with the number of accelerators to the power {exponent:.2f}")
    PICTURE.write_text(picture(points), encoding="utf-8")
    print(f"written to {PICTURE.relative_to(ROOT)}")


def picture(points: Sequence[tuple[int, float]]) -> str:
    """Seconds over accelerators, both in powers of ten, with the times to be reached, as an SVG file's text."""
    width, height, left, base = 760.0, 360.0, 60.0, 330.0
    least = math.floor(math.log10(min(seconds for _, seconds in points)))

    def at(count: float, seconds: float) -> tuple[float, float]:
        return left + 130 * math.log10(count), base - 90 * (math.log10(seconds) - least)

    parts = [text(left, 14, "search_seconds over the number of accelerators; red: to reach")]
    for power in range(least, 3):
        _, y = at(1, 10.0**power)
        parts.append(f'<line x1="{left:g}" x2="{width:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(text(left - 6, y + 4, f"{10.0**power:g} s", "end"))
    line = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS["compute"]}" stroke-width="2"/>')
    for count, seconds in points:
        x, y = at(count, seconds)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS["compute"]}"/>')
        parts += [text(x, base + 16, f"{count:,}", "middle"), text(x - 4, y - 6, f"{seconds:.2g}", "end")]
    for count, seconds in TO_REACH.items():
        x, y = at(count, seconds)
        parts.append(f'<rect x="{x - 8:.1f}" y="{y - 1:.1f}" width="16" height="2" fill="#c00000"/>')
    drawn = svg(width, height, parts)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="10" ', 1)


def main() -> None:
    count, *rest = map(int, sys.argv[1:5])
    seed, explain, alike = (*rest, 0, 0, 0)[:3]
    print(json.dumps(one(count, seed, bool(explain), bool(alike))))
    gc.freeze()  # as the program ends (hethub/cli.py)


if __name__ == "__main__":
    main()
