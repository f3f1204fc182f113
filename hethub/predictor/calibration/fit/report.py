"""What a fit prints: how well rows are priced that it saw, that it did not, and sources and accelerators left out."""

import random

import numpy as np

from hethub.predictor.calibration.evaluate import Repricer
from hethub.predictor.calibration.fit.layers import cross_validate
from hethub.predictor.calibration.fit.steps import Linear, refit_without
from hethub.predictor.calibration.sources.layer_times import LayerRow, LayerTable
from hethub.predictor.calibration.sources.training_steps import Case
from hethub.predictor.calibration.validation.errors import sweeps
from hethub.predictor.calibration.validation.goals import group_means
from hethub.predictor.cost.constants import Constants
from hethub.predictor.cost.intervals import widths

FOLDS = 5


def folds(groups: list[str], seed: int = 0) -> np.ndarray:
    """A fold for every row; equal groups share one."""
    names = sorted(set(groups))
    random.Random(seed).shuffle(names)
    number = {name: index % FOLDS for index, name in enumerate(names)}
    return np.array([number[group] for group in groups])


def coverage(errors: np.ndarray, stacks: list[str], fold: np.ndarray) -> float:
    """The fraction of rows inside intervals whose widths come from the other folds."""
    inside = np.zeros(len(errors), dtype=bool)
    for number in range(FOLDS):
        others = np.flatnonzero(fold != number)
        table = widths(errors[others].tolist(), [stacks[row] for row in others], [0.0], [0.0])
        for row in np.flatnonzero(fold == number):
            inside[row] = abs(errors[row]) <= table.get(f"stack {stacks[row]}", table["known"])
    return float(inside.mean())


def report_layers(start: Constants, rows: list[LayerRow], constants: Constants) -> tuple[np.ndarray, dict[str, float]]:
    """Prints how well layers are priced; returns the log errors of rows whose accelerator was left out, and figures.

    `start` is what a fit begins with.
    """
    measured = LayerTable.of(rows).measured
    grouped = {row.group: fold for row, fold in zip(rows, folds([row.group for row in rows]), strict=True)}
    names = sorted({row.accelerator.name for row in rows})
    seen = LayerTable.of(rows).predict(constants)
    crossed = cross_validate(start, rows, grouped, "group")
    left_out = cross_validate(start, rows, {name: index for index, name in enumerate(names)}, "accelerator")
    print(f"layer_times.csv: {len(rows)} transformer rows; mean |error| of forward + backward")
    figures = {}
    for what, key, seconds in (
        ("in the fit", "layer times, in the fit", seen),
        ("cross-validated by model x accelerator", "layer times", crossed),
        ("accelerator left out", "layer times, accelerator left out", left_out),
    ):
        total = np.abs(seconds.sum(0) / measured.sum(0) - 1)
        figures[key] = 100 * float(total.mean())
        single = np.abs(seconds / measured - 1).mean()
        print(f"  {what:<40} {100 * total.mean():5.1f} %   (forward and backward apart {100 * single:.1f} %)")
    errors = np.log(left_out.sum(0) / measured.sum(0))
    for name in names:
        own = [index for index, row in enumerate(rows) if row.accelerator.name == name]
        print(f"    without {name:<20} {100 * np.abs(np.expm1(errors[own])).mean():5.1f} %  ({len(own)} rows)")
    return errors, figures


def leave_sources_out(
    base: Constants, linear: Linear, cases: list[Case], repricers: list[Repricer]
) -> tuple[np.ndarray, np.ndarray]:
    """Log errors of every row by a fit without its source: with its stack factor set on three rows, and with
    nothing."""
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
    """Prints the mean |error| of every source in per cent, and the sweeps; returns the figures that stay on record."""
    print(f"  {'source':<44} rows   in fit   cross-validated   left out, stack set on 3   left out")
    figures, table = {}, {}
    for source in sorted({case.source for case in cases}):
        own = [index for index, case in enumerate(cases) if case.source == source]
        row = [100 * float(np.abs(np.expm1(errors[own])).mean()) for errors in (inside, crossed, *unseen)]
        figures[f"{source} (cross-validated MAPE, %)"] = row[1]
        print(f"  {source[:44]:<44} {len(own):4} {row[0]:8.1f} {row[1]:17.1f} {row[2]:26.1f} {row[3]:10.1f}")
        if not source.endswith("single node"):  # composed, not measured
            table[source] = row
    print(
        f"  {'mean of the measured sources':<49} " + " ".join(f"{x:8.1f}" for x in np.mean([*table.values()], axis=0))
    )
    figures |= group_means({source: row[1] for source, row in table.items()})
    factored = [row[2] for row in table.values()]
    figures |= {"source left out": float(np.mean(factored)), "source left out, worst": max(factored)}
    seconds = np.exp(crossed) * [case.measured_seconds for case in cases]
    ranked = [
        sweep
        for sweep in sweeps(list(zip(cases, seconds.tolist(), strict=True)))
        if not sweep["source"].endswith("single node")
    ]
    for sweep in ranked:
        print(f"  sweep {sweep['source'][:20]:<20} {sweep['model']:<16} {sweep['plans']:3} plans: rank correlation "
              f"{sweep['spearman']:.3f}, regret {sweep['regret_percent']:.1f} %")  # fmt: skip
    correlations = [sweep["spearman"] for sweep in ranked]
    figures |= {"spearman, mean": float(np.mean(correlations)), "spearman, worst": min(correlations)}
    return figures | {"regret, worst": max(sweep["regret_percent"] for sweep in ranked)}


def report_accelerators(base: Constants, linear: Linear, cases: list[Case], repricers: list[Repricer]) -> None:
    """Prints how well steps are priced on accelerators that no step of the fit ran on (layer times may know them)."""
    names = sorted({case.row["accelerator"] for case in cases})
    for name in names:
        out = np.array([index for index, case in enumerate(cases) if case.row["accelerator"] == name])
        held = refit_without(base, linear, cases, repricers, out)
        ratio = np.array([repricers[row].seconds(held) / cases[row].measured_seconds for row in out])
        print(f"    steps without {name:<24} {100 * np.abs(ratio - 1).mean():5.1f} %, mean {100 * (ratio.mean() - 1):+.1f} %"
              f"  ({len(out)} rows)")  # fmt: skip
