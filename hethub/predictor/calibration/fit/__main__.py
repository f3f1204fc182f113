"""`python -m hethub.predictor.calibration.fit [DATA] [--out FILE]`: the packaged constants from measured data.

DATA holds `layer_times.csv`, `microbenchmarks.csv`, `measured_steps.csv` and `measured_steps_2.csv` (default
../shared/data). Rooflines are fitted on layers and products, links on collectives, and what both leave open on whole
steps: by architecture, accelerator and precision, with one factor per software stack. No constant belongs to a
source, model or row. What it prints leaves out families of sources, then sources.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hethub.predictor.calibration.evaluate import Repricer
from hethub.predictor.calibration.fit.layers import fit_layers
from hethub.predictor.calibration.fit.links import fit_links, rings, unseen_links
from hethub.predictor.calibration.fit.report import as_record, report_intervals, report_unseen, unseen
from hethub.predictor.calibration.fit.steps import fit_steps, price
from hethub.predictor.calibration.sources.collectives import read_collectives
from hethub.predictor.calibration.sources.layer_times import LayerRow, LayerTable, read_layer_times
from hethub.predictor.calibration.sources.products import read_products
from hethub.predictor.calibration.sources.single_node import read_single_node
from hethub.predictor.calibration.sources.training_steps import Case, read_table
from hethub.predictor.calibration.validation.families import (
    anchored,
    family_of,
    log_measured,
    macro,
    percent,
    quantile,
)
from hethub.predictor.cost.constants import Constants, packaged
from hethub.predictor.cost.intervals import half_width

TABLES = ("measured_steps.csv", "measured_steps_2.csv")
# What no table of ours tells of AMD's: a GCD's products reach about 145 of 191 TFLOP/s (AMD's and Frontier's published
# GEMM benchmarks). FlashAttention 2 alone reaches 0.251 of MI300X's peak where 0.575 of A100's and 0.332 of H100's and
# H200's (Azure AI benchmarking guides); those two architectures' attention in whole steps is fitted at -0.40 and -0.80, so
# that AMD's should be at -0.40 + log(0.251 / 0.575) = -1.23 and at -0.80 + log(0.251 / 0.332) = -1.08.
ATTENTION_OF_CDNA3 = -1.15
ASSUMED_ARCHITECTURES = {
    "cdna fp16": {"log_scale": 0.0, "throttle": 0.0, "log_matmul": -0.27, "log_attention": -0.4},
    "cdna3 fp16": {"log_scale": 0.0, "throttle": 0.0, "log_attention": ATTENTION_OF_CDNA3},
    "cdna4 fp16": {"log_scale": 0.0, "throttle": 0.0, "log_attention": ATTENTION_OF_CDNA3},
}


def start_constants() -> Constants:
    """The packaged constants without what fits fill in, so that a fit does not depend on the one before."""
    old = packaged()
    of_cpus = {key: values for key, values in old.architectures.items() if key.startswith("cpu")}
    return replace(
        old, architectures=of_cpus | ASSUMED_ARCHITECTURES, accelerators={}, stacks={}, interval={}, residuals={}
    )


def read_cases(data: Path) -> list[Case]:
    """The sound rows of both tables of steps."""
    cases, skipped = [], []
    for name in TABLES:
        found, refused = read_table(data / name)
        cases += [case for case in found if not case.suspect]
        skipped += refused
    inferred = sum(bool(case.inferred) for case in cases)
    print(
        f"{len(cases)} steps, suspects left out; {len(skipped)} skipped: {'; '.join(sorted({row['why'] for row in skipped}))}"
    )
    print(f"{inferred} of them leave open what is inferred as their makers would have set it")
    return cases


def read_composed(data: Path) -> list[Case]:
    """One step of every shape of a layer in vTrain's single-node set: learned from, as layer times of that software,
    but not among the steps that predictions are judged by."""
    shapes: dict[tuple[str, ...], Case] = {}
    for case in read_single_node(data / "single_node_steps_a100.csv")[0]:
        shapes.setdefault(tuple(case.row[key] for key in ("hidden", "tp", "micro_batch")), case)
    return list(shapes.values())


def repricers_of(cases: Sequence[Case], constants: Constants) -> list[Repricer]:
    """One for each row; rows that differ in nothing but their time share theirs."""
    shared: dict[tuple[str, ...], Repricer] = {}
    found = []
    for case in cases:
        ignored = ("id", "source", "note", "step_seconds", "peak_memory_gib", "derived")
        key = tuple(value for column, value in case.row.items() if column not in ignored)
        if key not in shared:
            shared[key] = Repricer(case, constants)
        found.append(shared[key])
    return found


def fit_all(data: Path) -> Constants:
    """The constants fitted on a folder of tables; prints what they are worth on the way."""
    layers = [row for row in read_layer_times(data / "layer_times.csv") if row.is_transformer]
    products = read_products(data / "microbenchmarks.csv")
    collectives = rings(read_collectives(data / "microbenchmarks.csv"))
    of_layers = fit_layers(start_constants(), layers, products)
    base = fit_links(of_layers, collectives)
    table = LayerTable.of(layers)
    in_fit = float(percent(np.log(table.predict(base).sum(0) / table.measured.sum(0))).mean())
    print(f"{len(layers)} layer times and {len(products)} matrix products: layers within {in_fit:.1f} % in the fit")
    of_links = float(percent(unseen_links(of_layers, collectives)).mean())
    print(f"{len(collectives)} collectives: {of_links:.1f} % off with their source left out")
    cases = read_cases(data)
    repricers = repricers_of(cases, base)
    learned = cases + read_composed(data)
    all_repricers = repricers + repricers_of(learned[len(cases) :], base)
    constants, linear = fit_steps(base, learned, all_repricers)
    all_sources = [case.source for case in learned]
    all_families = [family_of(source) for source in all_sources]
    sources, families = all_sources[: len(cases)], all_families[: len(cases)]
    inside = price(repricers, constants, range(len(cases))) - log_measured(cases)
    by_family = unseen(base, linear, learned, all_repricers, all_families)[: len(cases)]
    by_source = unseen(base, linear, learned, all_repricers, all_sources)[: len(cases)]
    figures = report_unseen(cases, by_family, by_source) | report_intervals(by_family, families)
    figures |= {"layer times, in the fit": in_fit, "steps, in the fit": macro(inside, sources)[0]}
    figures |= {"collectives, source out": of_links}
    alone = only_of_one_family(cases, families)
    interval = {
        "known": quantile(by_source, sources),
        "unseen stack": quantile(by_family, families),
        "unseen accelerator": quantile(by_family[alone], [families[row] for row in np.flatnonzero(alone)]),
        "row known": anchored_width(by_source, sources),
        "profiled": profiled_width(layers, base, cases, inside),
    }
    return replace(
        constants,
        interval=interval,
        residuals=as_record(figures),
        provenance=f"fitted by hethub.predictor.calibration.fit on {len(layers)} layer times, {len(products)} matrix "
        f"products, {len(collectives)} collectives and {len(cases)} training steps, published measurements",
    )


def only_of_one_family(cases: Sequence[Case], families: Sequence[str]) -> np.ndarray:
    """Rows whose accelerator no other family ran on: with theirs left out, no step on it was seen."""
    names = [case.accelerator.name for case in cases]
    own: dict[str, set[str]] = {}
    for name, one in zip(names, families, strict=True):
        own.setdefault(name, set()).add(one)
    return np.array([len(own[name]) == 1 for name in names])


def anchored_width(errors: np.ndarray, sources: Sequence[str]) -> float:
    """The half width of a prediction where a step of the same source is known, any of those of five steps or more."""
    left = anchored(errors, sources, 1)
    return quantile(np.concatenate(list(left.values())), [source for source, own in left.items() for _ in own])


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
