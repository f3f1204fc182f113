"""`python -m hethub.predictor.calibration.fit [DATA] [--out FILE]`: the packaged constants from measured data, with
residuals.

DATA holds `layer_times.csv` and `measured_steps.csv` (default ../shared/data). Constants are fitted by architecture
family, accelerator, precision and link level, with one factor per software stack; none belongs to a source, model or
row. Cross-validation leaves out a fifth of the (model × accelerator) groups at a time.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hethub.predictor.calibration.evaluate import Repricer
from hethub.predictor.calibration.fit.layers import fit_layers
from hethub.predictor.calibration.fit.report import (
    FOLDS,
    coverage,
    folds,
    leave_sources_out,
    report_accelerators,
    report_layers,
    report_steps,
)
from hethub.predictor.calibration.fit.steps import fit_steps, refit_without
from hethub.predictor.calibration.sources.layer_times import LayerRow, LayerTable, read_layer_times
from hethub.predictor.calibration.sources.single_node import read_single_node
from hethub.predictor.calibration.sources.training_steps import Case, read_table
from hethub.predictor.cost.constants import Constants, packaged
from hethub.predictor.cost.intervals import half_width, widths

# Of vTrain's composed steps (sources.single_node) one of each layer shape, every second of those: 30 rows.
COMPOSED_LAYERS, COMPOSED_STRIDE = 24, 2


# AMD's half-precision products reach less of the sheet's peak than others': power-capped clocks. From published GEMM
# benchmarks: MI300X 620 to 750 of 1,307 TFLOP/s in bf16 (SemiAnalysis, December 2024; ROCm release notes since), an
# MI250X GCD about 145 of 191; CDNA 4 assumed between. Fused attention: a third of the peak at best.
ASSUMED_FAMILIES = {
    "cdna fp16": {"log_scale": 0.15, "throttle": 0.0, "log_attention": -0.4},
    "cdna3 fp16": {"log_scale": 0.4, "throttle": 0.0, "log_attention": -0.2},
    "cdna4 fp16": {"log_scale": 0.3, "throttle": 0.0, "log_attention": -0.2},
}


def start_constants() -> Constants:
    """The packaged constants without what fits fill in, so that a fit does not depend on the one before."""
    old = packaged()
    families = {key: values for key, values in old.families.items() if key.startswith("cpu")} | ASSUMED_FAMILIES
    return replace(old, families=families, accelerators={}, stacks={}, interval={}, residuals={})


def fit_all(data: Path) -> Constants:
    """The constants fitted on a folder of tables; prints residuals on the way."""
    layers = [row for row in read_layer_times(data / "layer_times.csv") if row.is_transformer]
    base = fit_layers(start_constants(), layers)
    unseen_accelerator, figures = report_layers(start_constants(), layers, base)
    cases, skipped = read_table(data / "measured_steps.csv")
    cases = [case for case in cases if not case.suspect]
    cases += composed_cases(data / "single_node_steps_a100.csv")
    print(f"\nmeasured_steps.csv: {len(cases)} rows, {len(skipped)} skipped, suspects left out")
    repricers = [Repricer(case, base) for case in cases]
    constants, linear = fit_steps(base, cases, repricers)
    fold = folds([case.group for case in cases])
    inside = log_errors(constants, cases, repricers, np.arange(len(cases)))
    crossed = np.zeros(len(cases))
    for number in range(FOLDS):
        out = np.flatnonzero(fold == number)
        held = refit_without(base, linear, cases, repricers, out)
        crossed[out] = log_errors(held, cases, repricers, out)
    unseen = leave_sources_out(base, linear, cases, repricers)
    figures |= report_steps(cases, inside, crossed, unseen)
    report_accelerators(base, linear, cases, repricers)
    stacks = [case.software.stack for case in cases]
    figures["coverage"] = 100.0 * coverage(crossed, stacks, fold)
    print(f"  80 % intervals, their widths from the other folds, cover {figures['coverage']:.0f} % of the rows")
    interval = widths(crossed.tolist(), stacks, unseen[1].tolist(), unseen_accelerator.tolist())
    return replace(
        constants,
        interval=interval | {"profiled": profiled_width(layers, base, cases, inside)},
        residuals={key: round(value, 3) for key, value in figures.items()},
        provenance=f"fitted by hethub.predictor.calibration.fit on {len(layers)} layer times and {len(cases)} training steps, "
        "published measurements",
    )


def log_errors(
    constants: Constants, cases: Sequence[Case], repricers: Sequence[Repricer], rows: np.ndarray
) -> np.ndarray:
    """Logarithms of predicted over measured seconds of some rows."""
    return np.array([np.log(repricers[row].seconds(constants) / cases[row].measured_seconds) for row in rows])


def profiled_width(rows: Sequence[LayerRow], constants: Constants, cases: Sequence[Case], inside: np.ndarray) -> float:
    """The half width of a prediction whose layers were profiled: two independent sources of error, added in squares.

    Layer times that a profile did not take are interpolated: measured with every micro-batch left out between its
    neighbours. What a plan adds to right layer times (pipelines, links, reductions) is what remains of the fitted
    steps' errors within one model, accelerator and stack.
    """
    groups: dict[tuple[str, str], list[float]] = {}
    for case, error in zip(cases, inside, strict=True):
        groups.setdefault((case.group, case.software.stack), []).append(float(error))
    composed = [error - float(np.median(own)) for own in groups.values() if len(own) > 2 for error in own]
    return float(np.hypot(half_width(interpolation_errors(rows, constants)), half_width(composed)))


def interpolation_errors(rows: Sequence[LayerRow], constants: Constants) -> list[float]:
    """Log errors of layer times interpolated as a profile interpolates: measured over estimated, linear in log
    samples."""
    table = LayerTable.of(list(rows))
    ratios = np.log(table.measured.sum(0) / table.predict(constants).sum(0))
    sweeps: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for row, ratio in zip(rows, ratios, strict=True):
        sweeps.setdefault((row.group, row.seq_len, row.precision), []).append((np.log(row.micro_batch), float(ratio)))
    errors = []
    for sweep in sweeps.values():
        sizes, values = map(np.array, zip(*sorted(sweep), strict=True))
        errors += [
            float(values[i] - np.interp(sizes[i], np.delete(sizes, i), np.delete(values, i)))
            for i in range(1, len(sizes) - 1)
        ]
    return errors


def composed_cases(path: Path) -> list[Case]:
    """Composed steps of one rank or one tensor-parallel group: what they tell of layers and their launches."""
    rows = [case for case in read_single_node(path)[0] if case.row["dp"] == case.row["pp"] == "1"]
    return [case for case in rows if int(case.row["layers"]) == COMPOSED_LAYERS][::COMPOSED_STRIDE]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hethub.predictor.calibration.fit", description=__doc__.split("\n")[0]
    )
    parser.add_argument("data", nargs="?", type=Path, default=Path("../shared/data"), help="folder with the tables")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[2] / "cost" / "constants.json", help="where the constants go"
    )
    args = parser.parse_args()
    constants = fit_all(args.data)
    ranges = ", ".join(f"{key} ±{100 * np.expm1(value):.0f} %" for key, value in constants.interval.items())
    print(f"\n{constants.count} constants; 80 % interval: {ranges}")
    args.out.write_text(json.dumps(rounded(constants.to_dict()), indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.out}")


def rounded(value: object) -> object:
    """Floats with five significant digits: what a fit is sure of, and a readable diff."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
