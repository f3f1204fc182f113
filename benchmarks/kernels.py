"""Staging kernels' bytes per second over the device's copy bandwidth.

    python benchmarks/kernels.py [--mebibytes 1024] [--repeats 11]

On a GPU with CuPy it measures the compiled kernels and torch's beside them; elsewhere torch's on the CPU, and says so.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hethub.kernels.compiled import kernels_for
from hethub.kernels.device import choose_device
from hethub.kernels.reference import TorchKernels
from tests.kernels.kernel_rates import Rate, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, help="size of the fp32 side (default: 1024 on a GPU, 16 on a CPU)")
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    device = choose_device(0, 1)
    mebibytes = options.mebibytes or (1024 if device.is_gpu else 16)  # in less, the host's part of a launch shows
    if not device.is_gpu:
        print("No GPU here: these are torch's kernels on the CPU, which say nothing of a GPU.")
    paths = {kernels.name: kernels for kernels in (kernels_for(device), TorchKernels())}
    columns = [measure(kernels, device, mebibytes << 18, options.repeats) for kernels in paths.values()]
    print(f"{device.name}, {mebibytes} MiB of fp32, median of {options.repeats}")
    print(f"| kernel | {' | '.join(f'{name}: GB/s (over copy)' for name in paths)} |")
    print(f"|---|{'---|' * len(paths)}")
    for rows in zip(*columns, strict=True):
        print(f"| {rows[0].kernel} | {' | '.join(map(_cell, rows))} |")


def _cell(rate: Rate) -> str:
    return f"{rate.bytes_per_second / 1e9:.1f} ({rate.over_copy:.2f})"


if __name__ == "__main__":
    main()
