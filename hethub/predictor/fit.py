"""`python -m hethub.predictor.fit [DATA] [--out FILE]`: the packaged constants from measured data, with residuals.

DATA holds `layer_times.csv` and `measured_steps.csv` (default ../shared/data). Constants are fitted by architecture
family, accelerator, precision and link level, with one factor per software stack; none belongs to a source, model or
row. Cross-validation leaves out a fifth of the (model × accelerator) groups at a time.
"""

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from hethub.predictor.constants import Constants, packaged
from hethub.predictor.evaluate import Repricer, evaluate
from hethub.predictor.fit_layers import cross_validate, fit_layers
from hethub.predictor.fit_steps import Linear, fit_steps, refit_without
from hethub.predictor.intervals import widths
from hethub.predictor.layer_table import LayerRow, LayerTable, read_layer_times
from hethub.predictor.tables import Case, read_table
from hethub.predictor.tables_more import read_single_node

FOLDS = 5
# vTrain's single-node steps are sums: at equal shapes they are linear in layers and micro-batches to the last digit, so
# they were composed from one profiled layer each. They check the fit (every 24th row) and are not in it.
SINGLE_NODE_STRIDE = 24

# AMD's half-precision products reach less of the sheet's peak than others': power-capped clocks. From published GEMM
# benchmarks: MI300X 620 to 750 of 1,307 TFLOP/s in bf16 (SemiAnalysis, December 2024; ROCm release notes since), an
# MI250X GCD about 145 of 191; CDNA 4 assumed between. Fused attention: a third of the peak at best.
ASSUMED_FAMILIES = {
    "cdna fp16": {"log_scale": 0.15, "throttle": 0.0, "log_attention": -0.4},
    "cdna3 fp16": {"log_scale": 0.4, "throttle": 0.0, "log_attention": -0.2},
    "cdna4 fp16": {"log_scale": 0.3, "throttle": 0.0, "log_attention": -0.2},
}


def folds(groups: list[str], seed: int = 0) -> np.ndarray:
    """A fold for every row; equal groups share one."""
    names = sorted(set(groups))
    random.Random(seed).shuffle(names)
    number = {name: index % FOLDS for index, name in enumerate(names)}
    return np.array([number[group] for group in groups])


def start_constants() -> Constants:
    """The packaged constants without what fits fill in, so that a fit does not depend on the one before."""
    old = packaged()
    families = {key: values for key, values in old.families.items() if key.startswith("cpu")} | ASSUMED_FAMILIES
    return replace(old, families=families, accelerators={}, stacks={}, interval={}, residuals={})


def fit_all(data: Path) -> Constants:
    """The constants fitted on a folder of tables; prints residuals on the way."""
    layers = [row for row in read_layer_times(data / "layer_times.csv") if row.is_transformer]
    base = fit_layers(start_constants(), layers)
    unseen_accelerator = report_layers(layers, base)
    cases, skipped = read_table(data / "measured_steps.csv")
    cases = [case for case in cases if not case.suspect]
    print(f"\nmeasured_steps.csv: {len(cases)} rows, {len(skipped)} skipped, suspects left out")
    repricers = [Repricer(case, base) for case in cases]
    constants, linear = fit_steps(base, cases, repricers)
    fold = folds([case.group for case in cases])
    predicted = np.zeros(len(cases))
    for number in range(FOLDS):
        out = np.flatnonzero(fold == number)
        held = refit_without(base, linear, cases, repricers, out)
        predicted[out] = [repricers[row].seconds(held) for row in out]
    errors = np.log(predicted / [case.measured_seconds for case in cases])
    inside = np.log([repricer.seconds(constants) for repricer in repricers]) - np.log(
        [case.measured_seconds for case in cases]
    )
    report_composed(data / "single_node_steps_a100.csv", constants)
    unseen = leave_sources_out(base, linear, cases, repricers)
    by_source = report_steps(cases, inside, errors, unseen)
    stacks = [case.software.stack for case in cases]
    covered = coverage(errors, stacks, fold)
    print(
        f"  80 % intervals, their widths from the other folds, cover {100 * covered:.0f} % of the cross-validated rows"
    )
    residuals = {f"{source} (cross-validated MAPE, %)": round(value, 2) for source, value in by_source.items()}
    return replace(
        constants,
        interval=widths(errors.tolist(), stacks, unseen[1].tolist(), unseen_accelerator.tolist()),
        residuals={**residuals, "coverage of the 80 % interval, %": round(100 * covered, 1)},
        provenance=f"fitted by hethub.predictor.fit on {len(layers)} layer times and {len(cases)} training steps, published measurements",
    )


