"""Published collectives by size and number of ranks, beside what predictions take for them.

    python benchmarks/collectives.py [DATA]

DATA holds `microbenchmarks.csv` (default ../shared/data): bus bandwidths of all-reduces and all-gathers, one node and
many. Prints predicted over measured bandwidth, by the packaged constants. Three of those are fitted on these rows, from a
megabyte on and without NVLS: `python -m hethub.predictor.calibration.fit` prints the error with a source left out.
"""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean

from hethub.predictor.calibration.sources.collectives import read_collectives
from hethub.predictor.cost.constants import packaged

SIZES = ((0.0, "below 1 MB"), (1e6, "1 to 16 MB"), (16e6, "16 to 256 MB"), (256e6, "256 MB and more"))


def main(data: Path) -> None:
    ratios = defaultdict[tuple[str, str, int], dict[str, list[float]]](lambda: defaultdict(list))
    for row in read_collectives(data / "microbenchmarks.csv"):
        name = [title for least, title in SIZES if row.num_bytes >= least][-1]
        operation = f"{row.operation}, {row.way}" if row.way else row.operation
        ratios[row.accelerator, operation, row.ranks][name].append(row.seconds / row.predict(packaged()))
    print("| accelerator | collective | ranks | " + " | ".join(title for _, title in SIZES) + " |")
    print("|---|---|---|" + "---|" * len(SIZES))
    for (accelerator, operation, size), own in ratios.items():
        cells = (f"{geometric_mean(own[title]):.2f}" if own[title] else "" for _, title in SIZES)
        print(f"| {accelerator} | {operation} | {size} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "shared" / "data")
