"""Published collectives by size and number of ranks, beside what predictions take for them.

    python benchmarks/collectives.py [DATA]

DATA holds `microbenchmarks.csv` (default ../shared/data): bus bandwidths of all-reduces and all-gathers, one node and
many. Prints predicted over measured bandwidth. The predictor's link constants are fitted on whole training steps; none of
these rows moved one.
"""

import csv
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean

from hethub.predictor.cost.links import Network
from hethub.spec.cluster import ClusterSpec

UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZES = ((0.0, "below 1 MB"), (1e6, "1 to 16 MB"), (16e6, "16 to 256 MB"), (256e6, "256 MB and more"))
PASSES = {"all-reduce": 2, "all-gather": 1}


def main(data: Path) -> None:
    ratios = defaultdict[tuple[str, str, int], dict[str, list[float]]](lambda: defaultdict(list))
    with (data / "microbenchmarks.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            ranks = re.search(r"(\d+) GPUs", row["what"])
            operation = next((name for name in PASSES if name in row["what"]), None)
            if ranks is None or operation is None:
                continue
            how = next((f", {way}" for way in ("ring", "NVLS") if way in row["what"]), "")
            number, unit = re.fullmatch(r"([\d.]+)([A-Za-z]+)", row["shape_or_bytes"]).groups()  # type: ignore[union-attr]
            num_bytes, size = float(number) * UNITS[unit], int(ranks[1])
            name = [title for least, title in SIZES if num_bytes >= least][-1]
            ratio = bandwidth(row["accelerator"], operation, num_bytes, size) / float(row["value"])
            ratios[row["accelerator"], operation + how, size][name].append(ratio)
    print("| accelerator | collective | ranks | " + " | ".join(title for _, title in SIZES) + " |")
    print("|---|---|---|" + "---|" * len(SIZES))
    for (accelerator, operation, size), own in ratios.items():
        cells = (f"{geometric_mean(own[title]):.2f}" if own[title] else "" for _, title in SIZES)
        print(f"| {accelerator} | {operation} | {size} | " + " | ".join(cells) + " |")


def bandwidth(accelerator: str, operation: str, num_bytes: float, ranks: int) -> float:
    """Predicted GB/s of bus bandwidth, on nodes of eight with eight cards of 400 Gbit/s, as the tables have them."""
    node = {"name": "n", "count": max(1, ranks // 8), "accelerator": accelerator, "accelerators": min(ranks, 8)}
    found = Network(ClusterSpec.model_validate({"name": "t", "nodes": [{**node, "nics": 8, "gbps_per_nic": 400}]}))
    group = found.group(range(ranks))
    seconds = (found.all_reduce if operation == "all-reduce" else found.all_gather)(group, num_bytes)
    return PASSES[operation] * num_bytes * (ranks - 1) / ranks / seconds / 1e9


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "shared" / "data")