def report_composed(path: Path, constants: Constants) -> None:
    """Prints how far the composed single-node steps are from predictions that never saw them."""
    cases = read_single_node(path)[::SINGLE_NODE_STRIDE]
    errors = [abs(evaluate(case, constants).seconds / case.measured_seconds - 1.0) for case in cases]
    print(f"  vTrain, single node (composed, not in the fit): {len(cases)} rows, {100 * np.mean(errors):.1f} %")


def coverage(errors: np.ndarray, stacks: list[str], fold: np.ndarray) -> float:
    """The fraction of rows inside intervals whose widths come from the other folds."""
    inside = np.zeros(len(errors), dtype=bool)
    for number in range(FOLDS):
        others = np.flatnonzero(fold != number)
        table = widths(errors[others].tolist(), [stacks[row] for row in others], [0.0], [0.0])
        for row in np.flatnonzero(fold == number):
            inside[row] = abs(errors[row]) <= table.get(f"stack {stacks[row]}", table["known"])
    return float(inside.mean())


def report_layers(rows: list[LayerRow], constants: Constants) -> np.ndarray:
    """Prints how well layers are priced; returns the logarithms of each accelerator's errors when it was left out."""
    measured = LayerTable.of(rows).measured
    grouped = {row.group: fold for row, fold in zip(rows, folds([row.group for row in rows]), strict=True)}
    names = sorted({row.accelerator.name for row in rows})
    seen = LayerTable.of(rows).predict(constants)
    crossed = cross_validate(start_constants(), rows, grouped, "group")
    left_out = cross_validate(start_constants(), rows, {name: index for index, name in enumerate(names)}, "accelerator")
    print(f"layer_times.csv: {len(rows)} transformer rows; mean |error| of forward + backward")
    for what, seconds in (
        ("in the fit", seen),
        ("cross-validated by model x accelerator", crossed),
        ("accelerator left out", left_out),
    ):
        total = np.abs(seconds.sum(0) / measured.sum(0) - 1)
        single = np.abs(seconds / measured - 1).mean()
        print(f"  {what:<40} {100 * total.mean():5.1f} %   (forward and backward apart {100 * single:.1f} %)")
    errors = np.log(left_out.sum(0) / measured.sum(0))
    for name in names:
        own = [index for index, row in enumerate(rows) if row.accelerator.name == name]
        print(f"    without {name:<20} {100 * np.abs(np.expm1(errors[own])).mean():5.1f} %  ({len(own)} rows)")
    return errors


def leave_sources_out(
    base: Constants, linear: Linear, cases: list[Case], repricers: list[Repricer]
) -> tuple[np.ndarray, np.ndarray]:
    """Log errors of every row by a fit without its source: with its stack factor set on three rows, and with nothing."""
    measured = np.log([case.measured_seconds for case in cases])
    factored, nothing = np.zeros(len(cases)), np.zeros(len(cases))
    for source in sorted({case.source for case in cases}):
        out = np.array([index for index, case in enumerate(cases) if case.source == source])
        held = refit_without(base, linear, cases, repricers, out)
        error = np.log([repricers[row].seconds(held) for row in out]) - measured[out]
        three = sorted(range(len(out)), key=lambda index: cases[out[index]].id)[:3]
        nothing[out], factored[out] = error, error - np.median(error[three])
    return factored, nothing


def report_steps(
    cases: list[Case], inside: np.ndarray, crossed: np.ndarray, unseen: tuple[np.ndarray, np.ndarray]
) -> dict[str, float]:
    """Prints the mean |error| of every source in per cent; returns the cross-validated ones."""
    print(f"  {'source':<44} rows   in fit   cross-validated   left out, stack set on 3   left out")
    result = {}
    sources = sorted({case.source for case in cases})
    table = []
    for source in sources:
        own = [index for index, case in enumerate(cases) if case.source == source]
        figures = [100 * np.abs(np.expm1(errors[own])).mean() for errors in (inside, crossed, *unseen)]
        table.append(figures)
        result[source] = float(figures[1])
        print(
            f"  {source[:44]:<44} {len(own):4} {figures[0]:8.1f} {figures[1]:17.1f} {figures[2]:26.1f} {figures[3]:10.1f}"
        )
    print(f"  {'mean of the sources':<49} " + " ".join(f"{value:8.1f}" for value in np.mean(table, axis=0)))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hethub.predictor.fit", description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=Path("../shared/data"), help="folder with the tables")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "constants.json", help="where the constants go"
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
